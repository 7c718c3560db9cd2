"""Which kernel of cuBLAS a product gets, and what the library is told of it; none of it runs here.

A row count gets the nearest entry from its own rows up to a quarter more, or none; what a run
measured is what a process reads; a table of another version is mute and says so once; and the
library, here a record of its calls, is given every number of an algorithm or none of it is used.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nanorunner.kernels import cublas_lt, product_plans
from nanorunner.kernels.cublas_lt import (
    ALIGNMENT,
    ATTRIBUTES,
    IN_FLOAT32,
    UNSPLIT,
    WORKSPACE_BYTES,
    Algorithm,
    Launch,
    Product,
    takes,
)
from nanorunner.kernels.few_rows_plans import FOLDER, Key
from nanorunner.kernels.product_plans import (
    PRODUCT,
    OwnChoice,
    ProductPlan,
    choose_product,
    load_products,
    plan_product,
    product_table,
    why_mute,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))  # as for a script that runs there

from scripts import cublas_kernels  # noqa: E402
from scripts.cublas_kernels import Kernels  # noqa: E402
from scripts.tune_products import entry_of, shapes_of  # noqa: E402
from scripts.tune_race import measured, write_table  # noqa: E402

pytestmark = pytest.mark.beside

VERSION = 130100
# No two numbers are equal, so that none can stand in another's place.
SPLIT = Algorithm(
    VERSION, id=66, tile=401, stages=35, cluster=5, splits=3, reduction=IN_FLOAT32, swizzle=1,
    custom=7, inner=9,
)  # fmt: skip
WHOLE = SPLIT._replace(splits=1, reduction=UNSPLIT)
OWN_CHOICE = OwnChoice(VERSION)
SHAPE = (4096, 12288)
MEASURED: dict[Key, tuple[ProductPlan, float]] = {
    (PRODUCT, *SHAPE, 64): (WHOLE, 29.65),
    (PRODUCT, *SHAPE, 192): (SPLIT, 36.1),
    (PRODUCT, 6144, 4096, 128): (OWN_CHOICE, 18.12),
}
PLANS = {key: plan for key, (plan, _) in MEASURED.items()}
SHIPPED = sorted(FOLDER.glob("*-products.yaml"))


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Let no test see what another has cached, of tables or of the library."""
    caches = (
        load_products, product_table, product_plans._plan, cublas_lt._library,
        cublas_lt.library_version,
    )  # fmt: skip
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    """Return a table as scripts/tune_products.py writes it."""
    path = tmp_path / "some-gpu-products.yaml"
    write_table(path, MEASURED, "kernels/product_plans.py", "scripts/tune_products.py")
    return path


def algorithm_at(rows: int) -> Algorithm:
    """Return an algorithm that tells which entry it is."""
    return WHOLE._replace(id=rows)


def table_of(plans: dict[int, ProductPlan]) -> dict[Key, ProductPlan]:
    """Return a table with an entry of SHAPE at each row count."""
    return {(PRODUCT, *SHAPE, rows): plan for rows, plan in plans.items()}


@pytest.mark.parametrize(
    ("rows", "entry"),
    [
        (64, 64), (128, 128), (127, 128), (103, 128), (102, None), (52, 64), (51, None),
        (65, None), (129, None), (256, None), (0, None), (1, None),
    ],
)  # fmt: skip
def test_rows_take_their_entry_or_the_next_with_a_quarter_more(
    rows: int, entry: int | None
) -> None:
    table = table_of({tuned: algorithm_at(tuned) for tuned in (64, 128)})
    expected = None if entry is None else algorithm_at(entry)
    assert choose_product(table, rows, *SHAPE) == expected
    assert choose_product(table, rows, *reversed(SHAPE)) is None


def test_an_entry_that_leaves_the_choice_to_cublas_hides_the_larger_ones() -> None:
    table = table_of({112: OWN_CHOICE, 128: algorithm_at(128)})
    assert choose_product(table, 112, *SHAPE) is None
    assert choose_product(table, 108, *SHAPE) is None, "128 is near enough, but 112 is nearer"
    assert choose_product(table, 113, *SHAPE) == algorithm_at(128)


