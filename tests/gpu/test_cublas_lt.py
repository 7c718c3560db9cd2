"""Products by the kernels that this GPU's table names: right, the table's own, the same in a graph.

What is measured again with scripts/tune_products.py is tested with it: the shapes and the rows come
from the table. Without one for this GPU and this cuBLASLt there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, num_unequal_replays, poison

from nanorunner.kernels.cublas_lt import UNSPLIT, Algorithm, multiply, takes
from nanorunner.kernels.few_rows_plans import FOLDER
from nanorunner.kernels.linear import linear
from nanorunner.kernels.product_plans import choose_product, product_table, table_name
from scripts.tune_check import excess, projection_truth

TABLE = product_table(FOLDER / table_name(DEVICE)) if DEVICE.type == "cuda" else {}
ALGORITHMS = {key: plan for key, plan in TABLE.items() if isinstance(plan, Algorithm)}
SHAPES = sorted({(num_out, num_in) for _, num_out, num_in, _ in ALGORITHMS})
FEWER = 8  # rows than an entry has; it serves them too
PART_ROWS = 1 << 14  # of a weight, in float64 at once: half a gigabyte

pytestmark = pytest.mark.skipif(
    not ALGORITHMS, reason="no table of products for this GPU and this version of cuBLASLt"
)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Leave other tests the memory of this one's weights: a head of 8B has 1.2 GB."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Algorithm]:
    """Return the algorithms that linear() has multiplied by."""
    algorithms: list[Algorithm] = []

    def spy(
        x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm, *out: torch.Tensor | None
    ) -> torch.Tensor:
        algorithms.append(algorithm)
        return multiply(x, weight, algorithm, *out)

    monkeypatch.setattr("nanorunner.kernels.linear.multiply", spy)
    return algorithms


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the same normal numbers for the same shape, made where they are needed."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype, device=DEVICE)


def random_weight(num_out: int, num_in: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random(num_out, num_in, dtype=dtype).mul_(num_in**-0.5)


def truth_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in float64, from a part of the weight at a time."""
    return torch.cat([projection_truth(x, part) for part in torch.split(weight, PART_ROWS)], dim=1)


def smallest_entry(*, is_split: bool) -> tuple[int, int, int, Algorithm]:
    """Return (out, in, rows, algorithm) of the smallest weight with such an entry, or skip."""
    found = [
        (num_out * num_in, num_out, num_in, rows, algorithm)
        for (_, num_out, num_in, rows), algorithm in ALGORITHMS.items()
        if (algorithm.splits > 1) == is_split
    ]
    if not found:
        pytest.skip(
            f"this GPU's table has no entry with {'split' if is_split else 'whole'} columns"
        )
    return min(found)[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_every_entry_multiplies_its_rows_and_fewer(
    num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    entries = {key[3]: plan for key, plan in ALGORITHMS.items() if key[1:3] == (num_out, num_in)}
    x = random(max(entries), num_in, dtype=dtype)
    weight = random_weight(num_out, num_in, dtype)
    truth = truth_of(x, weight)
    wrong: dict[tuple[int, Algorithm], float] = {}
    for tuned_rows, algorithm in entries.items():
        assert choose_product(TABLE, tuned_rows, num_out, num_in) == algorithm
        for rows in (tuned_rows, tuned_rows - FEWER):
            if choose_product(TABLE, rows, num_out, num_in) != algorithm:
                continue
            assert takes(x[:rows], weight)
            poison((rows, num_out), dtype)
            out = multiply(x[:rows], weight, algorithm)
            assert (out.shape, out.dtype) == ((rows, num_out), dtype)
            share = excess(out, truth[:rows])
            if share > 1.0:
                wrong[rows, algorithm] = share
    assert wrong == {}


def test_linear_multiplies_by_the_table_wherever_it_has_an_entry(
    multiplied: list[Algorithm],
) -> None:
    num_out, num_in, _, _ = smallest_entry(is_split=False)
    most_rows = max(rows for _, *shape, rows in TABLE if shape == [num_out, num_in])
    x, weight = random(most_rows + FEWER, num_in), random_weight(num_out, num_in)
    truth = truth_of(x, weight)
    by_table: set[bool] = set()
    for rows in range(1, len(x) + 1):
        algorithm = choose_product(TABLE, rows, num_out, num_in)
        by_table.add(algorithm is not None)
        multiplied.clear()
        out = linear(x[:rows], weight)
        assert multiplied == ([] if algorithm is None else [algorithm]), rows
        if algorithm is None:
            assert torch.equal(out, F.linear(x[:rows], weight)), rows
        else:
            assert excess(out, truth[:rows]) <= 1.0, rows
    assert by_table == {True, False}


def test_what_the_table_cannot_serve_is_cublass_own(multiplied: list[Algorithm]) -> None:
    num_out, num_in, rows, algorithm = smallest_entry(is_split=False)
    x, weight, bias = random(rows, num_in), random_weight(num_out, num_in), random(num_out)
    linear(x, weight)
    assert multiplied == [algorithm]
    multiplied.clear()
    later = random(rows * num_in + 8)[8:].view(rows, num_in)  # by 16 bytes
    unserved: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {
        "a bias": (x, weight, bias),
        "x not aligned": (later, weight, None),
        "x strided": (random(rows, num_in + 64)[:, :num_in], weight, None),
        "x of three dimensions": (x.view(rows, 1, num_in), weight, None),
        "weight transposed": (x, weight.t().contiguous().t(), None),
        "float32": (x.float(), weight.float(), None),
    }
    for name, arguments in unserved.items():
        assert torch.equal(linear(*arguments), F.linear(*arguments)), name
        assert multiplied == [], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_split", [True, False], ids=["split columns", "whole columns"])
def test_every_replay_of_a_graph_gives_the_bits_of_an_eager_product(
    is_split: bool, dtype: torch.dtype
) -> None:
    num_out, num_in, rows, algorithm = smallest_entry(is_split=is_split)
    weight = random_weight(num_out, num_in, dtype)
    # The second's workspace may be the first's, which the graph's pool has back by then.
    sources = [random(rows + 1, num_in, dtype=dtype)[:rows], random(rows, num_in, dtype=dtype)]
    eager = [multiply(x, weight, algorithm) for x in sources]
    assert not torch.equal(*eager)
    for x, out in zip(sources, eager, strict=True):
        assert excess(out, truth_of(x, weight)) <= 1.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [multiply(x, weight, algorithm) for x in sources]
    assert num_unequal_replays(graph, outs, eager) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"tile": 1_000_000},
        {"library": 1},
        {"splits": 2, "reduction": UNSPLIT},
        {"splits": 2, "reduction": 4},  # in the output's dtype
    ],
    ids=str,
)
def test_an_algorithm_that_is_refused_is_named_and_the_next_one_runs(
    changed: dict[str, Any],
) -> None:
    num_out, num_in, rows, algorithm = smallest_entry(is_split=False)
    x, weight = random(rows, num_in), random_weight(num_out, num_in)
    other = algorithm._replace(**changed)
    with pytest.raises(ValueError, match=f"cuBLAS refuses .*for {rows} x {num_in} x {num_out}"):
        multiply(x, weight, other)
    assert excess(multiply(x, weight, algorithm), truth_of(x, weight)) <= 1.0
