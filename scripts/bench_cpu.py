"""Compare this engine with transformers' generate on a CPU: tokens per second, in one process.

    python scripts/bench_cpu.py [--batches 1,8] [--repeats 3] [--out result.json]

The embedded SmolLM2-135M-Instruct at tp 1, greedy, 64 prompt tokens and 64 new ones a request, EOS
ignored on both sides. Each repeat runs every contestant once, one after the other, so that a busy
minute of the machine hits all of them. A rate is new tokens over the whole call, prefill included,
in the median repeat. Both sides run in float32 and in bfloat16; the bar compares the faster dtype
of each. The float32 ids of both sides must be equal.

The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from nanorunner import LLM, SamplingParams
from nanorunner.embedded_model import embedded_model_folder
from nanorunner.flags import Parser

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

DTYPES = ("float32", "bfloat16")
OURS, THEIRS = "nanorunner", "transformers"
WARM_UP_TOKENS = 4
FORMAT = "{:<6} {:<13} {:<9} {:>8}  {}"
TEXT = (
    "The harbour lay quiet in the morning. Fishing boats came in one after another, and the people "
    "on the quay counted the crates as they were lifted out. Nobody spoke of the storm that had "
    "kept them at home for three days, but everybody looked at the sky before going back to work. "
    "By noon the market was full, the price of herring had fallen twice, and children ran between "
    "the stalls with bread in their hands."
)

Ids = list[list[int]]
Generate = Callable[[Ids, int], Ids]  # (prompts, number of new tokens) -> the new ids


def our_generate(llm: LLM, prompts: Ids, num_tokens: int) -> Ids:
    """Return this engine's greedy ids."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.token_ids for output in llm.generate(requests, params, use_tqdm=False)]


def their_generate(model: Any, prompts: Ids, num_tokens: int) -> Ids:
    """Return transformers' greedy ids; the prompts have one length, so nothing is padded."""
    input_ids = torch.tensor(prompts)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=num_tokens,
    )
    ids: Ids = output[:, input_ids.shape[1] :].tolist()
    return ids


def load_theirs(dtype: str) -> Any:
    """Return transformers' model in `dtype`, told never to stop early."""
    model = AutoModelForCausalLM.from_pretrained(
        str(embedded_model_folder()), dtype=getattr(torch, dtype)
    )
    model.generation_config.eos_token_id = None
    return model


def make_prompts(llm: LLM, batch: int, length: int) -> Ids:
    """Return `batch` different prompts of `length` ids each."""
    assert llm.tokenizer is not None, "the embedded model has a tokenizer"
    ids = llm.tokenizer.encode(TEXT * (1 + (length + batch) // 80))
    return [ids[index : index + length] for index in range(batch)]


def measure(
    contestants: dict[tuple[str, str], Generate], prompts: Ids, num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Run every contestant `repeats` times, in turns, and return a row for each.

    Raises RuntimeError when one makes fewer ids than asked for, or when the float32 ids differ.
    """
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    ids: dict[tuple[str, str], Ids] = {}
    for generate in contestants.values():
        generate(prompts, WARM_UP_TOKENS)  # pays for what happens only once
    for _ in range(repeats):
        for key, generate in contestants.items():
            start = time.perf_counter()
            ids[key] = generate(prompts, num_tokens)
            seconds[key].append(time.perf_counter() - start)
            if any(len(row) != num_tokens for row in ids[key]):
                raise RuntimeError(f"{key}: fewer than {num_tokens} ids came out of a request")
    if ids[OURS, "float32"] != ids[THEIRS, "float32"]:
        raise RuntimeError(f"batch {len(prompts)}: the float32 ids of both sides differ")
    return [
        {
            "batch": len(prompts),
            "engine": engine,
            "dtype": dtype,
            "seconds": [round(second, 3) for second in taken],
            "tokens_per_s": round(len(prompts) * num_tokens / statistics.median(taken), 1),
        }
        for (engine, dtype), taken in seconds.items()
    ]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the faster dtype of each side and the ratio of their rates."""
    fastest = {
        engine: max((row for row in rows if row["engine"] == engine), key=rate)
        for engine in (OURS, THEIRS)
    }
    return {
        "batch": rows[0]["batch"],
        "ratio": round(rate(fastest[OURS]) / rate(fastest[THEIRS]), 2),
        **{f"{engine}_dtype": row["dtype"] for engine, row in fastest.items()},
        **{f"{engine}_tokens_per_s": rate(row) for engine, row in fastest.items()},
    }


def rate(row: dict[str, Any]) -> float:
    """Return a row's tokens per second."""
    return float(row["tokens_per_s"])


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Load every contestant, run every batch size, print the table and return the result."""
    transformers_logging.disable_progress_bar()
    with ExitStack() as stack:
        contestants: dict[tuple[str, str], Generate] = {}
        for dtype in DTYPES:
            llm = stack.enter_context(LLM(device="cpu", dtype=dtype, max_num_seqs=64))
            contestants[OURS, dtype] = partial(our_generate, llm)
            contestants[THEIRS, dtype] = partial(their_generate, load_theirs(dtype))
        torch.set_num_threads(args.threads)
        result: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "scripts/bench_cpu.py", *argv]),
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],  # of other work, when it was started
            "versions": {**describe_machine(), THEIRS: version(THEIRS)},
            "rows": [],
            "summary": [],
        }
        print(FORMAT.format("batch", "engine", "dtype", "tok/s", "seconds"), flush=True)
        for batch in args.batches:
            prompts = make_prompts(llm, batch, args.prompt_tokens)
            rows = measure(contestants, prompts, args.new_tokens, args.repeats)
            result["rows"] += rows
            result["summary"].append(summarise(rows))
            print_rows(rows, result["summary"][-1])
            write(result, args.out)
    return result


def print_rows(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print one batch size's part of the table."""
    for row in rows:
        seconds = " ".join(f"{second:.2f}" for second in row["seconds"])
        values = (row["batch"], row["engine"], row["dtype"], f"{rate(row):.1f}", seconds)
        print(FORMAT.format(*values))
    print(f"batch {summary['batch']}: {summary['ratio']:.2f} x transformers\n", flush=True)


def batch_sizes(text: str) -> list[int]:
    """Return the numbers of "1,8"."""
    return [positive(part) for part in text.split(",")]


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number above 0")
    return int(text)


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="bench_cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=batch_sizes, default=[1, 8], help="such as 1,8")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
