"""Measure speculation: ngram on real text, and a draft of known quality beside the formula.

    python scripts/bench_speculation.py [--batch-sizes 1,8] [--out FILE]          text
    python scripts/bench_speculation.py --oracle 0.6,0.8 [--model qwen3-8b]       the formula

Text: plain decoding and --speculative ngram on prompts made of this repository's pages (repeat,
continue, correct, summarise), greedy, in batches: output tokens a second from handing a batch over
to its last id, the share of drafts accepted in each place, and the ids of a verify step.

--oracle P: random weights of a model's shapes and drafts that are each right with probability P,
because they are the plain engine's own ids with some replaced (oracle_runner.py). The speed-up is
measured in steady decoding and stands beside (1 - P^(K+1)) / (1 - P) over (verify step time / plain
step time), both times measured apart. Exit code 1 when they differ by more than --limit percent, or
when a request did not get the plain engine's ids.

Every engine has a process of its own, and the engines take turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorunner.bench.fresh_process import run_fresh
from nanorunner.bench.measuring_flags import count_above_0, counts_above_0, number_above_0, one_of
from nanorunner.flags import Parser

if TYPE_CHECKING:
    from scripts.speculation_passes import (
        ADAPTIVE,
        ALL,
        NGRAM,
        ORACLE,
        PLAIN,
        TASKS,
        Job,
        Pass,
        oracle_rows,
        text_rows,
    )
else:  # a script's own folder is where Python looks first; it is no package
    from speculation_passes import (
        ADAPTIVE,
        ALL,
        NGRAM,
        ORACLE,
        PLAIN,
        TASKS,
        Job,
        Pass,
        oracle_rows,
        text_rows,
    )

SIDES = Path(__file__).with_name("speculation_sides.py")
ORACLE_MODEL, ORACLE_DRAFTS = "qwen3-8b", 4
PROMPT_ROOM = 512  # tokens of a text prompt at most, also where a token is a byte
LOG_LINES = 30  # of an engine that failed
DRAFTS_HELP = f"drafts a step (default 7 for ngram, {ORACLE_DRAFTS} for the oracle)"
TOKENS_HELP = "ids of a request: of text at most, of the oracle's exactly (default 256)"
WAYS_HELP = f"some of {NGRAM} (always drafts), {ADAPTIVE} (ngram, turned down where it loses)"
TEXT_ALONE = ("ways", "num_prompts", "byte_ids", "load_format")
ORACLE_ALONE = ("input_len", "limit")
TEXT_FORMAT = "{:>5} {:<10} {:<9} {:>9} {:>6} {:>7} {:>6}  {}"
ORACLE_FORMAT = "{:>5} {:>5} {:>9} {:>10} {:>9} {:>6} {:>9} {:>9} {:>7} {:>6}"

Result = dict[str, Any]


def make_parser() -> Parser:
    """Return the parser of this script's flags."""
    parser = Parser(prog="bench_speculation", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--oracle", type=probabilities, metavar="P,P", help="how often a draft is right, each P")
    add("--model", metavar="NAME", help=f"default: the embedded one; --oracle: {ORACLE_MODEL}")
    add("--tp", type=count_above_0, default=1, metavar="N")
    add("--batch-sizes", type=counts_above_0, default=[1, 8], metavar="N,N", help="default 1,8")
    add("--num-speculative-tokens", type=count_above_0, metavar="K", help=DRAFTS_HELP)
    add("--rounds", type=count_above_0, default=2, metavar="N", help="engines a side (default 2)")
    add("--repeats", type=count_above_0, default=3, metavar="N", help="passes of one (default 3)")
    add("--num-tokens", type=count_above_0, default=256, metavar="N", help=TOKENS_HELP)
    add("--time-limit", type=number_above_0, default=900.0, metavar="S", help="of an engine (900)")
    add("--out", type=Path, metavar="FILE", help="also write the JSON here")
    add = parser.add_argument_group("text").add_argument
    add("--ways", type=ways, default=[NGRAM], metavar="NAME,NAME", help=WAYS_HELP)
    add("--num-prompts", type=count_above_0, default=32, metavar="N", help="in all (default 32)")
    add("--byte-ids", action="store_true", help="for a model without a tokenizer")
    add("--load-format", default="auto", metavar="NAME", help="dummy: random weights")
    add = parser.add_argument_group("oracle").add_argument
    add("--input-len", type=count_above_0, default=128, metavar="N", help="default 128")
    add("--limit", type=number_above_0, default=10.0, metavar="PERCENT", help="default 10")
    add = parser.add_argument_group("engine").add_argument
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--gpu-memory-utilization", type=number_above_0, default=0.85, metavar="X")
    add("--enforce-eager", action="store_true")
    return parser


def check(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored, and batches that would never be full."""
    is_oracle = args.oracle is not None
    for name in TEXT_ALONE if is_oracle else ORACLE_ALONE:
        if getattr(args, name) != parser.get_default(name):
            where = "with" if is_oracle else "without"
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: means nothing {where} --oracle; leave it out")
    least = max(args.batch_sizes) * len(TASKS)
    if not is_oracle and args.num_prompts < least:
        parser.error(
            f"--num-prompts {args.num_prompts}: {len(TASKS)} tasks in batches of "
            f"{max(args.batch_sizes)} need {least} or more"
        )


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """Return one job for each side, the plain one first."""
    is_oracle = args.oracle is not None
    num_drafts = args.num_speculative_tokens or (ORACLE_DRAFTS if is_oracle else None)
    settings = {
        "tp": args.tp,
        "device": args.device,
        "dtype": args.dtype,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enforce_eager": args.enforce_eager,
        "prefix_cache": False,
        "max_num_seqs": max(args.batch_sizes),
        "model": args.model or (ORACLE_MODEL if is_oracle else ""),
        "max_model_len": (args.input_len if is_oracle else PROMPT_ROOM) + args.num_tokens,
        "load_format": "dummy" if is_oracle else args.load_format,
        "skip_tokenizer_init": is_oracle or args.byte_ids,
    }
    common: dict[str, Any] = {
        "batch_sizes": args.batch_sizes,
        "repeats": args.repeats,
        "num_tokens": args.num_tokens,
    }
    if is_oracle:
        common |= {"input_len": args.input_len, "probabilities": args.oracle}
    else:
        common |= {"num_prompts": args.num_prompts, "byte_ids": args.byte_ids}
    jobs = [Job(side=PLAIN, settings=settings, **common)]
    for side in [ORACLE] if is_oracle else args.ways:
        drafting = {
            "speculative": NGRAM,
            "num_speculative_tokens": num_drafts,
            "speculative_adaptive": side == ADAPTIVE,
        }
        jobs.append(Job(side=side, settings=settings | drafting, **common))
    return jobs


def run_side(job: Job, folder: Path, time_limit_s: float) -> Result:
    """Run a job in a fresh process and return its result.

    Raises RuntimeError, with the end of its log, when the process fails or takes too long.
    """
    name = f"{job.side}-{job.turn}"
    job_file, file, log = (folder / f"{name}.{end}" for end in ("job", "json", "log"))
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    outcome = run_fresh(["python", str(SIDES), str(job_file), str(file)], log, time_limit_s)
    if outcome.exit_code != 0 or outcome.timed_out:
        how = f"after {outcome.seconds:.0f} s" if outcome.timed_out else f"{outcome.exit_code}"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise RuntimeError("\n".join([*lines, f"the {job.side} side ended: {how}"]))
    result: Result = json.loads(file.read_text(encoding="utf-8"))
    start_up_s, seconds = result["start_up_s"], result["seconds"]
    print(f"turn {job.turn} {job.side}: start-up {start_up_s} s, {seconds} s in all", flush=True)
    return result


def take_turns(args: argparse.Namespace, jobs: list[Job]) -> dict[str, list[Result]]:
    """Return the results of every side, one a round."""
    results: dict[str, list[Result]] = {job.side: [] for job in jobs}
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), ""
        for turn in range(args.rounds):
            for job in jobs:
                its_job = replace(job, turn=turn, first=first)
                results[job.side].append(run_side(its_job, folder, args.time_limit))
                first = str(folder / f"{PLAIN}-0.json")
    return results


def compare(args: argparse.Namespace, results: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    passes = {
        side: [Pass(**one) for result in turns for one in result["passes"]]
        for side, turns in results.items()
    }
    if args.oracle is not None:
        rows = oracle_rows(passes[PLAIN], passes[ORACLE], len(passes[ORACLE][0].meant))
        print_oracle(rows)
    else:
        rows = text_rows(passes, same_ids(results))
        print_text(rows)
    return rows


def same_ids(results: dict[str, list[Result]]) -> dict[str, int]:
    """Return how many prompts got plain decoding's ids, by "side batch size"."""
    expected = results[PLAIN][0]["ids"]
    return {
        f"{side} {size}": sum(a == b for a, b in zip(ids, expected[size], strict=True))
        for side, turns in results.items()
        for size, ids in turns[0]["ids"].items()
    }


def print_text(rows: list[dict[str, Any]]) -> None:
    """Print a line for each batch size, task and side."""
    heads = ("batch", "task", "side", "tokens/s", "times", "a step", "same", "accepted by place")
    print(TEXT_FORMAT.format(*heads))
    for row in rows:
        same = row["same_ids"] if row["task"] == ALL else ""
        figures = (row["tokens_per_s"], row["times_plain"], row["mean_accepted_length"], same)
        shares = " ".join(f"{share:.2f}" for share in row["acceptance"])
        labels = (row["batch_size"], row["task"], row["side"])
        print(TEXT_FORMAT.format(*labels, *figures, shares))
    print("times: of the plain side's rate; a step: ids of a request; same: prompts with its ids")


def print_oracle(rows: list[dict[str, Any]]) -> None:
    """Print a line for each batch size and probability."""
    print(f"{'':44}ids a step        speed-up")
    heads = ("batch", "P", "plain ms", "verify ms", "formula", "came", "expected", "measured")
    print(ORACLE_FORMAT.format(*heads, "off by", "same"))
    for row in rows:
        labels = (row["batch_size"], f"{row['probability']:g}")
        times = (f"{row['plain_step_ms']:.3f}", f"{row['verify_step_ms']:.3f}")
        ids = (f"{row['expected_ids_a_step']:.3f}", f"{row['ids_a_step']:.3f}")
        speed_ups = (f"{row['expected_speed_up']:.3f}", f"{row['speed_up']:.3f}")
        off, same = f"{row['difference_percent']:+.1f}%", f"{row['same_ids']}/{row['requests']}"
        print(ORACLE_FORMAT.format(*labels, *times, *ids, *speed_ups, off, same))


def is_good(args: argparse.Namespace, rows: list[dict[str, Any]]) -> bool:
    """Return whether the oracle's rows are as they should be; text has no limit."""
    if args.oracle is None:
        return True
    return all(
        abs(row["difference_percent"]) <= args.limit and row["same_ids"] == row["requests"]
        for row in rows
    )


def probabilities(text: str) -> list[float]:
    """Return the numbers of "0.6,0.8"; argparse's error otherwise."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 < one <= 1 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers above 0 and up to 1, as 0.6,0.8")
    return found


def ways(text: str) -> list[str]:
    """Return the names of "ngram,adaptive"; argparse's error otherwise."""
    return [one_of(part, (NGRAM, ADAPTIVE)) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Measure, print and return the exit code."""
    parser = make_parser()
    args = parser.parse(argv)
    check(parser, args)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        results = take_turns(args, make_jobs(args))
    except RuntimeError as error:
        print(f"nanorunner: {error}", file=sys.stderr)
        return 1
    rows = compare(args, results)
    first = results[PLAIN][0]
    left_out = ("ids", "texts", "machine", "commit")
    turns = [
        {name: value for name, value in result.items() if name not in left_out}
        for results_of_side in results.values()
        for result in results_of_side
    ]
    good = is_good(args, rows)
    report = {
        "benchmark": "speculation",
        "good": good,
        "command": shlex.join(["python", "scripts/bench_speculation.py", *argv]),
        "started": started,
        "machine": first["machine"],
        "commit": first["commit"],
        "rows": rows,
        "turns": turns,
    }
    line = json.dumps(report)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
