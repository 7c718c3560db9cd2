"""Which of cuBLAS's kernels multiplies: a table of measured ones, its own choice where it is mute.

scripts/tune_products.py measures and writes configs/kernels/NAME-products.yaml, NAME being the
GPU's. An entry is a weight's shape, the rows of x and the kernel that won (cublas_lt.Algorithm):

    - {op: product, out: 4096, in: 12288, rows: 192, library: 130100, id: 66, ...}
    - {op: product, out: 6144, in: 4096, rows: 128, us: 18.12}    none is faster than its own choice

A count between two entries takes the larger one's, if that has at most a quarter more rows, for
how many tiles the rows fill decides which kernel is best. The numbers are those of one version of
the library; under another the table is mute, and says so once.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.cublas_lt import TYPES, Algorithm, library_version
from nanorunner.kernels.few_rows_plans import FOLDER, Key, gpu_name, read_table

logger = logging.getLogger("nanorunner")

PRODUCT = "product"


class OwnChoice(NamedTuple):
    """An entry that leaves the choice to cuBLAS; it has no fields."""


OWN_CHOICE = OwnChoice()
Plan = Algorithm | OwnChoice


def plan_product(rows: int, weight: torch.Tensor, folder: Path = FOLDER) -> Algorithm | None:
    """Return the kernel for rows of x times a 16-bit weight [out, in]; None: cuBLAS picks."""
    if not weight.is_cuda or weight.dtype not in TYPES:
        return None
    num_out, num_in = weight.shape
    return _plan(rows, num_out, num_in, weight.device, folder)


@functools.lru_cache(maxsize=4096)  # a step asks for each of its products, an eager one on the way
def _plan(
    rows: int, num_out: int, num_in: int, device: torch.device, folder: Path
) -> Algorithm | None:
    table = product_table(folder / table_name(device))
    return choose_product(table, rows, num_out, num_in)


@functools.cache
def product_table(path: Path) -> dict[Key, Plan]:
    """Return the kernels in a table that this process's cuBLAS has numbered the same way."""
    table = load_products(path)
    version = library_version()
    versions = {plan.library for plan in table.values() if isinstance(plan, Algorithm)}
    if versions - {version}:
        logger.info(
            "cuBLASLt here is %s, %s was measured with %s: cuBLAS picks its own kernels; "
            "scripts/tune_products.py would find the best of this version",
            version,
            path.name,
            ", ".join(map(str, sorted(versions))),
        )
        return {}
    return table


def choose_product(
    table: dict[Key, Plan], rows: int, num_out: int, num_in: int
) -> Algorithm | None:
    """Return the kernel of the shape at as many rows or the next more; None: cuBLAS picks."""
    for tuned_rows in range(rows, rows + rows // 4 + 1):
        plan = table.get((PRODUCT, num_out, num_in, tuned_rows))
        if plan is not None:
            return plan if isinstance(plan, Algorithm) else None
    return None


def table_name(device: torch.device) -> str:
    """Return the name of a GPU's table: nvidia-h200-products.yaml."""
    return f"{gpu_name(device)}-products.yaml"


@functools.cache
def load_products(path: Path) -> dict[Key, Plan]:
    """Return a table, {} when there is no such file; ValueError on a bad entry."""
    return read_table(path, _plan_of, "scripts/tune_products.py")


def _plan_of(**numbers: Any) -> Plan:
    return Algorithm(**numbers) if numbers else OWN_CHOICE
