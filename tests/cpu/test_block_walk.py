"""The block walk tells what really happens: the scheduler's books and the runner's slots."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from nanorunner.cli import main
from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workshop.block_walk import Step, Walk
from nanorunner.workshop.blocks import DEFAULTS, IS_ALIKE, LENGTHS, do

TOY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu"]
MAX_TOKENS = 60


def start(runner: str) -> Walk:
    settings = {
        **DEFAULTS,
        "model": "tiny-llama",
        "load_format": "dummy",
        "device": "cpu",
        "runner": runner,
    }
    walk = Walk(resolve(make_config(settings)).runner_config)
    for number, (length, is_alike) in enumerate(zip(LENGTHS, IS_ALIKE, strict=True)):
        own = [(number * 97 + position) % 1000 for position in range(length)]
        if is_alike:
            own[:BLOCK_SIZE] = range(BLOCK_SIZE)
        assert walk.add(own, MAX_TOKENS) == number
    return walk


@pytest.fixture(scope="module", params=["v1", "v2"])
def walked(request: pytest.FixtureRequest) -> Iterator[tuple[Walk, list[Step], dict[str, str]]]:
    """Walk a run to its end, and keep what the walk said on its way."""
    with start(request.param) as walk:
        steps: list[Step] = []
        num_compared = 0
        said: dict[str, str] = {"before": "\n".join(walk.pool() + walk.tables())}
        while step := walk.step():
            steps.append(step)
            _check_books(walk)
            num_compared += _check_slots(walk)
            if len(steps) == 4:
                said["early"] = "\n".join([*walk.pool(), *walk.where(3, 299), *walk.block(0)])
                said["rows"] = "\n".join(walk.rows()) if request.param == "v2" else ""
            if any("preempted" in event for event in step.events):
                with pytest.raises(ValueError, match="sequence 3 waits: it holds no block"):
                    walk.where(3, 299)
            if any("sequence 3 starts" in event for event in step.events) and len(steps) > 4:
                said["late"] = "\n".join(walk.where(3, 299))
        # each decode step of v2 was compared, so a walk that compares nothing cannot pass
        assert (num_compared > 200) == (request.param == "v2")
        said["after"] = "\n".join(walk.pool() + walk.tables())
        yield walk, steps, said


def _check_books(walk: Walk) -> None:
    """What is told of every block adds up to what the block manager counts."""
    blocks = walk.scheduler.roster.blocks
    cells = " ".join(line for line in walk.pool()[1:-1:2]).split()
    assert len(cells) == blocks.num_blocks
    assert sum(cell in (".", "(kept)") for cell in cells) == blocks.num_free
    for block, cell in enumerate(cells):
        assert ("(kept)" in cell or "*" in cell) == (block in blocks.prefix_cache)


def _check_slots(walk: Walk) -> int:
    """Where the walk finds a token is where runner v2's input kernel has put it.

    Returns how many tokens were compared.
    """
    if walk.config.runner != "v2":
        return 0
    inputs, states = walk.runner.inputs, walk.runner.states
    num_reqs, num_tokens = int(inputs.header[0]), int(inputs.header[1])
    if num_tokens != num_reqs:
        return 0  # not a decode
    buffers = inputs.decode_buffers(num_reqs)
    sequence_of = {states.rows.row_of(s): s for s in range(4) if s in states.rows}
    num_compared = 0
    for place, row in enumerate(inputs.idx_mapping[:num_reqs].tolist()):
        sequence = sequence_of[row]
        if sequence in walk.reasons:
            continue
        position = int(buffers.positions[place])
        assert walk.place(sequence, position).slot == int(buffers.slot_mapping[place])
        num_compared += 1
    return num_compared


def test_blocks_are_taken_shared_published_preempted_and_freed(
    walked: tuple[Walk, list[Step], dict[str, str]],
) -> None:
    _, steps, said = walked
    events = "\n".join(event for step in steps for event in step.events)
    assert "sequence 0 starts: takes blocks 0, 1" in events
    assert "shares block 0 with sequence 0: 256 tokens need no computing" in events
    assert "block 0 full: a later prompt with the same beginning may share it" in events
    assert "takes block 5, for its tokens from 512 on" in events
    assert "sequence 3 is preempted, the newest: block 4 free, block 0 still used by" in events
    assert events.count("sequence 3 starts") == 2
    for sequence in range(4):
        assert f"sequence {sequence} has ended (length)" in events
    assert "used 0 + free 6 (0 with content kept) = 6" in said["before"]
    assert "sequence 3: waiting, 300 tokens" in said["before"]
    assert "used 0 + free 6" in said["after"]
    assert "ended: 0 (length), 1 (length), 2 (length), 3 (length)" in said["after"]


def test_a_token_keeps_its_k_and_v_when_its_block_changes(
    walked: tuple[Walk, list[Step], dict[str, str]],
) -> None:
    said = walked[2]
    assert "block table [0, 4] -> physical block 4" in said["early"]
    assert "slot 4 * 256 + 43 = 1067" in said["early"]
    assert "block 0: slots 0 to 255\n  sequence 0: tokens 0 to 255" in said["early"]

    def values(text: str) -> list[str]:
        return [line.partition("= ")[2] for line in text.splitlines() if "kv[" in line]

    assert "physical block 4" not in said["late"]  # it came back to another one
    assert len(values(said["late"])) == 2
    assert values(said["late"]) == values(said["early"])


def test_the_rows_are_those_of_the_device(
    walked: tuple[Walk, list[Step], dict[str, str]],
) -> None:
    walk, _, said = walked
    if walk.config.runner == "v1":
        with pytest.raises(ValueError, match="runner v1 has no state table"):
            walk.rows()
        return
    lines = said["rows"].splitlines()
    rows = {int(line.split()[1]): int(line.split()[0]) for line in lines[1:5]}
    assert sorted(rows) == [0, 1, 2, 3]
    assert len(set(rows.values())) == 4
    mapping = [int(number) for number in lines[5].rpartition("[")[2].rstrip("]").split(",")]
    assert sorted(mapping) == sorted(rows.values())
    assert "[0, 4]" in lines[1 + list(rows).index(3)]


def test_wrong_questions_are_answered_with_what_there_is() -> None:
    with start("v1") as walk:
        for words, expected in (
            (["where", "0", "5"], "sequence 0 waits"),
            (["where", "9", "5"], "sequence 9: no such sequence; these are there: 0, 1, 2, 3"),
            (["where", "0"], "write where SEQUENCE TOKEN"),
            (["where", "0", "x"], "write where SEQUENCE TOKEN"),
            (["block", "6"], "block 6: there are 0 to 5"),
            (["stpe"], "did you mean step?"),
            (["rows"], "start with --runner v2"),
        ):
            with pytest.raises(ValueError, match=r"\w") as caught:
                list(do(walk, words))
            assert expected in str(caught.value)
        list(do(walk, ["step"]))
        with pytest.raises(ValueError, match="sequence 0 has tokens 0 to 470"):
            list(do(walk, ["where", "0", "471"]))
        assert "not there yet" in "\n".join(do(walk, ["where", "0", "470"]))
        assert "has ended (abort)" in "\n".join(do(walk, ["abort", "0"]))
        with pytest.raises(ValueError, match=r"sequence 0 has ended \(abort\)"):
            list(do(walk, ["where", "0", "5"]))
        assert "until every sequence" in "\n".join(do(walk, ["help"]))


def test_a_script_runs_from_a_flag_and_a_wrong_command_ends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = "step 2; where 1 1; next; nonsense; pool"
    ids = ["--prompt-ids", "3,4,5", "--prompt-ids", "6,7"]
    code = main(["blocks", *TOY, *ids, "--max-tokens", "4", "--do", script])
    output = capsys.readouterr()
    assert code == 1
    assert "> step 2\nstep 1: sequence 0 3 tokens, sequence 1 2 tokens" in output.out
    assert "token 1 of sequence 1" in output.out
    assert "sequence 0 has ended (length)" in output.out
    assert "> pool" not in output.out
    assert output.err == (
        "nanorunner: unknown command 'nonsense'; use one of abort, block, help, next, pool, quit, "
        "rows, run, step, tables, where\n"
    )


def test_a_script_runs_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("step; tables\n\nrun\nquit\nnonsense\n"))
    assert main(["blocks", *TOY, "--prompt-ids", "3,4,5", "--max-tokens", "3"]) == 0
    text = capsys.readouterr().out
    assert "sequence 0: decoding" in text
    assert "every sequence has ended" in text


def test_a_setting_that_a_walk_would_ignore_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", *TOY, "--trace", "somewhere"]) == 2
    assert "--trace: a walk records no times" in capsys.readouterr().err


def test_a_prompt_in_words_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", *TOY, "--prompt", "Hello"]) == 2
    assert "this model has no tokenizer; use --prompt-ids" in capsys.readouterr().err
