"""A bad request is one clear line, and a running engine goes on serving the others.

Settings and machines that cannot work are in test_config.py, test_cli.py and test_resolve.py;
here are the requests that only a running engine can judge, and the command line's exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model

ROOT = Path(__file__).parents[2]
GOOD = [3, 4, 5]
POOL_TOKENS = 2 * 256
MAX_MODEL_LEN = 768  # longer than the pool, so that both limits can be met
LONG = 32768  # so many tokens take a minute or so: whoever is ended meanwhile is not done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # as many ids as the tokenizer has, so that whatever the model says is text
    fields = {**load_preset("tiny-llama"), "vocab_size": 259}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields, has_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", tp=2, num_blocks=2, max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **settings})


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    """What the good prompt gets from an engine that has seen nothing bad."""
    return llm.generate(GOOD, greedy(), use_tqdm=False)[0].token_ids


BAD_PROMPTS: list[tuple[Any, list[str]]] = [
    ("", ["prompts[1]", "no token ids"]),
    ({"prompt_token_ids": []}, ["prompts[1]", "no token ids"]),
    ([3, 259], ["token id 259 at position 1", "use 0 to 258"]),
    ([-1], ["token id -1", "use 0 to 258"]),
    ([2**70], ["prompts[1]"]),
    ([3] * MAX_MODEL_LEN, ["768 tokens", "max_model_len", "at most 767"]),
    ([3] * (POOL_TOKENS + 1), ["513 tokens", "3 KV blocks", "the KV cache has 2"]),
    (5.0, ["prompts[1]", "float"]),
    (None, ["prompts[1]", "NoneType"]),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda value: str(value)[:30])
def test_one_bad_prompt_refuses_the_call_before_anything_is_queued(
    prompt: Any, words: list[str], llm: LLM, expected: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        llm.generate([GOOD, prompt], greedy(), use_tqdm=False)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not llm.engine.has_unfinished()
    assert llm.generate(GOOD, greedy(), use_tqdm=False)[0].token_ids == expected


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([greedy()], "1 given for 2 prompts"),
        ([greedy(), greedy(stop_token_ids=[259])], "259 is not in the vocabulary"),
        ([greedy(), greedy(stop_token_ids=[-1])], "-1 is not in the vocabulary"),
        ("greedy", "is str, use a SamplingParams"),
    ],
)
def test_bad_params_refuse_the_call_before_anything_is_queued(
    params: Any, words: str, llm: LLM, expected: list[int]
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate([GOOD, GOOD], params, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    assert llm.generate(GOOD, greedy(), use_tqdm=False)[0].token_ids == expected


def test_a_bad_request_leaves_those_that_run_alone(llm: LLM, expected: list[int]) -> None:
    (answer,) = llm._prepare(read(GOOD), greedy())
    running = llm.run([answer])
    next(running)
    with pytest.raises(ValueError, match="no token ids"):
        llm.generate("", greedy(), use_tqdm=False)
    for _ in running:
        pass
    assert answer.output().token_ids == expected


def test_a_request_that_outgrows_the_pool_ends_and_the_engine_goes_on(
    llm: LLM, expected: list[int]
) -> None:
    outputs = llm.generate([[3] * 500, GOOD], [greedy(max_tokens=200), greedy()], use_tqdm=False)
    assert 0 < len(outputs[0].token_ids) <= POOL_TOKENS - 500 + 1
    assert outputs[0].finish_reason != "stop"
    assert outputs[1].token_ids == expected


def test_max_tokens_past_the_model_s_end_is_cut_not_refused(folder: Path) -> None:
    with LLM(folder, device="cpu", max_model_len=16) as llm:
        (output,) = llm.generate([GOOD], greedy(max_tokens=500), use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (13, "length")


def read(ids: list[int]) -> list[Any]:
    from nanorunner.prompts import read_prompts

    return list(read_prompts(ids))


def nanorunner(folder: Path, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line on the toy model at tp 2."""
    command = [sys.executable, "-m", "nanorunner", "--model", str(folder), "--device", "cpu"]
    return subprocess.run(
        [*command, "--tp", "2", "--max-tokens", "4", "--ignore-eos", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        timeout=280,
    )


def test_a_pipe_answers_the_good_lines_and_reports_the_bad_ones_in_place(folder: Path) -> None:
    lines = [
        b'{"prompt": "hello", "id": "first"}',
        b'{"prompt": "hello"',
        b'{"prompt_token_ids": [99999]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}',
        b'{"prompt": ""}',
        b"plain text",
    ]
    result = nanorunner(folder, stdin=b"\n".join(lines))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert ["error" in row for row in rows] == [False, True, True, False, True, False]
    assert [len(row["token_ids"]) for row in rows if "error" not in row] == [4, 2, 4]
    assert rows[0]["id"] == "first"
    assert "not JSON" in rows[1]["error"]
    assert "99999" in rows[2]["error"]
    assert result.returncode == 1
    assert b"Traceback" not in result.stderr


def test_prompts_give_their_completions_alone_on_stdout(folder: Path) -> None:
    both = nanorunner(folder, "--prompt", "one", "--prompt", "two", "--json")
    rows = [json.loads(line) for line in both.stdout.splitlines()]
    assert both.returncode == 0
    alone = nanorunner(folder, "--prompt", "one", "--quiet")
    assert alone.stdout.decode() == rows[0]["text"] + "\n"
    assert alone.stderr == b""


def test_a_preset_s_shape_answers_ids_with_ids(folder: Path) -> None:
    words = ["--model", "tiny-qwen2", "--load-format", "dummy", "--tp", "1"]
    result = nanorunner(folder, *words, "--prompt-ids", "1,2,3", "--prompt", "text")
    assert result.returncode == 1  # a text prompt needs a tokenizer
    ids = result.stdout.decode().split("\n")[-2]
    assert len([int(token_id) for token_id in ids.split(",")]) == 4
    assert b"prompt 0: a text prompt needs a tokenizer" in result.stderr


def test_the_template_is_used_unless_the_prompt_is_raw(folder: Path) -> None:
    chat = nanorunner(folder, "--prompt", "one", "--json", "--system", "be brief", "--tp", "1")
    raw = nanorunner(folder, "--prompt", "one", "--json", "--raw", "--tp", "1")
    as_user = len("system: be brief\nuser: one\nassistant: ")
    assert json.loads(chat.stdout)["num_prompt_tokens"] == as_user
    assert json.loads(raw.stdout)["num_prompt_tokens"] == len("one")


def test_a_prompt_that_is_too_long_fails_alone_with_1(folder: Path) -> None:
    words = ["--prompt", "x" * 50, "--prompt", "y", "--raw", "--max-model-len", "32"]
    result = nanorunner(folder, *words)
    assert result.returncode == 1
    assert b"prompt 0: prompt: 50 tokens" in result.stderr
    assert len(result.stdout) > 1  # the other prompt's completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tp", "99", "--prompt", "a"], "4 query heads; use 1 to 4"),
        (["--model", "/nowhere/x", "--prompt", "a"], "no such folder"),
        (["--max-model-len", "2k", "--prompt", "a"], "positions end at 1024"),
        (["--device", "cuda", "--prompt", "a"], "--device cpu"),
    ],
)
def test_what_cannot_start_is_refused_with_2_and_one_line(
    words: list[str], expected: str, folder: Path
) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        words = ["--device", "cuda", "--tp", "4", "--max-model-len", "1M", "--prompt", "a"]
        expected = "use"
    result = nanorunner(folder, *words, "--quiet")
    assert (result.returncode, result.stdout) == (2, b"")
    assert expected in result.stderr.decode()
    assert result.stderr.startswith(b"nanorunner: ")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("victim", "number", "code", "words"),
    [("rank 1", signal.SIGKILL, 3, "rank 1"), ("rank 0", signal.SIGINT, 130, "interrupted")],
)
def test_a_run_that_is_ended_from_outside_has_its_own_exit_code(
    victim: str, number: signal.Signals, code: int, words: str, tmp_path: Path
) -> None:
    fields = {**load_preset("tiny-llama"), "vocab_size": 259, "max_position_embeddings": LONG}
    folder = make_toy_model(tmp_path / "long", fields, has_tokenizer=True)
    command = [sys.executable, "-m", "nanorunner", "--model", str(folder), "--device", "cpu"]
    lengths = ["--max-model-len", str(LONG), "--max-tokens", "30000"]
    process = subprocess.Popen(
        [*command, "--tp", "2", *lengths, "--ignore-eos", "--prompt", "a"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.read(1)  # the answer has begun
        children = psutil.Process(process.pid).children()  # Python's resource tracker is another
        (rank_1,) = (c for c in children if "rank_main" in " ".join(c.cmdline()))
        os.kill(rank_1.pid if victim == "rank 1" else process.pid, number)
        _, log = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code
    assert words in log.decode()
    assert not psutil.pid_exists(rank_1.pid)
