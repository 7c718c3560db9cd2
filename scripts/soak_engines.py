"""Start ten engines at the same time on one machine, and let each answer.

    python scripts/soak_engines.py [--engines 10] [--tp 2] [--rounds 1] [--json FILE]

They share no port, no name and no file: each must answer with the ids that an engine alone gives,
and leave no process and no name in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nanorunner.workshop.leftovers import shared_names  # noqa: E402

LIMIT_S = 600.0  # ten imports of torch at tp 2 on two cores take a minute


def main() -> None:
    """Run the rounds; exit with 1 when an engine failed or answered otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="tiny-llama", help="a preset, run with random weights")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    names = shared_names()
    (expected,) = run_together(1, options)
    rounds = []
    for _ in range(options.rounds):
        start = time.monotonic()
        answers = run_together(options.engines, options)
        rounds.append(
            {
                "seconds": round(time.monotonic() - start, 1),
                "right": sum(answer["ids"] == expected["ids"] for answer in answers),
                "problems": [answer["problem"] for answer in answers if answer["problem"]],
            }
        )
    left = sorted(shared_names() - names)
    is_good = not expected["problem"] and not left
    is_good = is_good and all(row["right"] == options.engines for row in rounds)
    report = {
        "soak": "engines",
        "good": is_good,
        "engines": options.engines,
        "tp": options.tp,
        "model": options.model,
        "rounds": rounds,
        "left_in_dev_shm": left,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(0 if is_good else 1)


def run_together(num_engines: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the engines at once; return each one's ids and its problem, "" when it has none."""
    command = [sys.executable, "-m", "nanorunner", "--model", options.model, "--json", "--quiet"]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu"]
    command += ["--tp", str(options.tp), "--num-blocks", "32", "--max-tokens", "16"]
    programs = [
        subprocess.Popen(
            [*command, "--ignore-eos"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(num_engines)
    ]
    request = json.dumps({"prompt_token_ids": list(range(3, 40))}) + "\n"
    for program in programs:  # to all before the first answer: they start together
        assert program.stdin is not None
        program.stdin.write(request)
        program.stdin.close()
        program.stdin = None
    return [_answer_of(program) for program in programs]


def _answer_of(program: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = program.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate(timeout=LIMIT_S)
        return {"ids": None, "problem": f"no answer in {LIMIT_S:g} s"}
    try:
        ids = json.loads(output)["token_ids"]
    except (ValueError, KeyError):
        ids = None
    is_good = program.returncode == 0 and ids
    return {
        "ids": ids,
        "problem": "" if is_good else f"exit {program.returncode}: {errors[-1000:]}",
    }


if __name__ == "__main__":
    main()
