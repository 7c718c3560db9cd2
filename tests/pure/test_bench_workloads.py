"""The benchmark's workloads never change: their published totals and first ids are fixed here."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from nanorunner.bench import workloads
from nanorunner.bench.prompt_file import read_prompt_file, times_of

VOCAB = 151_936


def test_the_nano_load_is_the_one_whose_results_are_published() -> None:
    load = workloads.make_workload("nano", VOCAB)
    assert len(load.prompts) == len(load.output_lens) == 256
    assert (load.num_input_tokens, sum(load.output_lens)) == (142_827, 133_966)
    assert load.longest <= 2048


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("b1", (1, 128, 512)),
        ("b8", (8, 512, 512)),
        ("b64", (64, 512, 512)),
        ("b256", (256, 512, 512)),
        ("prefill", (64, 2048, 1)),
        ("long", (8, 8192, 512)),
    ],
)
def test_a_uniform_load_has_its_stated_shape(name: str, shape: tuple[int, int, int]) -> None:
    load = workloads.make_workload(name, VOCAB)
    num_requests, input_len, output_len = shape
    assert [len(prompt) for prompt in load.prompts] == [input_len] * num_requests
    assert load.output_lens == [output_len] * num_requests
    assert load.prompts[0][:3] == [2201, 9325, 1033]  # what seed 1 gives on every Python


def test_ids_stay_inside_a_small_vocabulary() -> None:
    load = workloads.make_workload("b1", 517)
    assert 500 < max(load.prompts[0]) <= 516
    assert max(load.shifted(30, 516).prompts[0]) <= 516


def test_an_unknown_load_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="load 'b2': use some of nano, b1"):
        workloads.make_workload("b2", VOCAB)


def test_sharegpt_like_lengths_have_the_means_that_their_source_gives() -> None:
    lengths = workloads.sharegpt_lengths(20_000, seed=0)
    # 1,000 conversations are 215,196 ids in and about 198,000 out
    assert mean(length_in for length_in, _ in lengths) == pytest.approx(215.2, rel=0.03)
    assert mean(length_out for _, length_out in lengths) == pytest.approx(198, rel=0.03)
    assert all(4 <= i <= 1024 and o >= 4 and i + o <= 2048 for i, o in lengths)


def test_a_seed_fixes_the_lengths_and_the_ids_and_a_scale_only_shrinks_them() -> None:
    lengths = workloads.sharegpt_lengths(50, seed=3)
    assert lengths == workloads.sharegpt_lengths(50, seed=3) != workloads.sharegpt_lengths(50, 4)
    assert workloads.sharegpt_lengths(50, 3, 0.5) == [
        (round(i / 2), round(o / 2)) for i, o in lengths
    ]
    assert min(min(pair) for pair in workloads.sharegpt_lengths(50, 3, 0.001)) == 1
    load = workloads.of_lengths(lengths, 3, 100)
    assert load == workloads.of_lengths(lengths, 3, 100)
    assert [(len(p), n) for p, n in zip(*load, strict=True)] == lengths


def test_a_shifted_pass_keeps_lengths_and_common_beginnings_and_shares_no_id_in_place() -> None:
    load = workloads.Workload([[0, 1, 2, 9], [0, 1, 5]], [3, 4])
    other = load.shifted(1, largest_id=9)
    assert other == workloads.Workload([[1, 2, 3, 0], [1, 2, 6]], [3, 4])


def test_the_digest_tells_any_two_workloads_apart() -> None:
    loads = [
        workloads.Workload([[1, 2], [3]], [4, 5]),
        workloads.Workload([[1], [2, 3]], [4, 5]),
        workloads.Workload([[1, 2], [3]], [5, 4]),
        workloads.Workload([[1, 2], [4]], [4, 5]),
    ]
    about = [workloads.describe(load) for load in loads]
    assert len({one["digest"] for one in about}) == len(loads)
    assert about[0]["input_len"] == {"min": 1, "mean": 1.5, "p50": 1.5, "p95": 1.95, "max": 2}
    assert (about[0]["requests"], about[0]["input_tokens"], about[0]["output_tokens"]) == (2, 3, 9)


def write(folder: Path, *entries: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_file_gives_text_ids_or_lengths_and_a_default_for_the_output(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "Hello", "output_len": 3},
        {"prompt_token_ids": [5, 6]},
        {"input_len": 7, "output_len": 1},
    )
    text, ids, length = read_prompt_file(path, 9, is_trace=False)
    assert (text.text, text.output_len) == ("Hello", 3)
    assert (ids.token_ids, ids.output_len) == ((5, 6), 9)
    assert (length.input_len, length.output_len) == (7, 1)


def test_a_trace_may_say_its_times_in_either_unit(tmp_path: Path) -> None:
    line = {"input_len": 1, "output_len": 1}
    path = write(tmp_path, {**line, "timestamp_s": 1.5}, {**line, "timestamp_ms": 1750})
    assert times_of(read_prompt_file(path, None, is_trace=True)) == [1.5, 1.75]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"promt": "x"}, "line 1: unknown key 'promt'; did you mean prompt?"),
        ({"timestamp": 1, "input_len": 1}, "unknown key 'timestamp'; did you mean timestamp_"),
        ({"prompt": "x", "input_len": 1}, "prompt and input_len: give one of"),
        ({"output_len": 1}, "no prompt: give one of"),
        ({"prompt": "", "output_len": 1}, "prompt '': use some text"),
        ({"prompt_token_ids": [True], "output_len": 1}, "use a list of token ids"),
        ({"input_len": 0, "output_len": 1}, "input_len 0: use a whole number above 0"),
        ({"input_len": 1}, "output_len: is missing; write it, or give --output-len"),
        ({"input_len": 1, "output_len": 1, "timestamp_s": 1}, "only a trace has times"),
        ([1], "is no JSON object"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_its_key(
    tmp_path: Path, entry: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        read_prompt_file(write(tmp_path, entry), None, is_trace=False)


def test_a_trace_without_a_time_and_a_file_without_a_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a trace needs one of timestamp_s or timestamp_ms"):
        read_prompt_file(write(tmp_path, {"input_len": 1}), 1, is_trace=True)
    with pytest.raises(ValueError, match="it has no line"):
        read_prompt_file(write(tmp_path), 1, is_trace=False)
    with pytest.raises(ValueError, match="No such file"):
        read_prompt_file(tmp_path / "none", 1, is_trace=False)


def test_a_line_ends_at_its_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b\u0085c", "d"]  # ends of lines for Python, plain characters in JSON
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert [line.text for line in read_prompt_file(path, 4, is_trace=False)] == texts
