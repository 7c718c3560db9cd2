"""A sweep's spec: from a YAML file to the list of points, each a set of flags for one command.

    about: tokens per second over tp and batch
    command: throughput            # a measuring command of `nanorunner bench`
    base: {model: qwen3-0.6b}      # flags of every point, by name
    vary: {tp: [1, 2], batch: [1, 8]}      # the product: 4 points
    points: [{runner: v1}, {runner: v2}]   # or (or: and, 8 points then) a list
    repeat: 3                      # fresh processes for each point, in shuffled order
    timeout_s: 600                 # of one process
    seed: 0                        # of the order

`program: [python, mine.py]` instead of `command` measures any program that takes such flags and
writes a result to `--out FILE`. true is a flag without a value, false is --no-NAME where there is
one, null leaves the flag out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nanorunner.did_you_mean import did_you_mean

READY_FOLDER = Path(__file__).parents[1] / "configs" / "sweeps"
KEYS = (
    "about",
    "command",
    "program",
    "base",
    "vary",
    "points",
    "repeat",
    "timeout_s",
    "seed",
)
DEFAULT_REPEAT = 3
DEFAULT_TIMEOUT_S = 900.0  # a large model's start takes minutes

Scalar = str | int | float | bool | None
Settings = dict[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A spec that was read and checked, but for the flags that only its command knows."""

    name: str
    about: str
    command: str  # "" when program is given
    program: tuple[str, ...]
    points: tuple[Settings, ...]  # base included
    varied: tuple[str, ...]  # the settings that tell points apart, in the spec's order
    repeat: int = DEFAULT_REPEAT
    timeout_s: float = DEFAULT_TIMEOUT_S
    seed: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """The command that measures, without flags, as a person would type it."""
        return self.program or ("python", "-m", "nanorunner", "bench", self.command)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process of a sweep: a point and which of its repeats."""

    point: int
    repeat: int
    settings: Settings
    key: str  # of everything that decides its result: one row a key
    flags: tuple[str, ...] = field(default=())


def ready_sweeps() -> list[str]:
    """Return the names of the sweeps that come with nanorunner."""
    return sorted(path.stem for path in READY_FOLDER.glob("*.yaml"))


def find_spec(name: str) -> Path:
    """Return the file of a spec: a path, or a ready sweep's name; ValueError otherwise."""
    path = Path(name)
    if path.is_file():
        return path
    ready = READY_FOLDER / f"{path.stem}.yaml"
    if ready.is_file() and path.suffix in ("", ".yaml"):
        return ready
    raise ValueError(f"sweep {name!r}: no such file; {did_you_mean(path.stem, ready_sweeps())}")


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Return a spec file's sweep.

    changes: KEY=VALUE texts that replace a setting of base, or what a key is varied over. Raises
    ValueError that names the file and the key for whatever is unknown, missing or of another kind.
    """
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
        return make_sweep(spec, path.stem, changes)
    except (ValueError, yaml.YAMLError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def make_sweep(spec: Any, name: str, changes: Sequence[str] = ()) -> Sweep:
    """Return the sweep of a parsed spec; ValueError names the key that is wrong."""
    if not isinstance(spec, dict):
        raise ValueError(f"holds a {type(spec).__name__}; write keys such as command, base, vary")
    for key in spec:
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(str(key), KEYS)}")
    command, program = _command(spec)
    base = _settings(spec.get("base", {}), "base")
    vary = _lists(spec.get("vary", {}))
    listed = [_settings(each, f"points[{i}]") for i, each in enumerate(_list(spec, "points"))]
    for change in changes:
        _change(change, base, vary, listed)
    points = _points(base, vary, listed)
    return Sweep(
        name=name,
        about=str(spec.get("about", "")),
        command=command,
        program=program,
        points=points,
        varied=_varied(points, [*vary, *(key for each in listed for key in each)]),
        repeat=int(_number(spec, "repeat", DEFAULT_REPEAT, whole=True)),
        timeout_s=_number(spec, "timeout_s", DEFAULT_TIMEOUT_S),
        seed=int(_number(spec, "seed", 0, whole=True, least=0)),
    )


def flags_of(settings: Mapping[str, Scalar], known: Iterable[str] | None = None) -> list[str]:
    """Return the words of a command line for some settings, in their order.

    known: the command's long flags; None when nobody knows them (a program). Raises ValueError with
    the closest flag for an unknown setting.
    """
    flags = None if known is None else set(known)
    words: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if flags is not None and flag not in flags:
            names = {each.removeprefix("--").replace("-", "_") for each in flags}
            raise ValueError(f"unknown setting {name!r}; {did_you_mean(name, names)}")
        if value is True:
            words.append(flag)
        elif value is False:
            off = "--no-" + flag.removeprefix("--")
            words += [off] if flags is not None and off in flags else []
        elif value is not None:
            words += [flag, str(value)]
    return words


def runs_of(sweep: Sweep, origin: str, known: Iterable[str] | None = None) -> list[Run]:
    """Return every process of the sweep, in the order in which they run.

    Each round holds every point once, shuffled anew, so that a slow hour of the machine does not
    fall on one point. origin: the code and the machine, as row_key has it. Raises ValueError as
    flags_of does.
    """
    flags = [tuple(flags_of(settings, known)) for settings in sweep.points]
    shuffle = random.Random(sweep.seed).shuffle
    runs: list[Run] = []
    for repeat in range(sweep.repeat):
        order = list(range(len(sweep.points)))
        shuffle(order)
        for point in order:
            settings = sweep.points[point]
            key = row_key(sweep.words, settings, repeat, origin)
            run = Run(point=point, repeat=repeat, settings=settings, key=key, flags=flags[point])
            runs.append(run)
    return runs


def row_key(words: Sequence[str], settings: Mapping[str, Scalar], repeat: int, origin: str) -> str:
    """Return the hash that names a row: command, settings, repeat, and where its figures are from.

    origin: the code that was run, the machine and the versions.
    """
    parts = {
        "command": list(words),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "repeat": repeat,
        "origin": origin,
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _command(spec: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    if ("command" in spec) == ("program" in spec):
        raise ValueError("give one of command (a measuring command's name) and program (a list)")
    if "command" in spec:
        return str(spec["command"]), ()
    program = spec["program"]
    if not isinstance(program, list) or not program:
        raise ValueError(f"program {program!r}: write a list, such as [python, mine.py]")
    return "", tuple(map(str, program))


def _settings(value: Any, where: str) -> Settings:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is {type(value).__name__}; write settings as NAME: VALUE")
    return {str(name): _scalar(each, f"{where}.{name}") for name, each in value.items()}


def _lists(value: Any) -> dict[str, list[Scalar]]:
    if not isinstance(value, dict):
        raise ValueError(f"vary: is {type(value).__name__}; write NAME: [VALUE, VALUE]")
    return {str(name): _choices(each, f"vary.{name}") for name, each in value.items()}


def _choices(value: Any, where: str) -> list[Scalar]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} {value!r}: write a list of values")
    return [_scalar(each, where) for each in value]


def _list(spec: Mapping[str, Any], key: str) -> list[Any]:
    value = spec.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key}: is {type(value).__name__}; write a list of settings")
    return value


def _scalar(value: Any, where: str) -> Scalar:
    if value is None or isinstance(value, (str, int, float, bool)):
        if where.rpartition(".")[2] == "out":
            raise ValueError(f"{where}: a sweep gives --out itself; leave it out")
        return value
    raise ValueError(f"{where}: is {type(value).__name__}; write one text, number, true or false")


def _number(
    spec: Mapping[str, Any], key: str, default: float, *, whole: bool = False, least: float = 1
) -> float:
    value = spec.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{key} {value!r}: use a {'whole ' if whole else ''}number")
    if value < least:
        raise ValueError(f"{key} {value}: use {least:g} or more")
    return value


def _change(
    text: str, base: Settings, vary: dict[str, list[Scalar]], listed: list[Settings]
) -> None:
    """Apply one KEY=VALUE; a list varies the setting, a single value pins it."""
    name, separator, written = text.partition("=")
    if not separator or not name:
        raise ValueError(f"--set {text}: write NAME=VALUE, or NAME=[VALUE, VALUE]")
    if not written.strip():
        raise ValueError(f"--set {text}: no value; write one, or null to leave the flag out")
    name = name.replace("-", "_")
    value = yaml.safe_load(written)
    if any(name in each for each in listed):
        raise ValueError(f"--set {text}: the spec's points give {name}; change the file instead")
    if isinstance(value, list):
        base.pop(name, None)
        vary[name] = _choices(value, f"--set {name}")
    else:
        vary.pop(name, None)
        base[name] = _scalar(value, f"--set {name}")


def _points(
    base: Settings, vary: Mapping[str, list[Scalar]], listed: list[Settings]
) -> tuple[Settings, ...]:
    """Return the product of vary, times the listed points; ValueError for two equal ones."""
    points = [
        {**base, **each, **dict(zip(vary, values, strict=True))}
        for each in listed or [{}]
        for values in itertools.product(*vary.values())
    ]
    seen: dict[str, int] = {}
    for index, point in enumerate(points):
        text = json.dumps(point, sort_keys=True)
        if text in seen:
            raise ValueError(f"points {seen[text]} and {index} are the same: {point}")
        seen[text] = index
    return tuple(points)


def _varied(points: Sequence[Settings], names: Iterable[str]) -> tuple[str, ...]:
    values = {name: {json.dumps(point.get(name)) for point in points} for name in names}
    return tuple(name for name, its in values.items() if len(its) > 1)
