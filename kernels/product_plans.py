"""Which of cuBLAS's kernels multiplies: a table of measured ones, its own choice where it is mute.

scripts/tune_products.py measures and writes configs/kernels/NAME-products.yaml, NAME being the
GPU's. An entry is a weight's shape, the rows of x, the version of the library, and the kernel that
won (cublas_lt.Algorithm), if one is faster than cuBLAS's own choice:

    - {op: product, out: 4096, in: 12288, rows: 192, library: 130100, id: 66, ...}
    - {op: product, out: 6144, in: 4096, rows: 128, library: 130100, us: 18.12}

A count between two entries takes the larger one's, if that has at most a quarter more rows, for
how many tiles the rows fill decides which kernel is best. Entries of another version than the
library's are passed over: their numbers may mean something else there.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.cublas_lt import TYPES, Algorithm, accepts, library_version
from nanorunner.kernels.few_rows_plans import FOLDER, Key, gpu_name, read_table

logger = logging.getLogger("nanorunner")

PRODUCT = "product"


class OwnChoice(NamedTuple):
    """An entry that leaves the choice to cuBLAS."""

    library: int  # the version that was measured


ProductPlan = Algorithm | OwnChoice


def plan_product(rows: int, weight: torch.Tensor, folder: Path = FOLDER) -> Algorithm | None:
    """Return the kernel for rows of x times a 16-bit weight [out, in]; None: cuBLAS picks."""
    if not weight.is_cuda or weight.dtype not in TYPES:
        return None
    return _plan(rows, weight.shape, weight.dtype, weight.device, folder)


@functools.lru_cache(maxsize=4096)  # a step asks for each of its products, an eager one on the way
def _plan(
    rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, folder: Path
) -> Algorithm | None:
    table = product_table(folder / table_name(device))
    algorithm = choose_product(table, rows, *shape)
    if algorithm is not None and not accepts(rows, shape, dtype, device, algorithm):
        logger.warning(
            "cuBLAS refuses %s for %d rows and %s; it picks its own kernel there",
            algorithm,
            rows,
            tuple(shape),
        )
        return None
    return algorithm


@functools.cache
def product_table(path: Path) -> dict[Key, ProductPlan]:
    """Return the entries of a table whose numbers are those of this process's cuBLAS."""
    version = library_version()
    return {key: plan for key, plan in load_products(path).items() if plan.library == version}


def why_mute(device: torch.device, folder: Path = FOLDER) -> str | None:
    """Return why a GPU's table serves nothing here, None where it does or there is none."""
    path = folder / table_name(device)
    versions = {plan.library for plan in load_products(path).values()}
    if not versions or library_version() in versions:
        return None
    measured = ", ".join(map(str, sorted(versions)))
    return (
        f"cuBLASLt here is {library_version()}, {path.name} was measured with {measured}: cuBLAS "
        f"picks its own kernels; scripts/tune_products.py would find the best of this version"
    )


def choose_product(
    table: dict[Key, ProductPlan], rows: int, num_out: int, num_in: int
) -> Algorithm | None:
    """Return the kernel of the shape at as many rows or the next more; None: cuBLAS picks."""
    most = rows + rows // 4
    near = [key for key in table if key[1:3] == (num_out, num_in) and rows <= key[3] <= most]
    if not near:
        return None
    plan = table[min(near, key=lambda key: key[3])]
    return plan if isinstance(plan, Algorithm) else None


def table_name(device: torch.device) -> str:
    """Return the name of a GPU's table: nvidia-h200-products.yaml."""
    return f"{gpu_name(device)}-products.yaml"


@functools.cache
def load_products(path: Path) -> dict[Key, ProductPlan]:
    """Return a table, {} when there is no such file; ValueError on a bad entry."""
    return read_table(path, _plan_of, "scripts/tune_products.py")


def _plan_of(library: int, **numbers: Any) -> ProductPlan:
    return Algorithm(library, **numbers) if numbers else OwnChoice(library)
