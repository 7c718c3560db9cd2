"""The block walk: step through a run and see its KV blocks taken, shared, freed and preempted.

Without a prompt four sequences run in a small pool: 0, 1 and 3 share their first 256 tokens, and
after about 40 steps there are too few blocks. On a terminal Enter is one step; otherwise commands
are read from stdin, or from --do "step 5; where 3 299".

    nanorunner blocks                                              the embedded model
    nanorunner blocks --model tiny-llama --load-format dummy       a toy, at once
    nanorunner blocks --runner v2 --do "step 3; rows"
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from nanorunner.config import Config, make_config
from nanorunner.did_you_mean import did_you_mean
from nanorunner.errors import RankDied
from nanorunner.exit_codes import OK, RANK_DIED, REQUEST_FAILED
from nanorunner.flags import add_engine_flags, engine_settings, parse_ids
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workshop.block_walk import Batch, Step, Walk

if TYPE_CHECKING:
    from nanorunner.resolve import Resolved

# Four sequences in six blocks: they start in five, and after some 40 tokens two of them need one.
DEFAULTS = {
    "num_blocks": 6,
    "max_num_seqs": 4,
    "max_num_reqs": 8,
    "max_num_batched_tokens": 1024,
    "max_model_len": 1024,
}
LENGTHS = (470, 474, 40, 300)  # of the default prompts
IS_ALIKE = (True, True, False, True)  # begins with the same BLOCK_SIZE tokens
# Settings that would be ignored in silence.
NOT_HERE = {
    "trace": "a walk records no times",
    "step_times": "a walk records no times",
    "tap": "a walk shows blocks, not frames",
    "tap_json": "a walk shows blocks, not frames",
    "speculative": "a walk gives each request one token a step",
}
DEFAULT_MAX_TOKENS = 60
MOST_STEPS = 100_000  # of one command


class Command(NamedTuple):
    """One word that the walk understands."""

    usage: str
    about: str
    num_numbers: tuple[int, ...]  # how many numbers may follow
    do: Callable[[Walk, list[int]], Iterable[str]]


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags, the engine's last."""
    parser.add_argument(
        "--do", metavar="TEXT", help="commands with ; between them, instead of stdin"
    )
    parser.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="a sequence; repeat for several"
    )
    parser.add_argument(
        "--prompt-ids", action="append", type=parse_ids, metavar="1,2,3", help="one by its ids"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"ids to generate for each sequence (default {DEFAULT_MAX_TOKENS})",
    )
    add_engine_flags(parser)


def run(arguments: Namespace) -> int:
    """Walk until the commands end; 1 when one of a script's was wrong."""
    given = engine_settings(arguments)
    for name, reason in NOT_HERE.items():
        if given.get(name, getattr(Config, name)) != getattr(Config, name):
            raise ValueError(f"--{name.replace('_', '-')}: {reason}; use `run`")
    defaults = {**DEFAULTS}
    if "kv_cache_gib" in given:  # the two size the same thing
        del defaults["num_blocks"]
    config = make_config(defaults | given)
    # here: --help and a misspelt flag should not wait for torch
    from nanorunner.resolve import resolve

    resolved = resolve(config)
    prompts = _prompts(arguments, resolved)
    try:
        walk = Walk(resolved.runner_config, prefix_cache=resolved.config.prefix_cache)
        with walk:
            for prompt_ids in prompts:
                walk.add(prompt_ids, arguments.max_tokens)
            return _talk(walk, resolved, arguments.do)
    except RankDied as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return RANK_DIED


def _prompts(arguments: Namespace, resolved: Resolved) -> list[list[int]]:
    """Return the sequences' prompts: those given, or four that share a beginning."""
    texts, prompts = arguments.prompt or [], arguments.prompt_ids or []
    if texts:
        if not resolved.source.has_tokenizer:
            raise ValueError("--prompt: this model has no tokenizer; use --prompt-ids")
        # here: it needs transformers, which takes seconds
        from nanorunner.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolved.source.folder)
        prompts = [tokenizer.encode(text) for text in texts] + prompts
    if prompts:
        return prompts
    vocab_size = resolved.runner_config.model.vocab_size
    ids = random.Random(0)
    beginning = [ids.randrange(vocab_size) for _ in range(BLOCK_SIZE)]
    for length, is_alike in zip(LENGTHS, IS_ALIKE, strict=True):
        start = beginning if is_alike else []
        prompts.append(start + [ids.randrange(vocab_size) for _ in range(length - len(start))])
    return prompts


