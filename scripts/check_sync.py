"""Find what would make the CPU wait for the GPU in the files that every step of runner v2 runs.

    python scripts/check_sync.py

Reads source, runs nothing. hot_path.py lists the files, and the functions in them that a step does
not run. In all others these are refused: reading a device value (.item(), .tolist(), .cpu(),
.numpy(), int(), bool(), `if`, printing), operations whose result's shape depends on values
(nonzero, masks as indices), synchronize(), and copies that are not asynchronous from pinned memory.

Which names are tensors it infers from annotations and assignments; what it cannot infer it takes
for a tensor where a method like .item() is called, and for anything else where it is only tested.
A line may say why it is right all the same: `# sync: ...`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from scripts.hot_path import COLD, TYPES, hot_files
    from scripts.sync_kinds import HOST, MASK, TENSOR, Kinds, Scope
else:  # a script's own folder is where Python looks first; it is no package
    from hot_path import COLD, TYPES, hot_files
    from sync_kinds import HOST, MASK, TENSOR, Kinds, Scope

ROOT = Path(__file__).resolve().parents[1]
REASON = "# sync:"
ON_DEVICE = (TENSOR, MASK)
READS = ("item", "tolist", "cpu", "numpy")
SHAPED_BY_VALUES = ("nonzero", "masked_select", "argwhere", "unique", "unique_consecutive")
READ_BY_PYTHON = ("bool", "int", "float", "str", "repr", "range", "print")
LOGS = ("debug", "info", "warning", "error")


class Finding(NamedTuple):
    """One place that may wait."""

    path: str
    line: int
    function: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}(): {self.what}"


def check_source(source: str, path: str, kinds: Kinds, cold: set[str]) -> list[Finding]:
    """Return the findings of one file; cold: functions that no step runs."""
    lines = source.splitlines()
    findings: list[Finding] = []
    for function in hot_functions(ast.parse(source), cold):
        scope = kinds.scope(function)
        for node in scope.nodes:
            what = problem(node, scope)
            if not what:
                continue
            place = node.ifs[0] if isinstance(node, ast.comprehension) else node
            assert isinstance(place, ast.expr | ast.stmt), "what can wait stands on a line"
            if not has_reason(lines, place):
                findings.append(Finding(path, place.lineno, function.name, what))
    return findings


def hot_functions(tree: ast.Module, cold: set[str]) -> Iterator[ast.FunctionDef]:
    """Yield the file's functions but for cold ones, Triton kernels and references for the CPU."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name in cold:
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_kernel = any(text.startswith(("jit", "triton.jit")) for text in decorators)
        if not is_kernel and not node.name.endswith("_reference"):
            yield node


def has_reason(lines: list[str], node: ast.expr | ast.stmt) -> bool:
    """Return whether a line of the node, or the comment above it, says why."""
    first = node.lineno - 1
    last = node.end_lineno or node.lineno
    above = lines[first - 1] if first and lines[first - 1].lstrip().startswith("#") else ""
    return any(REASON in line for line in [above, *lines[first:last]])


def problem(node: ast.AST, scope: Scope) -> str:
    """Return why this node may make the CPU wait, "" when it does not."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return _tested(node.test, scope)
    if isinstance(node, ast.comprehension):
        return next(filter(None, (_tested(test, scope) for test in node.ifs)), "")
    if isinstance(node, ast.BoolOp):
        return next(filter(None, (_tested(value, scope) for value in node.values)), "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _tested(node.operand, scope)
    if isinstance(node, ast.FormattedValue) and scope.kind(node.value) in ON_DEVICE:
        return "text with a device value in it"
    if isinstance(node, ast.Subscript):
        is_masked = any(scope.kind(index) == MASK for index in _indices(node.slice))
        if is_masked and scope.kind(node.value) != HOST:
            return "a mask as an index: the shape depends on device values"
    if isinstance(node, ast.Call):
        return _called(node, scope)
    return ""


def _indices(index: ast.expr) -> list[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]


def _tested(test: ast.expr, scope: Scope) -> str:
    if scope.kind(test) in ON_DEVICE:
        return f"a device value decides: {ast.unparse(test)}"
    return ""


def _called(call: ast.Call, scope: Scope) -> str:
    """Return what is wrong with a call."""
    if isinstance(call.func, ast.Name):
        name = call.func.id
        if name in READ_BY_PYTHON and any(scope.kind(arg) in ON_DEVICE for arg in call.args):
            return f"{name}() of a device value"
        return ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, receiver = call.func.attr, call.func.value
    whose = ast.unparse(receiver)
    if name == "synchronize":
        return f"{whose}.synchronize()"
    if name in LOGS and any(scope.kind(arg) in ON_DEVICE for arg in call.args):
        return "a device value in the log"
    if scope.kind(receiver) == HOST or whose == "np":
        return ""
    if name in READS:
        return f".{name}() reads the device"
    if name in SHAPED_BY_VALUES or (whose == "torch" and name == "where" and len(call.args) == 1):
        return f"{name}(): the shape depends on device values"
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "repeat_interleave" and "output_size" not in keywords:
        repeats = call.args[-1] if call.args else keywords.get("repeats")
        if repeats is not None and scope.kind(repeats) in ON_DEVICE:
            return "repeat_interleave() without output_size: the shape depends on device values"
    if whose == "torch" and name in ("tensor", "as_tensor") and "device" in keywords:
        return f"torch.{name}(device=...) copies from pageable memory"
    return _copied(name, call, receiver, keywords)


def _copied(
    name: str, call: ast.Call, receiver: ast.expr, keywords: dict[str | None, ast.expr]
) -> str:
    """Return what is wrong with a call that may be a copy between CPU and GPU."""
    if name == "cuda":
        return ".cuda() copies from pageable memory"
    names_device = any("device" in ast.unparse(arg) for arg in call.args) or "device" in keywords
    if name != "to" or not names_device:
        return ""
    is_pinned = isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute)
    is_pinned = is_pinned and receiver.func.attr == "pin_memory"  # type: ignore[attr-defined]
    waits = keywords.get("non_blocking")
    if not is_pinned or not (isinstance(waits, ast.Constant) and waits.value is True):
        return ".to(device): write .pin_memory().to(device, non_blocking=True)"
    return ""


def check_files(root: Path = ROOT) -> list[Finding]:
    """Return the findings of all hot files; ValueError where the list names what is not there."""
    sources = {path: (root / path).read_text(encoding="utf-8") for path in hot_files(root)}
    types = [(root / path).read_text(encoding="utf-8") for path in TYPES]
    kinds = Kinds([ast.parse(source) for source in (*sources.values(), *types)])
    findings: list[Finding] = []
    for path, source in sources.items():
        names = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
        cold = set(COLD.get(path, ()))
        if unknown := sorted(cold - names):
            raise ValueError(f"hot_path.py: {path} has no {', '.join(unknown)}")
        findings += check_source(source, path, kinds, cold)
    return findings


def main() -> int:
    """Print the findings; return 1 when there are any."""
    findings = check_files()
    for finding in findings:
        print(finding)
    print(f"{len(findings)} place(s) where a step may wait for the device")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
