"""What every rank of the fault lab runs: a runner that can be told to fail.

With a process group it holds the real runner and passes the usual calls on. Without one it has no
model, and a rank starts in a fraction of a second: the wire, the loop, the launcher and the watcher
are the real ones in both. fault_lab.py starts it; the faults tell it what to do by sabotage().
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanorunner.workers.channel import Call, Channel
from nanorunner.workers.messages import (
    METHODS,
    METHODS_WITH_REPLY,
    KvRoom,
    Runner,
    RunnerConfig,
    StepHandle,
)
from nanorunner.workers.shard_checksums import Checksums

LAB_METHODS_WITH_REPLY = METHODS_WITH_REPLY | {"echo", "sabotage"}
LAB_METHODS = METHODS | LAB_METHODS_WITH_REPLY | {"note"}
KINDS = ("slow", "skip", "raise", "hang", "swap")


class Ear:
    """Stands between a rank's loop and its wire. One a process, and never in rank 0's."""

    def __init__(self) -> None:
        self.frame = 0  # the last one that was read
        self.delay_s = 0.0  # before each read, and so before each ack
        self.num_to_skip = 0  # frames that the rank will believe it has read

    def listen(self) -> None:
        """Read every frame of this process from now on."""
        read_shm = Channel.read_shm

        def read(channel: Channel, timeout_s: float = 10.0) -> Call:
            time.sleep(self.delay_s)
            channel.frame += self.num_to_skip
            self.num_to_skip = 0
            call = read_shm(channel, timeout_s)
            self.frame = call.frame
            return call

        Channel.read_shm = read  # type: ignore[method-assign, assignment]


class FaultRunner:
    """One rank's runner. inner: the real one, None without a model."""

    def __init__(self, inner: Any, rank: int, ear: Ear) -> None:
        self.inner = inner
        self.rank = rank
        self._ear = ear
        self._raises = False

    # What the lab asks.

    def echo(self, value: bytes) -> tuple[int, int, int]:
        """Return (rank, bytes that came, number of the frame that brought the last of them)."""
        self._maybe_raise()
        return self.rank, len(value), self._ear.frame

    def note(self, number: int) -> None:
        """Take a call that nobody waits for."""
        self._maybe_raise()

    def sabotage(self, rank: int, kind: str, amount: float, sign: str = "") -> None:
        """Make one rank fail: amount is seconds (slow, hang) or a layer (swap).

        sign: a file that the rank makes when it hangs, so that the lab knows.
        """
        if kind not in KINDS:
            raise ValueError(f"sabotage {kind!r}: use one of {', '.join(KINDS)}")
        if rank != self.rank:
            return
        if kind == "slow":
            self._ear.delay_s = amount
        elif kind == "skip":
            self._ear.num_to_skip = 1
        elif kind == "raise":
            self._raises = True
        elif kind == "hang":
            _hang_in_all_reduce(self.inner.group, amount, sign)
        else:
            swap_kv_heads(self.inner.model, int(amount))

    def _maybe_raise(self) -> None:
        if self._raises:
            raise MemoryError(f"the lab took rank {self.rank}'s memory away")

    # What the engine asks: passed on.

    def load_model(self) -> None:
        """Fill this rank's share of the weights."""
        self.inner.load_model()

    def profile(self) -> KvRoom:
        """Return how many KV blocks this rank has room for."""
        room: KvRoom = self.inner.profile()
        return room

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self.inner.allocate_kv(num_blocks)

    def capture(self) -> None:
        """Compile and capture."""
        self.inner.capture()

    def checksums(self) -> dict[str, Checksums]:
        """Return the checksums of the weights that this rank holds."""
        found: dict[str, Checksums] = self.inner.checksums()
        return found

    def step(self, wire: tuple[Any, ...]) -> StepHandle | None:
        """Run one step."""
        self._maybe_raise()
        handle: StepHandle | None = self.inner.step(wire)
        return handle

    def close(self) -> None:
        """Free what this rank holds."""
        if self.inner is not None:
            self.inner.close()


def make_runner(config: RunnerConfig, rank: int, group: Any) -> FaultRunner:
    """Return a rank's runner; group None: one without a model."""
    ear = Ear()
    if rank > 0:
        ear.listen()
    inner: Runner | None = None
    if group is not None:
        from nanorunner.workers import runner_factory

        inner = runner_factory.make_runner(config, rank, group)
    return FaultRunner(inner, rank, ear)


def _hang_in_all_reduce(group: Any, seconds: float, sign: str) -> None:
    """Let the next all-reduce of this rank begin, make the file, and stay in it for so long."""
    all_reduce = group.all_reduce

    def hang(x: Any) -> Any:
        group.all_reduce = all_reduce
        Path(sign).touch()
        time.sleep(seconds)
        return all_reduce(x)

    group.all_reduce = hang


def swap_kv_heads(model: Any, layer: int) -> None:
    """Swap this rank's first two KV heads of a layer, as a wrong offset in a loader would."""
    from nanorunner.kernels.linear import pack

    name = f"layers.{layer}.qkv"
    dim = model.model.head_dim
    qkv = _plain(model.parameters[name]).clone()
    for first in (model.local_heads, model.local_heads + model.local_kv_heads):  # of K, of V
        two = qkv[first * dim : (first + 2) * dim]
        two.copy_(two.roll(dim, dims=0))
    if model.parameters[name].is_mkldnn:
        qkv = pack(qkv)
    model.parameters[name] = qkv
    model.layers[layer] = replace(model.layers[layer], qkv=qkv)


def _plain(tensor: Any) -> Any:
    """Return a parameter as a plain tensor, whatever a CPU has packed it into."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor
