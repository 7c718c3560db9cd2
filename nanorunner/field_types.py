"""Check a settings dataclass against its own annotations, in words for a person.

Python does not: a max_tokens of 1.5 or a tp of "2" would get far before it fails.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

_ACCEPTS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}
_ITEMS: dict[str, type] = {"tuple[str, ...]": str, "tuple[int, ...]": int}
_BIASES = "dict[int, float]"
_WORDS = "tuple[str | tuple[int, ...], ...]"
_NAMES = {_BIASES: "a dict of id: number", _WORDS: "a list of strings or of lists of ids"}


def check_types(settings: Any) -> None:
    """Raise ValueError for the first field whose value is not of its annotated type."""
    for name, wanted, plain in _fields(settings.__class__):
        value = getattr(settings, name)
        if type(value) not in plain:
            check_type(name, value, wanted)


def check_type(name: str, value: Any, wanted: str) -> None:
    """Raise ValueError when a value is not of the type that an annotation names."""
    if not _fits(value, wanted):
        kind = _NAMES.get(wanted) or wanted.split(" |")[0]
        raise ValueError(f"{name} {value!r}: is {type(value).__name__}, use {kind}")


@cache
def _fields(kind: type) -> list[tuple[str, str, tuple[type, ...]]]:
    """Return name and annotation of each field, and the types whose values fit it as they are.

    Kept: it takes longer than the check itself, which every request passes.
    """
    annotations = [(field.name, str(field.type)) for field in fields(kind)]
    return [(name, wanted, _ACCEPTS.get(wanted, ())) for name, wanted in annotations]


def _fits(value: Any, wanted: str) -> bool:
    if wanted == _WORDS:
        words = [word for word in value if type(word) is not str] if type(value) is tuple else [0]
        return all(_fits(word, "tuple[int, ...]") for word in words)
    if wanted == _BIASES:
        is_dict = isinstance(value, dict)
        return is_dict and all(type(k) is int and _fits(v, "float") for k, v in value.items())
    optional = wanted.removesuffix(" | None")
    if optional in _ITEMS:
        if value is None:
            return optional != wanted
        item = _ITEMS[optional]
        return isinstance(value, tuple) and all(type(entry) is item for entry in value)
    # bool is an int to Python, but tp=True is a slip
    if isinstance(value, bool) and wanted != "bool":
        return False
    return isinstance(value, _ACCEPTS[wanted])