def _talk(walk: Walk, resolved: Resolved, script: str | None) -> int:
    """Do one command after the other; on a terminal a wrong one is only told."""
    is_terminal = script is None and sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  gives input() its history and line editing

        print(f"{resolved.source.name}, tp {walk.config.tp}, runner {walk.config.runner}.")
        print("Enter is one step; help lists the commands.")
    print("\n".join([*walk.tables(), *walk.pool()]))
    for line in _lines(script, is_terminal):
        words = line.split()
        if not words and not is_terminal:
            continue
        if words and words[0] in ("quit", "exit"):
            break
        if not is_terminal:
            print(f"\n> {' '.join(words)}")
        try:
            for text in do(walk, words or ["step"]):
                print(text, flush=True)
        except ValueError as error:
            print(f"nanorunner: {error}", file=sys.stderr)
            if not is_terminal:
                return REQUEST_FAILED
    return OK


def _lines(script: str | None, is_terminal: bool) -> Iterator[str]:
    if script is not None:
        yield from script.split(";")
        return
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        yield from line.split(";")


def do(walk: Walk, words: list[str]) -> Iterable[str]:
    """Do one command and return what it has to say; ValueError for one that is no command."""
    name, rest = words[0], words[1:]
    if name == "help":
        return [f"{command.usage:<20} {command.about}" for command in COMMANDS.values()]
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}; {did_you_mean(name, [*COMMANDS, 'help'])}")
    command = COMMANDS[name]
    if len(rest) not in command.num_numbers or not all(word.isdecimal() for word in rest):
        raise ValueError(f"{' '.join(words)}: write {command.usage}")
    return command.do(walk, [int(word) for word in rest])


def _step(walk: Walk, numbers: list[int]) -> Iterator[str]:
    return _steps(walk, numbers[0] if numbers else 1, until_event=False)


def _next(walk: Walk, numbers: list[int]) -> Iterator[str]:
    return _steps(walk, MOST_STEPS, until_event=True)


def _run(walk: Walk, numbers: list[int]) -> Iterator[str]:
    return _steps(walk, MOST_STEPS, until_event=False)


def _steps(walk: Walk, most: int, *, until_event: bool) -> Iterator[str]:
    """Run up to `most` steps; steps in which no block moved are told together."""
    quiet: list[Step] = []
    for _ in range(most):
        step = walk.step()
        if step is None:
            yield from _quiet(quiet)
            yield "every sequence has ended"
            return
        if not step.events and (not quiet or step.batches == quiet[0].batches):
            quiet.append(step)
            continue
        yield from _quiet(quiet)
        quiet = [] if step.events else [step]
        if step.events:
            yield f"step {step.number}: {_batch(step)}"
            yield from (f"  {event}" for event in step.events)
            if until_event:
                return
    yield from _quiet(quiet)


def _quiet(steps: list[Step]) -> Iterator[str]:
    if len(steps) == 1:
        yield f"step {steps[0].number}: {_batch(steps[0])}; no block moved"
    elif steps:
        first, last = steps[0], steps[-1]
        yield f"steps {first.number} to {last.number}: {_batch(first)}; no block moved"


def _batch(step: Step) -> str:
    """Return who is in the step, and with how many tokens."""
    return "; then ".join(map(_in_words, step.batches)) or "nothing planned"


def _in_words(batch: Batch) -> str:
    single = [str(sequence) for sequence, count in batch if count == 1]
    parts = [f"sequence {sequence} {count} tokens" for sequence, count in batch if count > 1]
    if single:
        each = " each" if len(single) > 1 else ""
        parts.insert(0, f"sequence {', '.join(single)} one token{each}")
    return ", ".join(parts)


COMMANDS = {
    "step": Command("step [N]", "run one step, or N", (0, 1), _step),
    "next": Command("next", "run until a block moves", (0,), _next),
    "run": Command("run", "run until every sequence has ended", (0,), _run),
    "where": Command(
        "where SEQUENCE TOKEN", "find its block and slot", (2,), lambda w, n: w.where(n[0], n[1])
    ),
    "pool": Command("pool", "every block and who uses it", (0,), lambda w, _: w.pool()),
    "tables": Command("tables", "every sequence's block table", (0,), lambda w, _: w.tables()),
    "block": Command("block N", "who uses one block", (1,), lambda w, n: w.block(n[0])),
    "rows": Command("rows", "runner v2: state rows and idx_mapping", (0,), lambda w, _: w.rows()),
    "abort": Command("abort SEQUENCE", "end one now", (1,), lambda w, n: w.abort(n[0])),
    "quit": Command("quit", "leave (or Ctrl-D)", (0,), lambda w, _: ()),
}
