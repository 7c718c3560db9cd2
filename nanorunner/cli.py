"""The command line: `python -m nanorunner [run|bench|doctor|shards|...] [flags]`.

    --prompt        one completion each on stdout, nothing else
    a terminal      the chat shell (chat.py)
    a pipe          JSONL in, JSONL out (jsonl.py)

Logs go to stderr. Exit codes: 0 all is well, 1 a request failed, 2 refused before the start,
3 a rank died, 130 Ctrl-C. A refusal is one line; a traceback is a bug of ours.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from nanorunner import __version__
from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import INTERRUPTED, REFUSED, REQUEST_FAILED
from nanorunner.flags import (
    ENGINE_HELP,
    Parser,
    add_engine_flags,
    add_sampling_flags,
    parse_ids,
)

WORKSHOP = ("shards", "blocks", "timeline", "faults", "check")
COMMANDS = ("run", "bench", "doctor", *WORKSHOP)
ABOUT = "A tensor-parallel LLM inference runtime to read, to measure and to keep."
RUN_HELP = """\
With --prompt it prints the completion; on a terminal it opens a chat shell; from a pipe it reads
one request a line (plain text, or JSON such as {"prompt": "Hello", "max_tokens": 8}) up to its end,
and then writes one JSON line for each, in the same order. An instruct model gets a prompt as a
user's message, by its own chat template; --raw completes the text as it stands.
Exit codes: 0 done, 1 a request failed, 2 refused before the start, 3 a rank died, 130 Ctrl-C.
Commands: run (default), bench, doctor; the workshop: shards, blocks, timeline, faults, check."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # what the terminal's encoding lacks is written as an escape; no answer is lost for it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("nanorunner: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of stdout has left (`| head`); keep Python from complaining again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REQUEST_FAILED


def _dispatch(words: list[str]) -> int:
    command = "run"
    if words and not words[0].startswith("-"):
        command = words.pop(0)
        if command not in COMMANDS:
            tail = did_you_mean(command, COMMANDS)
            print(
                f"nanorunner: unknown command {command!r}; {tail}{'' if tail[-1] == '?' else '.'} "
                f"A prompt is given as --prompt {command!r}.",
                file=sys.stderr,
            )
            return REFUSED
    if command in WORKSHOP:
        return _workshop(command, words)
    functions = {"run": _run, "bench": _bench, "doctor": _doctor}
    return functions[command](words)


def run_parser() -> Parser:
    """Return the parser of `run`, with every flag that it knows."""
    parser = Parser(
        prog="nanorunner",
        description=f"{ABOUT}\n\n{RUN_HELP}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nanorunner {__version__}")
    parser.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="complete this; repeat for several"
    )
    parser.add_argument(
        "--prompt-ids",
        action="append",
        type=parse_ids,
        metavar="1,2,3",
        help="complete these token ids; a model without a tokenizer answers in ids",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    parser.add_argument("--raw", action="store_true", help="leave the chat template out")
    parser.add_argument("--json", action="store_true", help="print JSON lines for --prompt too")
    parser.add_argument("-q", "--quiet", action="store_true", help="log warnings and errors only")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def _run(words: list[str]) -> int:
    arguments = run_parser().parse(words)
    _log_to_stderr(arguments.quiet)
    # imported here: --help and a misspelt flag should not wait for torch
    from nanorunner.run_command import run

    return run(arguments)


def _bench(words: list[str]) -> int:
    _log_to_stderr(quiet=False)  # a command's own --quiet lowers it
    from nanorunner.bench.cli import main as bench

    return bench(words)


def _workshop(command: str, words: list[str]) -> int:
    _log_to_stderr(quiet=True)
    from nanorunner.workshop.cli import main as workshop

    return workshop(command, words)


def _doctor(words: list[str]) -> int:
    parser = Parser(
        prog="nanorunner doctor",
        description="Say what this machine has, and whether it is ready for --tp N.",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks to be ready for")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")
    parser.add_argument("--share-gpu", action="store_true", help=ENGINE_HELP["share_gpu"])
    arguments = parser.parse(words)
    _log_to_stderr(quiet=True)
    from nanorunner.doctor import doctor

    return doctor(arguments.tp, arguments.device, arguments.share_gpu)


def _log_to_stderr(quiet: bool) -> None:
    logger = logging.getLogger("nanorunner")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nanorunner: %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
