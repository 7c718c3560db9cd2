"""The code exercises: what is written, by which signature, and who examines it.

A learner takes a starter, fills it in, and has it examined:

    nanorunner check ack --starter > my_ack.py
    nanorunner check ack my_ack.py

Each function has the name and the signature of the project's own, so that what was learnt can be
found again; examine() of the judge_* module tries it and says what holds, sentence by sentence.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

STARTERS = Path(__file__).parent / "exercises"  # docs/workshop/exercises is a link to it

Functions = Mapping[str, Callable[..., Any]]


class Finding(NamedTuple):
    """One sentence that must hold, and what is wrong; "" when it holds."""

    sentence: str
    problem: str = ""


class CodeExercise(NamedTuple):
    """One exercise."""

    about: str
    starter: str  # a file in STARTERS
    functions: dict[str, str]  # name -> the project's own, as module:name
    judge: str  # the module with examine(functions) -> findings, in the order of learning


EXERCISES = {
    "row-parallel": CodeExercise(
        "split a model: whose columns, a row-parallel MLP, an embedding and its all-reduce",
        "row_parallel.py",
        {
            "even_shard": "nanorunner.workers.shards:even_shard",
            "mlp": "nanorunner.workers.models.decoder:Decoder.mlp",
            "embed_tokens": "nanorunner.workers.models.decoder:Decoder.embed_tokens",
        },
        "nanorunner.workshop.judge_row_parallel",
    ),
    "ack": CodeExercise(
        "a wire of one frame that loses no call: write_shm, read_shm",
        "ack.py",
        {
            "write_shm": "nanorunner.workers.channel:Channel.write_shm",
            "read_shm": "nanorunner.workers.channel:Channel.read_shm",
        },
        "nanorunner.workshop.judge_ack",
    ),
    "slot-mapping": CodeExercise(
        "the inputs of a decode step, out of state rows and block tables",
        "slot_mapping.py",
        {"prepare_decode_inputs": "nanorunner.kernels.prepare_inputs:prepare_decode_inputs"},
        "nanorunner.workshop.judge_slot_mapping",
    ),
    "staged-write": CodeExercise(
        "apply many small ragged writes that came up in one packed copy",
        "staged_write.py",
        {"staged_write": "nanorunner.kernels.staged_write:staged_write"},
        "nanorunner.workshop.judge_staged_write",
    ),
    "gumbel": CodeExercise(
        "draw from a softmax without computing it: the Gumbel-max trick",
        "gumbel.py",
        {"gumbel_argmax": "nanorunner.kernels.sample:gumbel_argmax"},
        "nanorunner.workshop.judge_gumbel",
    ),
    "one-shot": CodeExercise(
        "an all-reduce in one hop: send to all, add up in rank order",
        "one_shot.py",
        {"all_reduce_one_shot": "nanorunner.kernels.peer_all_reduce:all_reduce_one_shot"},
        "nanorunner.workshop.judge_one_shot",
    ),
}


def load_functions(name: str, file: Path) -> dict[str, Callable[..., Any]]:
    """Return the exercise's functions out of a learner's file.

    Raises ValueError when the file or a function is missing or has another signature; whatever the
    file itself raises comes through.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; `{starter_command(name)}` writes a starter")
    spec = importlib.util.spec_from_file_location("learners_file", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {}
    for wanted, own in EXERCISES[name].functions.items():
        function = getattr(module, wanted, None)
        if not callable(function):
            raise ValueError(f"{file}: has no function {wanted}")
        if problem := signature_problem(function, resolve(own)):
            raise ValueError(f"{file}: {wanted}{problem}")
        functions[wanted] = function
    return functions


def examine(name: str, functions: Functions) -> Iterator[Finding]:
    """Yield what holds, up to the first sentence that does not.

    What a function raises is a finding too: whoever reads it wrote that function.
    """
    findings: Iterator[Finding] = importlib.import_module(EXERCISES[name].judge).examine(functions)
    while True:
        try:
            finding = next(findings)
        except StopIteration:
            return
        except (Exception, SystemExit) as error:
            yield Finding("your code runs to its end", where(error))
            return
        yield finding
        if finding.problem:
            return


def signature_problem(function: Callable[..., Any], own: Callable[..., Any]) -> str:
    """Return how a signature differs from the project's own, annotations aside; "" if it does not.

    Names, kinds and defaults count.
    """

    def shape(of: Callable[..., Any]) -> list[tuple[str, object, object]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]

    if shape(function) == shape(own):
        return ""
    plain = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(own).parameters.values()
    ]
    return f" has another signature than the project's: {inspect.Signature(plain)}"


def resolve(own: str) -> Callable[..., Any]:
    """Return the project's function that "module:name" names."""
    module, _, path = own.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def starter_of(name: str) -> str:
    """Return the text of an exercise's starter."""
    return (STARTERS / EXERCISES[name].starter).read_text(encoding="utf-8")


def starter_command(name: str) -> str:
    """Return the command that writes an exercise's starter into the folder where one is."""
    return f"nanorunner check {name} --starter > my_{EXERCISES[name].starter}"


def where(error: BaseException) -> str:
    """Return an error with the line that raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return repr(error)
    file = Path(place.tb_frame.f_code.co_filename).name
    return f"{type(error).__name__}: {error} ({file}, line {place.tb_lineno})"
