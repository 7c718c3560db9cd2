"""`python -m nanorunner bench COMMAND`: find the command's module, read its flags, run it.

Each module has add_flags(parser) and run(args, argv) -> exit code, and is imported when its command
is run, so none waits for what another one needs.
"""

from __future__ import annotations

import importlib
from argparse import RawDescriptionHelpFormatter
from types import ModuleType

from nanorunner.bench.metrics import definitions
from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import OK, REFUSED
from nanorunner.flags import Parser

# name -> where it is, and what it does
COMMANDS: dict[str, tuple[str, str]] = {
    "latency": ("nanorunner.bench.latency", "one batch: TTFT, TPOT, ITL, end to end"),
    "throughput": ("nanorunner.bench.throughput", "a whole set at once: tokens per second"),
    "load": ("nanorunner.bench.load", "timed arrivals: latencies under load, goodput"),
    "compare": ("nanorunner.bench.compare", "runners and peers beside each other, fairly"),
    "sweep": ("nanorunner.bench.sweep", "a product or list of settings, resumable"),
    "plot": ("nanorunner.bench.plot", "figures and one HTML page from a sweep's folder"),
}
MEASURING = ("latency", "throughput", "load")


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return OK
    name, words = argv[0], argv[1:]
    if name == "--definitions":
        print(definitions())
        return OK
    parser = Parser(prog="nanorunner bench")
    if name not in COMMANDS:
        parser.exit(
            REFUSED,
            f"nanorunner: unknown bench command {name!r}; {did_you_mean(name, COMMANDS)}\n",
        )
    try:
        return _run(name, words)
    except ModuleNotFoundError as error:
        if (error.name or "nanorunner").startswith("nanorunner"):
            raise
        parser.exit(REFUSED, f"nanorunner: bench {name} needs {error.name}; install it\n")


def _run(name: str, words: list[str]) -> int:
    parser = parser_of(name)
    unknown = parser.parse_known_args(words)[1]
    if unknown and not unknown[0].startswith("-"):
        parser.error(f"unexpected {unknown[0]!r}; `bench {name} --help` lists what there is")
    code: int = module_of(name).run(parser.parse(words), words)
    return code


def parser_of(name: str) -> Parser:
    """Return the parser of a command, with every flag that it knows."""
    module = module_of(name)
    parser = Parser(
        prog=f"nanorunner bench {name}",
        description=f"{COMMANDS[name][1]}\n\n{module.__doc__ or ''}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_flags(parser)
    return parser


def module_of(name: str) -> ModuleType:
    """Import a command's module."""
    return importlib.import_module(COMMANDS[name][0])


def overview() -> str:
    """Return the text of `bench --help`."""
    lines = ["python -m nanorunner bench COMMAND [flags]", ""]
    lines += [f"  {name:<12} {about}" for name, (_, about) in COMMANDS.items()]
    lines += [
        "",
        "bench COMMAND --help lists its flags; bench --definitions says what every figure means.",
    ]
    return "\n".join(lines)