@settings(max_examples=300)
@given(
    kinds=st.dictionaries(st.integers(1, 320), st.booleans(), max_size=12),
    others=st.sets(st.integers(1, 320), max_size=6),
    rows=st.integers(1, 320),
)
def test_what_is_chosen_is_the_nearest_entry_within_a_quarter(
    kinds: dict[int, bool], others: set[int], rows: int
) -> None:
    table = table_of({at: algorithm_at(at) if kind else OWN_CHOICE for at, kind in kinds.items()})
    for other in others:
        table[PRODUCT, SHAPE[0], SHAPE[1] + 1, other] = algorithm_at(1000 + other)
    chosen = choose_product(table, rows, *SHAPE)
    if chosen is not None:
        assert rows <= chosen.id <= rows + rows // 4
        assert not any(rows <= between < chosen.id for between in kinds)
    else:
        near = [tuned for tuned in kinds if rows <= tuned <= rows + rows // 4]
        assert not near or not kinds[min(near)]


def test_a_table_reads_back_as_it_was_written(table_path: Path) -> None:
    found = load_products(table_path)
    assert found == PLANS
    assert [type(plan) for plan in found.values()].count(Algorithm) == 2, "no plain tuples"
    assert found[PRODUCT, 6144, 4096, 128] == OWN_CHOICE
    assert measured(table_path, found) == MEASURED


@pytest.mark.parametrize(
    "entry",
    [
        "{op: product, out: 8, in: 8, library: 130100, id: 66, tile: 1, stages: 1, cluster: 2}",
        "{out: 8, in: 8, rows: 64, library: 130100, id: 66, tile: 1, stages: 1, cluster: 2}",
        "{op: product, out: 8, in: 8, rows: 64, library: 130100, id: 66, tile: 1, stages: 1}",
        "{op: product, out: 8, in: 8, rows: 64, library: 130100, tiles: 1}",
        "{op: product, out: 8, in: 8, rows: 64, us: 1.0}",
    ],
    ids=["without rows", "without op", "without cluster", "an unknown field", "without a version"],
)
def test_a_bad_entry_is_refused_with_its_file(table_path: Path, entry: str) -> None:
    table_path.write_text(f"{table_path.read_text()}- {entry}\n")
    with pytest.raises(ValueError, match=r"some-gpu-products\.yaml: \{.*'in': 8"):
        load_products(table_path)


def test_without_a_file_nothing_was_measured(tmp_path: Path) -> None:
    assert load_products(tmp_path / "missing-products.yaml") == {}
    assert product_table(tmp_path / "missing-products.yaml") == {}


def has_library(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    """Give this process a cuBLASLt of a version, for those who ask only that."""
    for module in (product_plans, cublas_lt, cublas_kernels):
        monkeypatch.setattr(module, "library_version", lambda: version)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a GPU whose table is table_path's."""
    monkeypatch.setattr(product_plans, "gpu_name", lambda device: "some-gpu")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("version", [VERSION + 1, 120900, None])
def test_another_version_makes_a_table_mute_and_is_named(
    table_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, version: int | None
) -> None:
    has_library(monkeypatch, version)
    assert product_table(table_path) == {}
    note = why_mute(gpu, table_path.parent)
    assert note is not None
    assert f"here is {version}," in note
    assert f"{table_path.name} was measured with {VERSION}:" in note


def test_of_a_table_of_two_versions_each_finds_its_own_entries(
    table_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after scripts/tune_products.py ran anew for some shapes alone."""
    key: Key = (PRODUCT, *SHAPE, 256)
    newer = WHOLE._replace(library=VERSION + 1)
    both = MEASURED | {key: (newer, 40.85)}
    write_table(table_path, both, "kernels/product_plans.py")
    for version, entries in ((VERSION, PLANS), (VERSION + 1, {key: newer})):
        product_table.cache_clear()
        has_library(monkeypatch, version)
        assert product_table(table_path) == entries
        assert why_mute(gpu, table_path.parent) is None


def test_a_table_of_this_version_serves_in_silence(
    table_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_library(monkeypatch, VERSION)
    assert product_table(table_path) == PLANS
    assert why_mute(gpu, table_path.parent) is None


def test_a_gpu_without_a_table_has_nothing_to_say(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_library(monkeypatch, None)
    assert why_mute(gpu, tmp_path) is None


def test_a_kernel_that_the_library_refuses_is_named_and_left_to_cublas(
    table_path: Path,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("nanorunner"), "propagate", True)  # the CLI cuts it off
    has_library(monkeypatch, VERSION)
    asked: list[Any] = []

    def refuse(*product: Any) -> bool:
        asked.append(product)
        return False

    monkeypatch.setattr(product_plans, "accepts", refuse)
    with FakeTensorMode():
        weight = torch.empty(SHAPE, dtype=torch.float16, device=gpu)
    for _ in range(3):
        assert plan_product(63, weight, table_path.parent) is None
    assert asked == [(63, SHAPE, torch.float16, gpu, WHOLE)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cuBLAS refuses Algorithm(library=130100" in line
    assert "63 rows and (4096, 12288)" in line


@pytest.mark.usefixtures("gpu")
def test_only_a_16_bit_weight_on_a_gpu_gets_an_algorithm(
    table_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(dtype: torch.dtype, device: str, rows: int = 64) -> Algorithm | None:
        with FakeTensorMode():  # its tensors are on a GPU that need not be there
            weight = torch.empty(SHAPE, dtype=dtype, device=device)
        return plan_product(rows, weight, table_path.parent)

    has_library(monkeypatch, VERSION)
    monkeypatch.setattr(product_plans, "accepts", lambda *product: True)
    assert plan(torch.bfloat16, "cuda") == plan(torch.float16, "cuda") == WHOLE
    assert plan(torch.bfloat16, "cuda", rows=192) == SPLIT
    assert plan(torch.bfloat16, "cuda", rows=128) is None
    assert plan(torch.float32, "cuda") is None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert plan(dtype, "cpu") is None


def test_a_table_is_shipped() -> None:
    assert "nvidia-h200-products.yaml" in [path.name for path in SHIPPED]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_entry_of_a_shipped_table_can_be_meant(path: Path) -> None:
    table = load_products(path)
    assert len(table) == path.read_text(encoding="utf-8").count("\n- {"), "no key is there twice"
    algorithms = [plan for plan in table.values() if isinstance(plan, Algorithm)]
    assert len({plan.library for plan in table.values()}) == 1
    for algorithm in algorithms:
        assert (algorithm.splits > 1) == (algorithm.reduction == IN_FLOAT32), algorithm
        assert algorithm.splits > 1 or algorithm.reduction == UNSPLIT, algorithm
        for name, attribute in ATTRIBUTES.items():
            number = getattr(algorithm, name)
            assert attribute.kind(number).value == number, f"{name} is cut: {algorithm}"
    for op, num_out, num_in, rows in table:
        assert op == PRODUCT
        assert 64 <= rows <= 1024
        assert (num_out, num_in) in shapes_of(("0.6b", "8b"), (1, 2), rows)


@pytest.mark.parametrize(("us", "is_better"), [(98.9, True), (99.1, False), (104.0, False)])
def test_a_gain_below_a_percent_is_left_to_cublas(us: float, is_better: bool) -> None:
    line = {"us": us, "own_us": 100.0, "library": VERSION, "algorithm": SPLIT._asdict()}
    assert entry_of(line) == ((SPLIT, us) if is_better else (OWN_CHOICE, 100.0))


def test_a_shape_without_a_right_kernel_is_left_to_cublas() -> None:
    line = {"us": 100.0, "own_us": 100.0, "library": VERSION, "algorithm": None}
    assert entry_of(line) == (OWN_CHOICE, 100.0)


@pytest.mark.parametrize("cuda", [None, "99.0"], ids=["a CPU build", "its file is not there"])
def test_a_pytorch_without_cublas_has_no_version_and_no_products(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cublas_lt.library_version() is None
    with pytest.raises(OSError, match="no cuBLASLt"):
        Product(64, *SHAPE, torch.bfloat16, 0)


def placed(rows: int, columns: int, offset_bytes: int = 0) -> torch.Tensor:
    """Return a matrix that begins so many bytes after an address that the library takes."""
    memory = torch.zeros(rows * columns + ALIGNMENT, dtype=torch.bfloat16)
    begin = (-memory.data_ptr() % ALIGNMENT + offset_bytes) // memory.itemsize
    return memory[begin : begin + rows * columns].view(rows, columns)


def test_matrices_that_lie_otherwise_are_not_taken() -> None:
    x, weight = placed(6, 128), placed(8, 128)
    assert takes(x, weight)
    assert takes(x[:2], weight)
    assert takes(x[4:], weight), "two rows are 512 bytes"
    strided = placed(6, 256)
    others = {
        "a cut of wider rows": strided[:, :128],
        "every other row": placed(12, 128)[::2],
        "overlapping rows": x.as_strided((6, 128), (64, 1)),
        "transposed": placed(128, 6).t(),
        "16 bytes on": placed(6, 128, offset_bytes=16),
        "128 bytes on": placed(6, 128, offset_bytes=128),
        "three dimensions": x.view(2, 3, 128),
        "one dimension": x.view(-1),
    }
    assert [name for name, other in others.items() if takes(other, weight)] == []
    assert not takes(x, placed(8, 256)[:, :128])
    assert not takes(x, placed(128, 8).t())
    assert not takes(x, placed(8, 128, offset_bytes=128))


class RecordedLibrary:
    """A cuBLASLt that computes nothing: it keeps what it is told, and answers as a test wants."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.attributes: dict[int, tuple[int, int]] = {}  # number: value, bytes
        self.refused: int | None = None  # the number of an attribute
        self.check_status = self.verdict_status = self.workspace_bytes = self.init_status = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        assert name.startswith("cublasLtMa"), name  # a matrix's or a product's
        return lambda *args: 0

    def cublasLtMatmulAlgoInit(self, *args: Any) -> int:
        self.ids.append(args[-2])
        return self.init_status

    def cublasLtMatmulAlgoConfigSetAttribute(
        self, words: Any, number: int, value: Any, num_bytes: int
    ) -> int:
        assert ctypes.sizeof(value._obj) == num_bytes
        self.attributes[number] = (value._obj.value, num_bytes)
        return int(number == self.refused)

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        *_, most, results, count = args
        assert len(results) == most
        count._obj.value = 2
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, words: Any, number: int, value: Any, num_bytes: int, written: Any
    ) -> int:
        assert ctypes.sizeof(value._obj) == num_bytes
        value._obj.value = 66 if number == 0 else self.attributes[number][0]
        return 0

    def cublasLtMatmulAlgoCapGetAttribute(
        self, words: Any, number: int, value: Any, num_bytes: int, written: Any
    ) -> int:
        tiles = (11, 12, 15)
        if number == 7:
            value._obj.value = 4
        elif value is None:
            written._obj.value = 4 * len(tiles)
        else:
            assert num_bytes == 4 * len(tiles)
            value[:] = tiles
        return 0

    def cublasLtMatmulAlgoCheck(self, *args: Any) -> int:
        verdict = args[-1]._obj
        verdict.status, verdict.workspace_bytes = self.verdict_status, self.workspace_bytes
        return self.check_status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> RecordedLibrary:
    """Return the library that products ask from here on."""
    recorded = RecordedLibrary()
    monkeypatch.setattr(cublas_lt, "_library", lambda: recorded)
    monkeypatch.setattr(cublas_kernels, "ARGUMENTS", {})  # types are for C functions
    monkeypatch.setattr(cublas_lt, "_handle", lambda device_index: ctypes.c_void_p())
    has_library(monkeypatch, VERSION)
    return recorded


def bind(algorithm: Algorithm) -> Launch | None:
    return Product(192, *SHAPE, torch.bfloat16, 0).bind(algorithm)


def test_the_library_gets_every_number_by_its_own_name_and_width(library: RecordedLibrary) -> None:
    assert bind(SPLIT) is not None
    assert library.ids == [66]
    assert library.attributes == {  # cublasLt.h: CUBLASLT_ALGO_CONFIG_...
        1: (401, 4),  # TILE_ID
        2: (3, 4),  # SPLITK_NUM
        3: (IN_FLOAT32, 4),  # REDUCTION_SCHEME
        4: (1, 4),  # CTA_SWIZZLING
        5: (7, 4),  # CUSTOM_OPTION
        6: (35, 4),  # STAGES_ID
        7: (9, 2),  # INNER_SHAPE_ID
        8: (5, 2),  # CLUSTER_SHAPE_ID
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        SPLIT._replace(library=VERSION + 1),
        WHOLE._replace(library=VERSION - 1),
        SPLIT._replace(reduction=UNSPLIT),
        SPLIT._replace(reduction=1),  # in place: rounded to 16 bits between two parts
        SPLIT._replace(reduction=4),  # in the output's dtype
        WHOLE._replace(reduction=IN_FLOAT32),
    ],
)
def test_another_version_and_another_sum_are_refused(
    library: RecordedLibrary, algorithm: Algorithm
) -> None:
    assert bind(algorithm) is None
    assert bind(SPLIT) is not None
    assert bind(WHOLE) is not None


@pytest.mark.parametrize("number", range(1, 9))
def test_an_attribute_that_the_library_refuses_is_the_end(
    library: RecordedLibrary, number: int
) -> None:
    library.refused = number
    assert bind(SPLIT) is None


def test_what_the_library_says_of_the_whole_is_heard(library: RecordedLibrary) -> None:
    library.check_status = 15  # not supported
    assert bind(SPLIT) is None
    library.check_status, library.verdict_status = 0, 15
    assert bind(SPLIT) is None
    library.verdict_status = 0
    assert bind(SPLIT) is not None


def test_more_workspace_than_there_is_is_refused(library: RecordedLibrary) -> None:
    library.workspace_bytes = WORKSPACE_BYTES
    launch = bind(SPLIT)
    assert launch is not None
    assert launch.workspace_bytes == WORKSPACE_BYTES
    library.workspace_bytes = WORKSPACE_BYTES + 1
    assert bind(SPLIT) is None


def test_an_algorithm_that_is_not_there_is_refused(library: RecordedLibrary) -> None:
    library.init_status = 15
    assert bind(SPLIT) is None
    with pytest.raises(ValueError, match="no algorithm 7"):
        Kernels(192, *SHAPE, torch.bfloat16, 0).tiles(7)


def test_the_tuner_reads_what_the_library_has(library: RecordedLibrary) -> None:
    kernels = Kernels(192, *SHAPE, torch.bfloat16, 0)
    assert kernels.bind(SPLIT) is not None  # now the library has its numbers
    assert kernels.suggestions() == [SPLIT, SPLIT]
    assert kernels.tiles(66) == [11, 12, 15]
    assert kernels.most_custom(66) == 4
