"""What cuBLAS says of its kernels for a product: scripts/tune_products.py goes through them."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, sizeof
from ctypes import c_void_p as pointer
from typing import Any

from nanorunner.kernels.cublas_lt import (
    ATTRIBUTES,
    WORKSPACE_BYTES,
    Algorithm,
    Attribute,
    Heuristic,
    Product,
    library_version,
)

# From cublasLt.h.
MOST_WORKSPACE = 1  # an attribute of a preference
TILE_IDS, MOST_CUSTOM = 6, 7  # capabilities of an algorithm
ID_ATTRIBUTE = 0
MOST_SUGGESTIONS = 64
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "MatmulPreferenceSetAttribute": (pointer, c_int, pointer, c_size_t),
    "MatmulAlgoCapGetAttribute": (pointer, c_int, pointer, c_size_t, pointer),
    "MatmulAlgoConfigGetAttribute": (pointer, c_int, pointer, c_size_t, pointer),
}


class Kernels(Product):
    """A product whose kernels can be listed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name, kinds in ARGUMENTS.items():
            getattr(self.library, f"cublasLt{name}").argtypes = kinds

    def suggestions(self) -> list[Algorithm]:
        """Return what the library would try, its own choice first."""
        preference = pointer()
        self.call("MatmulPreferenceCreate", byref(preference))
        self.describe("MatmulPreference", preference, MOST_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        results, count = (Heuristic * MOST_SUGGESTIONS)(), c_int()
        self.call(
            "MatmulAlgoGetHeuristic", self.handle, self.operation, self.weight, self.x, self.out,
            self.out, preference, MOST_SUGGESTIONS, results, byref(count),
        )  # fmt: skip
        self.call("MatmulPreferenceDestroy", preference)
        return [self._read(result.algorithm) for result in results[: count.value]]

    def tiles(self, algorithm_id: int) -> list[int]:
        """Return the numbers of the tiles that an algorithm knows."""
        words, size = self._known(algorithm_id), c_size_t()
        self.call("MatmulAlgoCapGetAttribute", byref(words), TILE_IDS, None, 0, byref(size))
        numbers = (c_uint32 * (size.value // 4))()
        self.call(
            "MatmulAlgoCapGetAttribute", byref(words), TILE_IDS, numbers, size.value, byref(size)
        )
        return list(numbers)

    def most_custom(self, algorithm_id: int) -> int:
        """Return the largest number of an algorithm's custom option."""
        words, number, size = self._known(algorithm_id), c_uint32(), c_size_t()
        self.call(
            "MatmulAlgoCapGetAttribute", byref(words), MOST_CUSTOM, byref(number), 4, byref(size)
        )
        return int(number.value)

    def _known(self, algorithm_id: int) -> Any:
        words = self.start(algorithm_id)
        if words is None:
            raise ValueError(f"cuBLAS has no algorithm {algorithm_id} for {self.dtype}")
        return words

    def _read(self, words: Any) -> Algorithm:
        """Return an opaque algorithm by its numbers."""
        numbers = {}
        for name, attribute in {"id": Attribute(ID_ATTRIBUTE), **ATTRIBUTES}.items():
            value, size = attribute.kind(), c_size_t()
            self.call(
                "MatmulAlgoConfigGetAttribute", byref(words), attribute.number, byref(value),
                sizeof(value), byref(size),
            )  # fmt: skip
            numbers[name] = int(value.value)
        version = library_version()
        assert version is not None, "a product exists only where the library does"
        return Algorithm(library=version, **numbers)
