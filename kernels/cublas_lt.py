"""x @ weight.T by a cuBLAS kernel that we name, where the one that cuBLAS picks is slower.

The library has hundreds of kernels for a product, and guesses from the shapes which is fastest. At
the row counts of a decode it often guesses wrong: down of 8B at 192 rows takes 52 us by its choice
and 36 by another of its kernels (H200). Its header cublasLt.h numbers their parts (tile, cluster,
splits of the columns, ...); an Algorithm is one such set of numbers. kernels/product_plans.py has
measured ones.

    multiply(x, weight, algorithm)     once a projection; may be captured in a CUDA graph
    Product, its bind()                the library's descriptions of a product; may it be had so?

What a number means may change from one version of the library to the next, so an Algorithm names
its version. Whatever the numbers, a kernel that the library accepts computes the product, with a
float32 sum: Algorithms that add up parts in 16 bits are refused.

Source: NVIDIA, cuBLAS documentation, "Using the cublasLt API".
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# From cublasLt.h and library_types.h.
SUM_FLOAT32, SCALE_FLOAT32 = 68, 0
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_FIRST = 3  # an attribute of a product
# Where the parts of split columns are added: nowhere, or in float32 in a workspace, in their order.
UNSPLIT, IN_FLOAT32 = 0, 2

WORKSPACE_BYTES = 32 << 20  # the most that a kernel may want; what PyTorch gives cuBLAS on Hopper
ALIGNMENT = 256  # of every matrix's address, what the library takes for granted
AlgorithmWords = c_uint64 * 8  # opaque


class Algorithm(NamedTuple):
    """One kernel of the library, by cublasLt.h's numbers for its parts."""

    library: int  # the version whose numbers these are: 130100 is 13.1.0
    id: int
    tile: int
    stages: int
    cluster: int
    splits: int = 1  # of the columns
    reduction: int = UNSPLIT
    swizzle: int = 0  # the order of the tiles
    custom: int = 0
    inner: int = 0


class Attribute(NamedTuple):
    """How cublasLt.h calls a field of Algorithm, and how wide it is."""

    number: int
    kind: type[c_uint16] | type[c_uint32] = c_uint32


ATTRIBUTES = {
    "tile": Attribute(1),
    "splits": Attribute(2),
    "reduction": Attribute(3),
    "swizzle": Attribute(4),
    "custom": Attribute(5),
    "stages": Attribute(6),
    "inner": Attribute(7, c_uint16),
    "cluster": Attribute(8, c_uint16),
}


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", AlgorithmWords),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    algorithm: Algorithm,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T as [rows, out], rounded once; weight is [out, in].

    Both are 16-bit, of one dtype and GPU, contiguous, and takes() says yes to them. out: where to
    write. ValueError where the library has no such kernel for them.
    """
    rows, num_in = x.shape
    launch = _bind(rows, len(weight), num_in, x.dtype, weight.device.index, algorithm)
    if launch is None:
        raise ValueError(f"cuBLAS refuses {algorithm} for {rows} x {num_in} x {len(weight)}")
    return launch(x, weight, out)


def accepts(
    rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, algorithm: Algorithm
) -> bool:
    """Return whether the library has such a kernel for rows of x times a weight of [out, in]."""
    return _bind(rows, *shape, dtype, device.index, algorithm) is not None


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the two are of one kind and lie in memory as multiply() wants them."""
    return (
        x.dim() == 2
        and x.dtype == weight.dtype
        and x.shape[1] == weight.shape[1]
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (x.data_ptr() | weight.data_ptr()) % ALIGNMENT
    )


@functools.cache
def library_version() -> int | None:
    """Return the version of the cuBLASLt that PyTorch has loaded, None where there is none."""
    library = _library()
    return None if library is None else int(library.cublasLtGetVersion())


