"""The chat shell: type, read the answer as it comes, see how fast it came.

    /reset  forget the conversation    /stats  figures of this session
    /help   these commands             /exit   leave (also Ctrl-D)

Ctrl-C stops the answer and keeps the shell; twice within two seconds leaves.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from nanorunner.did_you_mean import did_you_mean
from nanorunner.exit_codes import INTERRUPTED, OK
from nanorunner.llm import LLM
from nanorunner.prompts import Prompt
from nanorunner.sampling_params import SamplingParams
from nanorunner.tap import prints_frames

COMMANDS = ("/reset", "/stats", "/help", "/exit")
HELP = "/reset forgets the conversation, /stats shows figures, /exit or Ctrl-D leaves"
SECOND_INTERRUPT_S = 2.0  # two Ctrl-C this close together mean "out of here"


@dataclass
class Stats:
    """Figures of the session so far."""

    turns: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0  # between first and last token of each answer


class Shell:
    """One conversation with whoever types."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, raw: bool) -> None:
        self.llm = llm
        self.params = params
        self.uses_template = llm.has_chat_template and not raw
        # a tap's lines would fall between the words: with one the answer comes whole, at its end
        self.streams = not prints_frames(llm.resolved.config)
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.stats = Stats()

    def turn(self, line: str) -> None:
        """Answer one line. ValueError leaves the conversation as it was before the line."""
        if line.startswith("/"):
            self._command(line.strip())
            return
        asked = [*self.messages, {"role": "user", "content": line}]
        prompt = (
            Prompt(None, self.llm.chat_ids(asked)) if self.uses_template else Prompt(line, None)
        )
        answer = self.llm.prepare(prompt, self.params)
        start = time.perf_counter()
        first = start
        text = ""
        try:
            for news in self.llm.run([answer]):
                if first == start:
                    first = time.perf_counter()
                piece = news.take_text()
                text += piece
                if self.streams:
                    print(piece, end="", flush=True)
            end = time.perf_counter()
        finally:
            if not self.streams:
                print(text, end="", flush=True)
        print()
        if self.uses_template:  # remembered only now: a stopped answer is not part of the talk
            self.messages = [*asked, {"role": "assistant", "content": text}]
        self._count(len(answer.prompt_ids), len(answer.token_ids), first - start, end - first)

    def _count(self, prompt_tokens: int, tokens: int, wait_s: float, decode_s: float) -> None:
        self.stats.turns += 1
        self.stats.prompt_tokens += prompt_tokens
        self.stats.tokens += tokens
        self.stats.seconds += decode_s
        rate = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else 0.0
        print(
            f"[{tokens} tokens, first after {wait_s:.2f} s, then {rate:.1f} tokens/s; "
            f"prompt {prompt_tokens} tokens]",
            file=sys.stderr,
        )

    def _command(self, command: str) -> None:
        if command == "/exit":
            raise EOFError
        if command == "/reset":
            self.messages = list(self.opening)
            print("the conversation is forgotten", file=sys.stderr)
        elif command == "/help":
            print(HELP, file=sys.stderr)
        elif command == "/stats":
            stats = self.stats
            rate = max(stats.tokens - stats.turns, 0) / stats.seconds if stats.seconds else 0.0
            print(
                f"{stats.turns} answers, {stats.prompt_tokens} prompt tokens read, {stats.tokens} "
                f"tokens written, {rate:.1f} tokens/s after the first",
                file=sys.stderr,
            )
        else:
            raise ValueError(f"unknown command {command}; {did_you_mean(command, COMMANDS)}")


def chat(llm: LLM, params: SamplingParams, system: str | None, raw: bool) -> int:
    """Talk until the user leaves; return the exit code."""
    shell = Shell(llm, params, system, raw)
    manner = "chat" if shell.uses_template else "plain completion, each line for itself"
    print(f"{llm.resolved.source.name}: {manner}. {HELP}.", file=sys.stderr)
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() its history and line editing
    interrupted_at = -SECOND_INTERRUPT_S
    while True:
        try:
            line = input("> ")
            if line.strip():
                shell.turn(line)
        except ValueError as error:
            print(f"nanorunner: {error}", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return OK
        except KeyboardInterrupt:
            now = time.monotonic()
            is_second = now - interrupted_at < SECOND_INTERRUPT_S
            if is_second or not _still_works(llm):
                print("\nnanorunner: interrupted", file=sys.stderr)
                return INTERRUPTED
            interrupted_at = now
            print("\nstopped; Ctrl-C again, /exit or Ctrl-D leaves", file=sys.stderr)


def _still_works(llm: LLM) -> bool:
    """Whether an interrupted engine can go on: two Ctrl-C inside one step break it."""
    try:
        llm.engine.step()  # every request was aborted, so this only reports
    except RuntimeError:
        return False
    return True
