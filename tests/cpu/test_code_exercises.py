"""A right solution passes its examiner, a starter and a wrong one do not; signatures are ours."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ack_solution
import numpy as np
import one_shot_solution
import pytest
import torch
import torch.nn.functional as F

from nanorunner.cli import main
from nanorunner.kernels.philox import gumbel_noise_reference, random_word_reference
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs
from nanorunner.kernels.sample import gumbel_argmax
from nanorunner.kernels.silu_mul import silu_mul
from nanorunner.kernels.staged_write import staged_write
from nanorunner.workers.models.decoder import Decoder, Layer
from nanorunner.workers.shards import EvenShard, Span, even_shard
from nanorunner.workshop import check
from nanorunner.workshop.code_exercises import (
    EXERCISES,
    STARTERS,
    Functions,
    examine,
    load_functions,
    resolve,
    signature_problem,
)
from nanorunner.workshop.sandbox_channel import AT_ONCE, ONE_ACK, SandboxChannel, policy_channel
from nanorunner.workshop.sandbox_ranks import SandboxRing, run_ranks

RIGHT: dict[str, dict[str, Callable[..., Any]]] = {
    "row-parallel": {
        "even_shard": even_shard,
        "mlp": Decoder.mlp,
        "embed_tokens": Decoder.embed_tokens,
    },
    "ack": {"write_shm": ack_solution.write_shm, "read_shm": ack_solution.read_shm},
    "slot-mapping": {"prepare_decode_inputs": prepare_decode_inputs},
    "staged-write": {"staged_write": staged_write},
    "gumbel": {"gumbel_argmax": gumbel_argmax},
    "one-shot": {"all_reduce_one_shot": one_shot_solution.all_reduce_one_shot},
}


def problem_of(name: str, functions: Functions) -> str:
    """Return the first sentence that does not hold, with its problem; "" when all do."""
    for finding in examine(name, functions):
        if finding.problem:
            return f"{finding.sentence}: {finding.problem}"
    return ""


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_solution_passes(name: str) -> None:
    findings = list(examine(name, RIGHT[name]))
    assert [finding.problem for finding in findings] == [""] * len(findings)
    assert len(findings) >= 4


@pytest.mark.parametrize("name", EXERCISES)
def test_a_starter_has_the_projects_signatures_and_does_not_pass(name: str) -> None:
    exercise = EXERCISES[name]
    functions = load_functions(name, STARTERS / exercise.starter)
    assert list(functions) == list(exercise.functions)
    for function, own in exercise.functions.items():
        assert signature_problem(functions[function], resolve(own)) == ""
        assert inspect.getdoc(functions[function])
    assert problem_of(name, functions)


def test_another_signature_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def gumbel_argmax(logits, temperature, seed, vocab_offset=0): ...\n")
    with pytest.raises(ValueError, match=r"gumbel_argmax has another signature .*\(logits, temp"):
        load_functions("gumbel", file)
    file.write_text("def gumbel(): ...\n")
    with pytest.raises(ValueError, match="has no function gumbel_argmax"):
        load_functions("gumbel", file)
    with pytest.raises(ValueError, match=r"gumbel --starter > my_gumbel\.py` writes a starter"):
        load_functions("gumbel", tmp_path / "none.py")


def floor_shard(size: int, tp: int, rank: int) -> EvenShard:
    local_size = size // tp
    return EvenShard(local_size, Span(rank * local_size, (rank + 1) * local_size))


def mlp_with_everybodys_bias(self: Decoder, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x = silu_mul(self.linear(x, layer.gate_up, layer.gate_up_bias))
    return self.linear(x, layer.down, torch.full((len(layer.down),), 0.1))


def mlp_that_reduces(self: Decoder, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return self.group.all_reduce(Decoder.mlp(self, layer, x)) / self.tp


def embed_without_a_mask(self: Decoder, input_ids: torch.Tensor) -> torch.Tensor:
    local_ids = (input_ids - self.vocab.start).clamp(0, self.vocab.size - 1)
    return self.group.all_reduce(F.embedding(local_ids, self.embed))


def embed_without_the_sum(self: Decoder, input_ids: torch.Tensor) -> torch.Tensor:
    local_ids = input_ids - self.vocab.start
    is_elsewhere = (local_ids < 0) | (local_ids >= self.vocab.size)
    x = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.embed)
    return x.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def read_that_acks_first(self: SandboxChannel, timeout_s: float = 10.0) -> Any:
    """Ack before the copy: rank 0 may overwrite what is being read."""
    if self.events[self.rank - 1].wait(timeout_s):
        self.words[2 + self.rank] = self.words[0]
    return ack_solution.read_shm(self, timeout_s)


def slots_without_the_table(
    header: Any, idx_mapping: Any, state: Any, out: Any, block_size: int
) -> None:
    prepare_decode_inputs(header, idx_mapping, state, out, block_size)
    out.slot_mapping.copy_(out.positions)


def slots_in_batch_order(
    header: Any, idx_mapping: Any, state: Any, out: Any, block_size: int
) -> None:
    prepare_decode_inputs(header, torch.arange(len(idx_mapping)).int(), state, out, block_size)


def write_from_the_wrong_values(
    tables: Any, table_places: Any, packed: Any, num_writes: int
) -> None:
    """Every write begins at the first value."""
    header = packed[: 4 * num_writes].view(4, num_writes)
    for table, row, start, end in header.T.tolist():
        place = row * int(table_places[table, 1]) + start
        count = min(end, int(table_places[table, 1]) - start)
        tables[table][place : place + count] = packed[4 * num_writes :][:count]


def gumbel_without_the_position(
    logits: Any, temperature: Any, seed: Any, position: Any, vocab_offset: int = 0
) -> Any:
    return gumbel_argmax(logits, temperature, seed, torch.zeros_like(position), vocab_offset)


def gumbel_with_local_ids(
    logits: Any, temperature: Any, seed: Any, position: Any, vocab_offset: int = 0
) -> Any:
    """The noise of a shard's column, not of the vocabulary's id."""
    scores, ids = gumbel_argmax(logits, temperature, seed, position)
    return scores, ids + vocab_offset


def uniform_noise(
    logits: Any, temperature: Any, seed: Any, position: Any, vocab_offset: int = 0
) -> Any:
    ids = np.arange(logits.shape[1]) + vocab_offset
    words = random_word_reference(seed.numpy()[:, None], ids, position.numpy()[:, None])
    noise = torch.from_numpy(gumbel_noise_reference(words)).sigmoid()
    heat = temperature[:, None]
    scores = torch.where(heat > 0, logits / heat.clamp(min=1e-9) + noise, logits)
    values, best = scores.max(dim=-1)
    return values, best + vocab_offset


def own_part_first(x: Any, ring: SandboxRing, *, steps: Any) -> Any:
    if "send" in steps:
        for reader in range(ring.ranks):
            ring.post(reader, x)
    if "sum" in steps:
        parts = [ring.take(sender) for sender in range(ring.ranks)]
        total = parts.pop(ring.rank).float()
        x.copy_(sum(parts, start=total))
    return x


def in_bfloat16(x: Any, ring: SandboxRing, *, steps: Any) -> Any:
    if "send" in steps:
        for reader in range(ring.ranks):
            ring.post(reader, x)
    if "sum" in steps:
        parts = [ring.take(sender) for sender in range(ring.ranks)]
        x.copy_(sum(parts[1:], start=parts[0]))
    return x


def unacked(policy: str) -> dict[str, Callable[..., Any]]:
    kind = policy_channel(policy)

    def write_shm(
        self: Any, method: str, *args: Any, timeout_s: float = 10.0, check: Any = None
    ) -> int:
        self.policy = policy
        self._wait_for_acks = lambda *given: kind._wait_for_acks(self, *given)
        self._late = lambda: kind._late(self)
        return kind.write_shm(self, method, *args, timeout_s=timeout_s, check=check)

    return {"write_shm": write_shm, "read_shm": kind.read_shm}


WRONG: list[tuple[str, dict[str, Callable[..., Any]], str]] = [
    ("row-parallel", {"even_shard": floor_shard}, "even_shard(1, 2, 0) should be"),
    ("row-parallel", {"mlp": mlp_with_everybodys_bias}, "tp 1: the ranks' shares"),
    ("row-parallel", {"mlp": mlp_that_reduces}, "mlp made an all-reduce"),
    ("row-parallel", {"embed_tokens": embed_without_a_mask}, "tp 2: every rank gets"),
    ("row-parallel", {"embed_tokens": embed_without_the_sum}, "tp 2: every rank gets"),
    ("ack", unacked(AT_ONCE), "200 calls reach"),
    ("ack", unacked(ONE_ACK), "200 calls reach"),
    ("ack", {"read_shm": read_that_acks_first}, "200 calls reach"),
    ("slot-mapping", {"prepare_decode_inputs": slots_without_the_table}, "slot_mapping is [299]"),
    ("slot-mapping", {"prepare_decode_inputs": slots_in_batch_order}, "whatever order"),
    ("staged-write", {"staged_write": write_from_the_wrong_values}, "each take their own values"),
    ("gumbel", {"gumbel_argmax": gumbel_without_the_position}, "draws follow the softmax"),
    ("gumbel", {"gumbel_argmax": gumbel_with_local_ids}, "the best of two shards"),
    ("gumbel", {"gumbel_argmax": uniform_noise}, "draws follow the softmax"),
    ("one-shot", {"all_reduce_one_shot": own_part_first}, "every rank has the same bits"),
    ("one-shot", {"all_reduce_one_shot": in_bfloat16}, "the same bits of torch.bfloat16"),
]


@pytest.mark.parametrize(("name", "functions", "expected"), WRONG)
def test_a_wrong_solution_is_told_what_does_not_hold(
    name: str, functions: dict[str, Callable[..., Any]], expected: str
) -> None:
    assert expected in problem_of(name, RIGHT[name] | functions)


def test_what_the_code_raises_is_told_with_its_line() -> None:
    def staged_write(*given: Any) -> None:
        raise KeyError("oops")

    assert "KeyError: 'oops' (test_code_exercises.py, line" in problem_of(
        "staged-write", {"staged_write": staged_write}
    )


def test_the_command_examines_a_file_in_a_process_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "ack", ack_solution.__file__]) == 0
    text = capfd.readouterr().out
    assert text.count("  ok       ") == 6
    assert text.endswith("ack: all of it holds\n")


@pytest.mark.parametrize(
    ("content", "code", "expected"),
    [
        ("while True: pass\n", 1, "it did not end within 1 s: something waits for ever"),
        ("import os; os._exit(9)\n", 1, "the process that ran your code ended with 9"),
        ("import os; os._exit(0)\n", 1, "the process that ran your code ended with 0"),
        ("import os; os._exit(2)\n", 1, "the process that ran your code ended with 2"),
        ("import sys\nsys.exit(0)\n", 2, "ends the process when it is imported: SystemExit: 0"),
        ("def staged_write(:\n", 2, "SyntaxError"),
    ],
)
def test_a_file_that_hangs_crashes_or_is_no_python_ends_the_check(
    content: str,
    code: int,
    expected: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # time enough to start Python, which is all that the others need
    monkeypatch.setattr(check, "CODE_LIMIT_S", 1.0 if "while" in content else 100.0)
    mine = tmp_path / "mine.py"
    mine.write_text(content)
    assert main(["check", "staged-write", str(mine)]) == code
    text = capfd.readouterr().out
    assert expected in text
    assert "all of it holds" not in text


@pytest.mark.parametrize(
    ("last_words", "expected"),
    [
        ("sys.exit(0)", "SystemExit: 0 (mine.py, line 8)"),
        ("os._exit(0)", "the process that ran your code ended with 0, before the last try"),
    ],
)
def test_a_function_that_ends_the_process_does_not_pass(
    last_words: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Right until rank 0 has to name a dead rank: three sentences hold, then the code leaves."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        f"import os, sys\n"
        f"sys.path.insert(0, {str(Path(ack_solution.__file__).parent)!r})\n"
        f"from ack_solution import read_shm\n"
        f"import ack_solution\n\n"
        f"def write_shm(self, method, *args, timeout_s=10.0, check=None):\n"
        f"    if timeout_s < 1.0:\n"
        f"        {last_words}\n"
        f"    return ack_solution.write_shm(\n"
        f"        self, method, *args, timeout_s=timeout_s, check=check)\n"
    )
    assert main(["check", "ack", str(mine)]) == 1
    text = capfd.readouterr().out
    assert text.count("  ok       ") == 3
    assert expected in text
    assert "all of it holds" not in text


def test_a_rank_of_the_sandbox_that_exits_is_heard() -> None:
    """SystemExit in a thread says nothing by itself."""
    with pytest.raises(SystemExit, match="enough"):
        run_ranks(2, lambda rank: sys.exit("enough"))
    found = problem_of("ack", RIGHT["ack"] | {"read_shm": lambda *given, **named: sys.exit(0)})
    assert "SystemExit: 0" in found


def test_the_starter_is_printed_as_it_is_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, exercise in EXERCISES.items():
        assert main(["check", name, "--starter"]) == 0
        mine = tmp_path / "mine.py"
        mine.write_text(capsys.readouterr().out)
        assert list(load_functions(name, mine)) == list(exercise.functions)
    for words in ([], ["4"], ["akc"], ["ack", "mine.py"]):
        assert main(["check", *words, "--starter"]) == 2
        assert "write one name before --starter: row-parallel, ack" in capsys.readouterr().err


def test_without_a_file_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ack"]) == 0
    assert "nanorunner check ack --starter > my_ack.py" in capsys.readouterr().out
    assert main(["check", "ack", "a.py", "b.py"]) == 2
    assert "2 files; give one" in capsys.readouterr().err