class Product:
    """x [rows, in] @ weight.T [in, out] on one GPU: what the library says of its kernels for it."""

    def __init__(
        self, rows: int, num_out: int, num_in: int, dtype: torch.dtype, device_index: int
    ) -> None:
        self.shape, self.dtype = (rows, num_out, num_in), dtype
        library = _library()
        if library is None:
            raise OSError("this PyTorch has no cuBLASLt")
        self.library, self.handle = library, _handle(device_index)
        # To the library a matrix's columns lie one after the other. So it sees x and weight
        # transposed, and is asked for out.T = weight @ x.T: what it writes is out by rows.
        self.operation = pointer()
        self.call("MatmulDescCreate", byref(self.operation), SUM_FLOAT32, SCALE_FLOAT32)
        self.describe("MatmulDesc", self.operation, TRANSPOSE_FIRST, c_int(1))
        self.weight = self._matrix(num_in, num_out)
        self.x = self._matrix(num_in, rows)
        self.out = self._matrix(num_out, rows)

    def bind(self, algorithm: Algorithm) -> Launch | None:
        """Return what runs this product by an algorithm; None where the library refuses it."""
        is_split = algorithm.splits > 1
        if algorithm.library != library_version() or algorithm.reduction != (
            IN_FLOAT32 if is_split else UNSPLIT
        ):
            return None
        words = self.start(algorithm.id)
        if words is None:
            return None
        for name, attribute in ATTRIBUTES.items():
            value = attribute.kind(getattr(algorithm, name))
            if self.library.cublasLtMatmulAlgoConfigSetAttribute(
                byref(words), attribute.number, byref(value), ctypes.sizeof(value)
            ):
                return None
        verdict = Heuristic()
        status = self.library.cublasLtMatmulAlgoCheck(
            self.handle, self.operation, self.weight, self.x, self.out, self.out,
            byref(words), byref(verdict),
        )  # fmt: skip
        if status or verdict.status or verdict.workspace_bytes > WORKSPACE_BYTES:
            return None
        return Launch(self, words, verdict.workspace_bytes)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        words: Any,
        workspace_bytes: int,
    ) -> torch.Tensor:
        """Enqueue the product on the current stream."""
        rows, num_out, _ = self.shape
        if out is None:
            out = torch.empty((rows, num_out), dtype=self.dtype, device=x.device)
        assert out.is_contiguous(), "the library writes row after row"
        assert out.data_ptr() % ALIGNMENT == 0, "and takes its address to be aligned"
        assert out.shape == (rows, num_out), "an output of this product"
        assert out.dtype == self.dtype, "an output of this product"
        # From PyTorch's pool: the next kernel of this stream may have it, and so may a graph's.
        workspace = None
        if workspace_bytes:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=x.device)
        self.call(
            "Matmul", self.handle, self.operation, byref(ONE), weight.data_ptr(), self.weight,
            x.data_ptr(), self.x, byref(ZERO), out.data_ptr(), self.out, out.data_ptr(),
            self.out, byref(words), None if workspace is None else workspace.data_ptr(),
            workspace_bytes, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        return out

    def _matrix(self, num_rows: int, num_columns: int) -> pointer:
        layout, kind = pointer(), TYPES[self.dtype]
        self.call("MatrixLayoutCreate", byref(layout), kind, num_rows, num_columns, num_rows)
        return layout

    def start(self, algorithm_id: int) -> Any:
        """Return an algorithm without a configuration, None where the library has none."""
        words, kind = AlgorithmWords(), TYPES[self.dtype]
        status = self.library.cublasLtMatmulAlgoInit(
            self.handle, SUM_FLOAT32, SCALE_FLOAT32, kind, kind, kind, kind, algorithm_id,
            byref(words),
        )  # fmt: skip
        return None if status else words

    def describe(self, kind: str, thing: pointer, attribute: int, value: Any) -> None:
        """Set an attribute of one of the library's descriptions."""
        self.call(f"{kind}SetAttribute", thing, attribute, byref(value), ctypes.sizeof(value))

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library; RuntimeError when it fails."""
        status = getattr(self.library, f"cublasLt{name}")(*args)
        if status:
            raise RuntimeError(f"cublasLt{name} returned {status} for a product of {self.shape}")


@dataclass(frozen=True)
class Launch:
    """A product with its algorithm: call it with x and the weight."""

    product: Product
    words: Any
    workspace_bytes: int

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T, in `out` if there is one."""
        return self.product.run(x, weight, out, self.words, self.workspace_bytes)


ONE, ZERO = c_float(1.0), c_float(0.0)
# Those with numbers that ctypes would not pass rightly by itself: 64 bits, and addresses.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "MatrixLayoutCreate": (POINTER(pointer), c_int, c_uint64, c_uint64, c_int64),
    "MatmulDescSetAttribute": (pointer, c_int, pointer, c_size_t),
    "MatmulAlgoConfigSetAttribute": (pointer, c_int, pointer, c_size_t),
    "Matmul": (*(pointer,) * 14, c_size_t, pointer),
}


@functools.cache
def _library() -> Any:
    """Return the cuBLASLt that this PyTorch came with, None without one."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{version.split('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    for name, kinds in ARGUMENTS.items():
        getattr(library, f"cublasLt{name}").argtypes = kinds
    return library


@functools.cache
def _handle(device_index: int) -> pointer:
    """Return the library's handle for a GPU. Lifetime: the process's."""
    handle = pointer()
    with torch.cuda.device(device_index):
        status = _library().cublasLtCreate(byref(handle))
    if status:
        raise RuntimeError(f"cublasLtCreate returned {status}")
    return handle


@functools.cache  # one for each shape, dtype and number of rows that a table serves
def _bind(
    rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    device_index: int,
    algorithm: Algorithm,
) -> Launch | None:
    return Product(rows, num_out, num_in, dtype, device_index).bind(algorithm)
