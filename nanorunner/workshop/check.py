"""The exercises. Without arguments it lists them; answers are computed from --model and --tp.

nanorunner check
nanorunner check 4 29360128 --model qwen3-0.6b --tp 1
nanorunner check 6 '[64, 32]'
nanorunner check ack --starter > my_ack.py             what there is to fill in
nanorunner check ack my_ack.py                         your own code, tried
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace

from nanorunner.compatibility import RUNNERS
from nanorunner.config import Config
from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import OK, REQUEST_FAILED
from nanorunner.model_source import resolve_model
from nanorunner.workers.architectures import DTYPES, parse
from nanorunner.workers.model_config import ITEM_BYTES
from nanorunner.workers.shards import check_tp
from nanorunner.workshop.code_exercises import EXERCISES, starter_command, starter_of
from nanorunner.workshop.judge import NONCE_BYTES
from nanorunner.workshop.question import Setting, judge
from nanorunner.workshop.questions import QUESTIONS, text_of

CODE_LIMIT_S = 120.0  # examining takes a few seconds; what takes longer waits for ever


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("exercise", nargs="?", metavar="NUMBER|NAME", help="which one")
    parser.add_argument("answer", nargs="*", metavar="ANSWER|FILE", help="the answer, or your file")
    parser.add_argument("--starter", action="store_true", help="print NAME's file to fill in")
    parser.add_argument("--model", default="", metavar="NAME", help="folder, hub id or preset")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--runner", default=Config.runner, choices=RUNNERS, help=f"default {Config.runner}"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="of weights and KV cache (default: the model's own)",
    )


def run(arguments: Namespace) -> int:
    """List, ask, or check; 0 when the answer is right, 1 when it is not."""
    name = arguments.exercise
    if arguments.starter:
        print(_starter(name, arguments.answer), end="")
        return OK
    if name is None:
        print("\n".join(_overview(_setting(arguments))))
        return OK
    if name in EXERCISES:
        return _check_code(name, arguments.answer)
    if not name.isdecimal():
        raise ValueError(f"unknown exercise {name!r}; {did_you_mean(name, EXERCISES)}, or a number")
    if int(name) not in QUESTIONS:
        raise ValueError(f"exercise {name}: the questions are 1 to {len(QUESTIONS)}")
    number, setting = int(name), _setting(arguments)
    if not arguments.answer:
        print(f"{_told(arguments, setting)}\n{number}. {text_of(number, setting)}")
        return OK
    is_right, told = judge(QUESTIONS[number](setting), " ".join(arguments.answer))
    print(f"right: {told}" if is_right else f"not yet. Hint: {told}")
    return OK if is_right else REQUEST_FAILED


def _setting(arguments: Namespace) -> Setting:
    # dummy: only the model's shape is needed, so a preset does, and no weights are looked for
    model = parse(resolve_model(arguments.model, "dummy").config_json)
    check_tp(arguments.tp, model.num_heads)
    dtype = model.dtype if arguments.dtype == "auto" else arguments.dtype
    return Setting(
        model=model,
        tp=arguments.tp,
        runner=arguments.runner,
        dtype=dtype,
        item_bytes=ITEM_BYTES[dtype],
    )


def _told(arguments: Namespace, setting: Setting) -> str:
    """Return what the answers are computed for, in one line."""
    model = setting.model
    return (
        f"{arguments.model or 'the embedded model'}, tp {setting.tp}, runner {setting.runner}, "
        f"{setting.dtype}: {model.num_layers} layers, {model.num_heads} query and "
        f"{model.num_kv_heads} KV heads of {model.head_dim}, hidden {model.hidden_size}, "
        f"vocabulary {model.vocab_size}"
    )


def _overview(setting: Setting) -> list[str]:
    lines = ["Questions: nanorunner check NUMBER ANSWER, for --model, --tp, --runner and --dtype"]
    lines += [f"{number:>4}  {text_of(number, setting)}" for number in QUESTIONS]
    lines += [
        "",
        "Code: nanorunner check NAME --starter > FILE, fill it in, nanorunner check NAME FILE",
    ]
    for name, exercise in EXERCISES.items():
        lines.append(f"  {name:<13} {exercise.about}")
    return lines


def _starter(name: str | None, answer: list[str]) -> str:
    """Return the starter of a code exercise."""
    if name not in EXERCISES or answer:
        said = " ".join(["check", *([] if name is None else [name]), *answer, "--starter"])
        raise ValueError(f"{said}: write one name before --starter: {', '.join(EXERCISES)}")
    return starter_of(name)


def _check_code(name: str, files: list[str]) -> int:
    """Examine a learner's file in a process of its own; only its verdict counts as one."""
    if not files:
        print(f"{name}: {EXERCISES[name].about}\n{starter_command(name)}")
        print(f"fill it in, then\nnanorunner check {name} my_{EXERCISES[name].starter}")
        return OK
    if len(files) > 1:
        raise ValueError(f"check {name}: {len(files)} files; give one")
    nonce = secrets.token_bytes(NONCE_BYTES)
    ours, judges = socket.socketpair()
    with ours, judges:
        ours.sendall(nonce)
        fd = judges.fileno()
        command = [sys.executable, "-m", "nanorunner.workshop.judge", name, files[0], str(fd)]
        try:
            code = subprocess.run(command, timeout=CODE_LIMIT_S, pass_fds=(fd,)).returncode
        except subprocess.TimeoutExpired:
            print(f"  not yet  it did not end within {CODE_LIMIT_S:g} s: something waits for ever")
            return REQUEST_FAILED
        verdict = _verdict(ours, nonce)
    if verdict is None:
        print(f"  not yet  the process that ran your code ended with {code}, before the last try")
        return REQUEST_FAILED
    if verdict == OK:
        print(f"{name}: all of it holds")
    return verdict


def _verdict(ours: socket.socket, nonce: bytes) -> int | None:
    """Return what an ended judge has sent; None when it did not come so far."""
    ours.setblocking(False)
    try:
        said = ours.recv(NONCE_BYTES + 1)
    except BlockingIOError:
        return None
    return said[-1] if said[:-1] == nonce else None
