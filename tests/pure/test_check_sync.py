"""scripts/check_sync.py: the hot path is clean, and every kind of wait is found when planted."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    """Import a file of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hot_path = load_script("hot_path")
sync_kinds = load_script("sync_kinds")
check_sync = load_script("check_sync")

HEAD = """
class Tables:
    lengths: torch.Tensor
    rows: npt.NDArray[np.int64]

def gather(x: torch.Tensor, n: int) -> torch.Tensor: ...

def count(n: int) -> int: ...

class Runner:
    def __init__(self, tables: Tables) -> None:
        self.ids = torch.zeros(4)
        self.tables = tables

    def step(self, x: torch.Tensor, rows: Int64, n: int, place: torch.device) -> None:
        y = gather(x, n)
"""

WAITS = [
    "y.item()",
    "z = x[0].item()",
    "self.ids.tolist()",
    "self.tables.lengths.cpu()",
    "x.numpy()",
    "unheard_of(x).tolist()",
    "torch.cuda.synchronize()",
    "event.synchronize()",
    "if y.any(): pass",
    "while (x > 0).all(): pass",
    "assert x.sum() == 0, 'empty'",
    "z = 1 if self.ids[0] else 2",
    "z = n > 0 and y.max() > 3",
    "z = not x.any()",
    "z = [row for row in range(n) if x[row] > 0]",
    "bool(x)",
    "int(self.tables.lengths[0])",
    "z = float(y.sum() / 2)",
    "for i in range(x.max()): pass",
    "z = x.nonzero()",
    "z = torch.nonzero(x)",
    "z = torch.where(x > 0)",
    "z = x.unique()",
    "z = torch.masked_select(x, y > 0)",
    "z = x[y > 0]",
    "keep = (x > 0) & ~torch.isnan(y)\n        z = y[keep]",
    "self.ids[x == 1] = 0",
    "z = x.repeat_interleave(y)",
    "z = torch.tensor([n], device=place)",
    "z = torch.as_tensor(rows, device='cuda')",
    "z = torch.from_numpy(rows).to(self.device)",
    "z = torch.from_numpy(rows).to(device=place, non_blocking=True)",
    "z = torch.from_numpy(rows).pin_memory().to(self.device)",
    "z = torch.from_numpy(rows).cuda()",
    "print(x)",
    "print(f'{y}')",
    "z = f'{self.ids[0]} ids'",
    "logger.info('%s', y)",
    "z = str(x[0])",
]
FINE = [
    "z = rows.tolist()",
    "z = int(rows[0])",
    "z = self.tables.rows[rows > 0]",
    "if n > 0 and rows.any(): pass",
    "z = count(n)\n        if z: pass",
    "z = x.shape[0]\n        if z > 3: pass",
    "if x.is_cuda and x.dim() == 2 and x.dtype == torch.int64: pass",
    "if x is None or not len(rows): pass",
    "z = torch.where(x > 0, x, y)",
    "z = x[:n]\n        w = x[0, 1:]",
    "z = x.index_select(0, y)",
    "z = x.repeat_interleave(y, output_size=n)",
    "z = x.to(torch.float32)",
    "z = torch.from_numpy(rows).pin_memory().to(self.device, non_blocking=True)",
    "z = torch.zeros(n, device=place)",
    "z = torch.arange(n, device=x.device) < n",
    "print(n, rows)",
    "z = np.nonzero(rows)[0]",
    "z = np.array(rows).item()",
    "z = x.item()  # sync: the first step alone",
    "# sync: at most once a minute\n        z = x.item()",
]


def findings(line: str, name: str = "step", decorator: str = "") -> list[str]:
    """Return what is found in Runner.step when `line` stands at its end."""
    source = f"{HEAD}        {line}\n".replace("def step", f"{decorator}def {name}")
    kinds = sync_kinds.Kinds([ast.parse(source)])
    return [finding.what for finding in check_sync.check_source(source, "x.py", kinds, set())]


def test_nothing_in_the_hot_path_waits_for_the_device() -> None:
    assert [str(finding) for finding in check_sync.check_files(ROOT)] == []


@pytest.mark.parametrize("line", WAITS)
def test_a_planted_wait_is_found(line: str) -> None:
    assert findings(line), line


@pytest.mark.parametrize("line", FINE)
def test_what_does_not_wait_or_says_why_is_let_through(line: str) -> None:
    assert findings(line) == [], line


def test_references_kernels_and_cold_functions_may_wait() -> None:
    assert findings("x.item()", name="step_reference") == []
    assert findings("x.item()", decorator="@jit()\n    ") == []
    tree = ast.parse("def start() -> None: ...\ndef step() -> None: ...")
    assert [node.name for node in check_sync.hot_functions(tree, {"start"})] == ["step"]


def test_a_wait_in_a_real_step_is_found_where_it_stands() -> None:
    path = ROOT / "workers" / "model_runner.py"
    source = path.read_text(encoding="utf-8")
    start = source.index("        logits = self.graphs.replay(")
    broken = source[:start] + "        self.inputs.header.tolist()\n" + source[start:]
    kinds = sync_kinds.Kinds([ast.parse(broken)])
    (finding,) = check_sync.check_source(broken, "model_runner.py", kinds, set())
    assert (finding.function, finding.line) == ("_run", source[:start].count("\n") + 1)


def test_a_list_that_names_what_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_sync.COLD, "workers/step_output.py", {"no_such": "never"})
    with pytest.raises(ValueError, match=r"step_output\.py has no no_such"):
        check_sync.check_files(ROOT)
    with pytest.raises(ValueError, match="not there"):
        hot_path.hot_files(ROOT / "docs")
