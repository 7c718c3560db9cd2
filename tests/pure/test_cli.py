"""The command line refuses in one line and with exit code 2, and needs no torch to do so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from nanorunner import __version__
from nanorunner.cli import main
from nanorunner.config import Config
from nanorunner.flags import ENGINE_HELP, Parser, add_engine_flags, engine_settings
from nanorunner.platforms import platform_problem

ROOT = Path(__file__).parents[2]
P = ["--prompt", "hi"]


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """main() sets up the logger of the whole process; other tests read it too."""
    logger = logging.getLogger("nanorunner")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


REFUSED: list[tuple[list[str], list[str]]] = [
    (["--temprature", "1", *P], ["unknown flag --temprature", "did you mean --temperature?"]),
    (["--temp", "1", *P], ["unknown flag --temp;"]),  # no abbreviations
    (["--max_tokens=5", *P], ["unknown flag --max_tokens;", "--max-tokens?"]),
    (["--prompt", "hi", "there"], ["unexpected 'there'", "--prompt"]),
    (["doctr"], ["unknown command 'doctr'", "did you mean doctor?"]),
    (["--tp"], ["--tp", "expected one argument"]),
    (["--tp", "two", *P], ["--tp", "'two'"]),
    (["--tp", "0", *P], ["tp 0", "1 or more"]),
    (["--tp", "-1", *P], ["tp -1", "1 or more"]),
    (["--max-tokens", "0", *P], ["max_tokens 0", "1 or more"]),
    (["--max-tokens", "1.5", *P], ["--max-tokens", "'1.5' is not a count"]),
    (["--min-tokens", "9", "--max-tokens", "8", *P], ["min_tokens 9", "max_tokens (8)"]),
    (["--temperature", "-1", *P], ["temperature -1.0", "0 (greedy)"]),
    (["--temperature", "nan", *P], ["temperature nan"]),
    (["--top-p", "0", *P], ["top_p 0.0", "at most 1"]),
    (["--top-k", "-2", *P], ["top_k -2", "0 to switch it off"]),
    (["--stop", "", *P], ["stop", "empty string"]),
    (["--runner", "v2", "--logprobs", "2", *P], ["--logprobs", "add --json"]),
    (["--runner", "v1", "--min-p", "0.1", *P], ["min_p 0.1", "runner v1", "--runner v2"]),
    (["--n", "2", *P], ["n 2", "temperature"]),
    (["--logit-bias", "5:1", *P], ["--logit-bias", "write ID=X"]),
    (["--min-p", "2", *P], ["min_p 2.0", "0 (off) to 1"]),
    (["--bad-word", "", *P], ["bad_words", "empty word"]),
    (["--dtype", "bf16", *P], ["dtype 'bf16'", "bfloat16"]),
    (["--prompt", ""], ["empty prompt"]),
    (["--prompt-ids", "1;2"], ["--prompt-ids", "'1;2'", "write 1,2,3"]),
    (["doctor", "--tpp", "2"], ["unknown flag --tpp", "did you mean --tp?"]),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED, ids=lambda value: " ".join(value)[:50])
def test_a_bad_command_line_is_refused_in_one_line(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as stop:  # argparse's way
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith("nanorunner: ")
    assert output.err.count("\n") == 1
    for word in expected:
        assert word in output.err


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--help"], 0, "--gpu-memory-utilization"),
        (["doctor", "--help"], 0, "ready for --tp N"),
        (["--version"], 0, __version__),
        (["--temprature", "1"], 2, "did you mean --temperature?"),
        (["--prompt", "hi"], 2, "torch"),
    ],
)
def test_without_torch_the_command_line_still_speaks(
    words: list[str], code: int, expected: str
) -> None:
    program = "import sys; sys.modules['torch'] = None; from nanorunner.cli import main; "
    result = subprocess.run(
        [sys.executable, "-c", program + f"sys.exit(main({words}))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == code, result.stderr
    assert expected in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_every_setting_is_a_flag_of_the_same_name() -> None:
    assert list(ENGINE_HELP) == [field.name for field in fields(Config)]
    parser = Parser()
    add_engine_flags(parser)
    flags = parser.long_flags()
    for field in fields(Config):
        assert "--" + field.name.replace("_", "-") in flags


def test_only_the_flags_that_were_given_become_settings() -> None:
    parser = Parser()
    add_engine_flags(parser)
    given = parser.parse(["--tensor-parallel-size", "2", "--no-prefix-cache", "--num-blocks", "1k"])
    assert engine_settings(given) == {"tp": 2, "prefix_cache": False, "num_blocks": 1000}
    assert engine_settings(parser.parse([])) == {}


def test_an_empty_pipe_starts_no_engine() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "nanorunner"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (result.returncode, result.stdout) == (0, "")
    assert "stdin is empty" in result.stderr


def test_other_systems_are_refused_by_name() -> None:
    assert platform_problem("linux") == ""
    assert "macOS is not supported" in platform_problem("darwin")
    assert "WSL2" in platform_problem("win32")
