"""For check_sync.py: which expressions are device tensors, which masks, which the CPU's own.

Not a type checker: annotations, assignments in their order, and the names of fields and functions
over all files, where a name that means two things means nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

TENSOR, MASK, HOST, UNKNOWN = "tensor", "mask", "host", "?"
HOST_WORDS = (
    "int", "float", "bool", "str", "bytes", "Int32", "Int64", "Float32", "Mask", "Flags", "Rows",
    "npt.NDArray", "np.", "list[int]", "list[float]", "dict[", "Sequence[int]", "Counter", "set[",
)  # fmt: skip
# Of a tensor, known without asking the device.
METADATA = {
    "shape", "dtype", "device", "is_cuda", "is_mkldnn", "ndim", "itemsize", "type", "dim", "numel",
    "size", "stride", "element_size", "data_ptr", "is_contiguous", "is_pinned", "storage_offset",
}  # fmt: skip
COMPARING = {"isnan", "isinf", "isfinite", "isneginf", "eq", "ne", "lt", "gt", "le", "ge"}
COMPARING |= {"logical_and", "logical_or", "logical_not", "isin"}
HOST_RESULTS = {"tolist", "item", "numpy", "tobytes", "astype", "index", "count", "bit_length"}
HOST_FUNCTIONS = {"len", "int", "float", "bool", "str", "range", "max", "min", "sum", "sorted"}
HOST_FUNCTIONS |= {"list", "tuple", "set", "dict", "enumerate", "isinstance", "getattr", "round"}
TORCH_HOST = {"device", "finfo", "iinfo", "cuda", "is_tensor", "dtype", "inference_mode"}


class Kinds:
    """What fields and functions are, by their names, over all files."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.fields: dict[str, str] = {}
        self.results: dict[str, str] = {}
        functions = []
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    functions.append(node)
                    _join(self.results, node.name, annotated(node.returns))
                elif isinstance(node, ast.ClassDef):
                    for field in node.body:
                        if isinstance(field, ast.AnnAssign):
                            name = ast.unparse(field.target)
                            _join(self.fields, name, annotated(field.annotation))
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                    _join(self.fields, node.target.attr, annotated(node.annotation))
        for function in functions:  # self.x = ..., once all annotations are known
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    kind = Scope(self, function).kind(node.value)
                    if kind != UNKNOWN:
                        _join(self.fields, node.targets[0].attr, kind)

    def scope(self, function: ast.FunctionDef) -> Scope:
        """Return a function's names after its last line."""
        return Scope(self, function)


class Scope:
    """One function: its nodes in the order of the source, and the kinds of its names."""

    def __init__(self, kinds: Kinds, function: ast.FunctionDef) -> None:
        self._kinds = kinds
        self._names: dict[str, str] = {}
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._names[argument.arg] = annotated(argument.annotation)
        self.nodes = list(_own_nodes(function))
        for node in self.nodes:
            self._learn(node)

    def kind(self, node: ast.expr) -> str:
        """Return TENSOR, MASK, HOST or UNKNOWN."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.Compare):
            return self._of_compare(node)
        if isinstance(node, ast.BinOp):
            return self._of_pair(node.left, node.right)
        if isinstance(node, ast.BoolOp):
            return self._of_pair(*node.values[:2])
        if isinstance(node, ast.IfExp):
            return self._of_pair(node.body, node.orelse)
        if isinstance(node, ast.UnaryOp):
            return HOST if isinstance(node.op, ast.Not) else self.kind(node.operand)
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.kind(node.value)
        return HOST  # constants, text, lists, comprehensions, lambdas

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._names[node.target.id] = annotated(node.annotation)
        elif isinstance(node, ast.NamedExpr):
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            is_host = isinstance(node.iter, ast.Call) and self.kind(node.iter) == HOST
            self._names[node.target.id] = HOST if is_host else self.kind(node.iter)
            if isinstance(node.iter, ast.List | ast.Tuple):
                self._names[node.target.id] = UNKNOWN

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            kind = self.kind(value)
            if kind != UNKNOWN or target.id not in self._names:
                self._names[target.id] = kind
        elif isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else []
            whole = self.kind(value)
            for place, element in enumerate(target.elts):
                if len(values) == len(target.elts):
                    self._assign(element, values[place])
                elif isinstance(element, ast.Name):
                    is_array = whole in (TENSOR, HOST) and not isinstance(value, ast.Call)
                    self._names[element.id] = whole if is_array else UNKNOWN

    def _of_attribute(self, node: ast.Attribute) -> str:
        if node.attr in METADATA:
            return HOST
        if isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
            return HOST
        if node.attr in ("T", "mT", "real"):
            return self.kind(node.value)
        return self._kinds.fields.get(node.attr, UNKNOWN)

    def _of_call(self, node: ast.Call) -> str:
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in HOST_FUNCTIONS:
                return HOST
            return self._kinds.results.get(function.id, UNKNOWN)
        if not isinstance(function, ast.Attribute):
            return UNKNOWN
        name, receiver = function.attr, function.value
        root = ast.unparse(receiver).partition(".")[0]
        if name in METADATA or name in HOST_RESULTS or root in ("np", "math", "time", "logger"):
            return HOST
        if root in ("torch", "F"):
            if name in TORCH_HOST or "cuda" in ast.unparse(receiver):
                return UNKNOWN
            return MASK if name in COMPARING else TENSOR
        kind = self.kind(receiver)
        if kind in (TENSOR, MASK):
            return MASK if name in COMPARING else TENSOR
        return HOST if kind == HOST else self._kinds.results.get(name, UNKNOWN)

    def _of_compare(self, node: ast.Compare) -> str:
        if all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return HOST
        kinds = [self.kind(side) for side in (node.left, *node.comparators)]
        if TENSOR in kinds or MASK in kinds:
            return MASK
        return UNKNOWN if UNKNOWN in kinds else HOST

    def _of_pair(self, left: ast.expr, right: ast.expr) -> str:
        kinds = {self.kind(left), self.kind(right)}
        if MASK in kinds:
            return TENSOR if TENSOR in kinds else MASK
        if TENSOR in kinds:
            return TENSOR
        return HOST if kinds == {HOST} else UNKNOWN


def annotated(annotation: ast.expr | None) -> str:
    """Return the kind that an annotation promises."""
    text = "" if annotation is None else ast.unparse(annotation).strip("\"'")
    text = text.removesuffix(" | None")
    if text == "torch.Tensor":
        return TENSOR
    return HOST if text.startswith(HOST_WORDS) and "torch" not in text else UNKNOWN


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield a function's nodes in source order, without those of functions defined inside it."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def _join(names: dict[str, str], name: str, kind: str) -> None:
    names[name] = kind if names.get(name, kind) == kind else UNKNOWN
