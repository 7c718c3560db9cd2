"""The workshop's commands by name: find the module, read its flags, run it.

Each module has add_flags(parser) and run(arguments) -> exit code, and is imported when its command
is run, so none waits for what another one needs.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from types import ModuleType

from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import REFUSED
from nanorunner.flags import Parser

# name -> where it is, and what it does
COMMANDS: dict[str, tuple[str, str]] = {
    "shards": ("nanorunner.workshop.shards", "which slice of which tensor each rank holds"),
    "blocks": ("nanorunner.workshop.blocks", "step through a run and watch its KV blocks"),
    "timeline": ("nanorunner.workshop.timeline", "what each rank did when, from a --trace DIR"),
    "faults": ("nanorunner.workshop.faults", "break a rank on purpose and see what is said"),
    "check": ("nanorunner.workshop.check", "exercises; it checks answers and code"),
}


def main(name: str, words: list[str]) -> int:
    """Run one command and return its exit code; what cannot be done is one line and exit code 2."""
    module = importlib.import_module(COMMANDS[name][0])
    arguments = _parse(parser_of(name, module), name, words)
    try:
        code: int = module.run(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise  # the reader of stdout has left; the command line's business
        print(f"nanorunner: {error}", file=sys.stderr)
        return REFUSED
    return code


def _parse(parser: Parser, name: str, words: list[str]) -> Namespace:
    """Return the flags, which may stand between the words; exit with 2 for what is unknown."""
    arguments, unknown = parser.parse_known_intermixed_args(words)
    for word in unknown:
        if word.startswith("-"):
            flag = word.split("=")[0]
            parser.error(f"unknown flag {flag}; {did_you_mean(flag, parser.long_flags())}")
        parser.error(f"unexpected {word!r}; `nanorunner {name} --help` lists what there is")
    return arguments


def parser_of(name: str, module: ModuleType) -> Parser:
    """Return the parser of a command, with every flag that it knows."""
    parser = Parser(
        prog=f"nanorunner {name}",
        description=f"{COMMANDS[name][1]}\n\n{module.__doc__ or ''}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_flags(parser)
    return parser
