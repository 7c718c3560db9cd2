"""GPU memory that the other ranks of this host have mapped: allocation, exchange, end.

    every rank   allocates, exports a handle ---store---> opens the others' handles
                 -> one address per rank, all usable in kernels (kernels/peer_ring.py)

The CUDA driver is called by its own names: PyTorch's way to share a tensor keeps a counter of users
in a named file, which a killed process leaves behind. The ranks go through the same three rounds;
in each, one rank's problem becomes the answer of all, so either all have peer memory or none has.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from nanorunner.kernels.peer_ring import (
    ABORT,
    DEFAULT_CAPACITY,
    ERROR,
    PeerRing,
    make_table,
    ring_bytes,
)
from nanorunner.kernels.triton_support import num_processors, tl
from nanorunner.kernels.uva import uva_problem, uva_view
from nanorunner.workers.device import POLL_S, Download

IPC_HANDLE_BYTES = 64
IPC_LAZY_PEER_ACCESS = 1
FILL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0  # a kernel that gives up needs a millisecond for it
MAX_PROGRAMS = 128

logger = logging.getLogger("nanorunner")


class PeerMemoryUnavailable(RuntimeError):
    """These GPUs, or this system, do not let the ranks write into each other's memory."""


class PeerMemory:
    """One rank's share of the ring, and its way to the others'.

    ring: what the kernels take. Owner of all memory behind it: this object, until close(). Place:
    this rank's GPU, and for the two words pinned host memory. Last writers: the ranks' kernels; of
    the abort word, abort().
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        give_up_after_s: float,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        """Map everybody's memory; all ranks must do so at the same time.

        Raises PeerMemoryUnavailable on every rank, with nothing allocated, when it fails on one.
        """
        self.device = device
        self._address = 0  # of this rank's own memory
        self._mapped: list[int] = []
        self._driver: Any = None
        try:
            facts = exchange(store, "device", rank, ranks, self._first_look())
            facts = exchange(store, "handle", rank, ranks, self._allocate(facts, capacity))
            problem, peers = self._map(facts, rank)
            exchange(store, "mapped", rank, ranks, {"problem": problem})
        except BaseException:
            self._free()
            raise
        words = self._words_on_device.data_ptr()
        table = make_table(peers, words, int(give_up_after_s * 1e9), device)
        self.ring = PeerRing(
            rank=rank,
            ranks=ranks,
            capacity=capacity,
            max_programs=min(MAX_PROGRAMS, *(fact["processors"] for fact in facts)),
            table=table,
        )

    @property
    def has_given_up(self) -> bool:
        """Whether a kernel has stopped waiting: its result and all later ones are nonsense."""
        return bool(self._words[ERROR])

    def abort(self) -> None:
        """Make waiting kernels return within a millisecond; called from any thread."""
        self._words[ABORT] = 1

    def close(self) -> None:
        """Unmap and free, once the GPU has nothing more to do; a second call does nothing.

        A GPU that stays busy keeps its memory until the process ends: that is said in the log.
        """
        if not self._address:
            return
        try:
            is_idle = self._wait_until_idle()
        except RuntimeError as error:  # what a broken CUDA context answers to everything
            logger.warning("peer memory is left to the end of the process: %s", error)
            return
        if not is_idle:
            logger.warning(
                "peer memory is left to the end of the process: %s is still busy after %g s",
                self.device,
                CLOSE_TIMEOUT_S,
            )
            return
        self._free()

    def _first_look(self) -> dict[str, Any]:
        """Allocate the two words; return what the others must know before anything else is."""
        problem = "Triton is not installed" if tl is None else uva_problem(self.device)
        if not problem:
            try:
                host = torch.zeros(2, dtype=torch.int32).pin_memory()
                self._words_on_device = uva_view(host, self.device)
                self._words = host.numpy()
            except RuntimeError as error:
                problem = str(error)
        return {
            "problem": problem,
            "index": self.device.index,
            "processors": num_processors(self.device),
        }

    def _allocate(self, facts: list[dict[str, Any]], capacity: int) -> dict[str, Any]:
        """Allocate zeros if the GPUs can reach each other; return the first look and a handle."""
        own = self.device.index
        mine = next(fact for fact in facts if fact["index"] == own)
        for fact in facts:
            other = fact["index"]
            if other != own and not torch.cuda.can_device_access_peer(own, other):
                return {**mine, "problem": f"GPU {own} cannot write to GPU {other}'s memory"}
        try:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream(self.device)  # the driver calls need torch's context
                self._driver = _Driver()
                num_bytes = ring_bytes(capacity)
                self._address = self._driver.allocate(num_bytes)
                memory = _as_tensor(self._address, num_bytes, self.device)
                Download(memory.zero_()[:1]).result(FILL_TIMEOUT_S)
                handle = self._driver.export(self._address)
        except (PeerMemoryUnavailable, TimeoutError) as error:
            return {**mine, "problem": str(error)}
        return {**mine, "handle": handle.hex()}

    def _map(self, facts: list[dict[str, Any]], rank: int) -> tuple[str, list[int]]:
        """Return (problem, addresses by rank)."""
        addresses = []
        with torch.cuda.device(self.device):
            for other, fact in enumerate(facts):
                if other == rank:
                    addresses.append(self._address)
                    continue
                try:
                    address = self._driver.open(bytes.fromhex(fact["handle"]))
                except PeerMemoryUnavailable as error:
                    return f"memory of rank {other}: {error}", []
                self._mapped.append(address)
                addresses.append(address)
        return "", addresses

    def _wait_until_idle(self) -> bool:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _free(self) -> None:
        """Give everything back; what the driver refuses is said in the log and not tried again."""
        mapped, self._mapped = self._mapped, []
        address, self._address = self._address, 0
        if not address:
            return
        try:
            with torch.cuda.device(self.device):
                for other in mapped:
                    self._driver.close(other)
                self._driver.free(address)
        except PeerMemoryUnavailable as error:
            logger.warning("peer memory is left to the end of the process: %s", error)


def exchange(
    store: Store, name: str, rank: int, ranks: int, message: dict[str, Any]
) -> list[dict[str, Any]]:
    """Give all ranks this rank's message, which JSON must be able to write; return everybody's.

    Waits as long as the store does. Raises PeerMemoryUnavailable, on every rank the same, when a
    message has a "problem" that is not "".
    """
    store = PrefixStore(f"peer_memory/{name}", store)
    store.set(str(rank), json.dumps(message))
    messages = [json.loads(store.get(str(other))) for other in range(ranks)]
    for other, its_message in enumerate(messages):
        if its_message["problem"]:
            raise PeerMemoryUnavailable(f"rank {other}: {its_message['problem']}")
    return messages


class _Handle(ctypes.Structure):
    """CUipcMemHandle; the driver takes it by value."""

    _fields_ = (("data", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Driver:
    """The calls of the CUDA driver that sharing memory takes; each raises PeerMemoryUnavailable."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryUnavailable(f"the CUDA driver did not load: {error}") from error

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(IPC_LAZY_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise PeerMemoryUnavailable(f"{name}: {reason} ({code})")


class _DeviceMemory:
    """Hands torch an address through the CUDA array interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes // 8,),
            "typestr": "<i8",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _as_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return device memory as int64; the tensor does not own it."""
    return torch.as_tensor(_DeviceMemory(address, num_bytes), device=device)
