"""The chat shell remembers, forgets, counts, and outlives a line that it cannot serve."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.chat import Shell
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WAIT_S = 100.0
# An answer that cannot end while a test does not look: 30,000 tokens take a minute or so, and they
# are more than a terminal holds for a reader.
LONG = 32768
LONG_ANSWER = ("--max-model-len", str(LONG), "--max-tokens", "30000")

pytestmark = pytest.mark.limit(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**load_preset("tiny-llama"), "vocab_size": 259, "max_position_embeddings": LONG}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields, has_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_model_len=256) as llm:
        yield llm


def test_a_turn_is_remembered_until_it_is_reset(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(llm, PARAMS, system="be brief", raw=False)
    shell.turn("hello")
    answer = capsys.readouterr().out[:-1]
    assert [message["role"] for message in shell.messages] == ["system", "user", "assistant"]
    assert shell.messages[-1]["content"] == answer
    assert shell.stats.tokens == 6
    shell.turn("/reset")
    assert shell.messages == [{"role": "system", "content": "be brief"}]


def test_raw_lines_are_completed_each_for_itself(llm: LLM) -> None:
    shell = Shell(llm, PARAMS, system=None, raw=True)
    shell.turn("hello")
    assert shell.messages == []
    assert shell.stats.prompt_tokens == len("hello")


def test_a_line_that_is_too_long_leaves_the_talk_as_it_was(llm: LLM) -> None:
    shell = Shell(llm, PARAMS, system=None, raw=False)
    shell.turn("hello")
    before = list(shell.messages)
    with pytest.raises(ValueError, match="max_model_len"):
        shell.turn("x" * 300)
    assert shell.messages == before


def test_a_misspelt_command_names_the_closest(llm: LLM) -> None:
    with pytest.raises(ValueError, match="did you mean /reset"):
        Shell(llm, PARAMS, system=None, raw=False).turn("/rest")


class Terminal:
    """The command line on a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.side, inner = pty.openpty()
        command = [sys.executable, "-m", "nanorunner", "--model", str(folder), "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--ignore-eos", *words],
            cwd=ROOT,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )
        os.close(inner)
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """Return what came up to `text` and drop it; fail after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            ready, _, _ = select.select([self.side], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.side, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_an_answer(self, question: str) -> None:
        """Return once something has come behind the echo of `question`; fail after WAIT_S."""
        self.wait_for(question)
        deadline = time.monotonic() + WAIT_S
        while not self.seen.strip():
            ready, _, _ = select.select([self.side], [], [], deadline - time.monotonic())
            assert ready, f"no answer to {question!r}"
            self.seen += os.read(self.side, 4096).decode(errors="replace")

    def interrupt_until(self, text: str, press_every_s: float) -> None:
        """Press Ctrl-C, and again while `text` does not come; fail after WAIT_S.

        At the prompt one may be lost until the next key: Python looks for signals, then sleeps in
        select(), and a signal between the two does not wake it. The next one reports both as one.
        """
        deadline = time.monotonic() + WAIT_S
        press_at = 0.0
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if time.monotonic() > press_at:
                self.process.send_signal(signal.SIGINT)
                press_at = time.monotonic() + press_every_s
            ready, _, _ = select.select([self.side], [], [], 0.5)
            if ready:
                self.seen += os.read(self.side, 4096).decode(errors="replace")
        _, _, self.seen = self.seen.partition(text)

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            os.close(self.side)


def test_the_shell_talks_on_a_terminal_and_leaves_with_0(folder: Path) -> None:
    terminal = Terminal(folder, "--tp", "2", "--max-tokens", "5")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("[5 tokens, first after")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    terminal.wait_for("1 answers,")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_ctrl_c_stops_the_answer_and_twice_leaves_with_130(folder: Path) -> None:
    terminal = Terminal(folder, "--tp", "2", *LONG_ANSWER, "--raw")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for_an_answer("hello")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped; Ctrl-C again")
    time.sleep(2.1)  # past the time in which a second one means "leave"
    terminal.type("/stats\n")
    terminal.wait_for("0 answers,")
    terminal.interrupt_until("stopped", press_every_s=5.0)  # two within 2 s would mean "leave"
    terminal.interrupt_until("interrupted", press_every_s=1.0)
    assert terminal.close() == 130
