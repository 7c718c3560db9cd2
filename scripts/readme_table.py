"""Write the READMEs' table of measurements from benchmarks/h200/*.json, between two markers.

    python scripts/readme_table.py            rewrite README.md and README.zh.md
    python scripts/readme_table.py --check    exit 1 when one of them and the files differ

One row a file: of scripts/bench_engine.py, or of vLLM on the same loads, right below v2 of the same
model and tp. Output tokens/s of each load, input tokens/s of `prefill`; median of the repeats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh.md")
BEGIN, END = "<!-- table:", "<!-- /table -->"
LOADS = ["b1", "b8", "b64", "b256", "nano", "prefill", "long"]
INPUT_LOADS = ("prefill",)  # one token out a request: what counts is how fast prompts go in
OURS, VLLM = "nanorunner", "vllm"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the engine results in `folder`, ordered by model size, tp and engine."""
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("engine") in (OURS, VLLM) and "loads" in result:
            results.append(result)
    sizes = {"qwen3-0.6b": 0, "qwen3-1.7b": 1, "qwen3-8b": 2}
    return sorted(results, key=lambda r: (sizes[r["model"]], r["tp"], r["engine"], who_ran(r)))


def who_ran(result: dict[str, Any]) -> str:
    """Return what a result calls its engine: "v2, triton" or "vLLM 0.25.1"."""
    if result["engine"] == VLLM:
        return f"vLLM {result['version']}"
    return f"{result['config']['runner']}, {result['config']['attention_backend']}"


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table and the line below it; a load that was not run is a dash.

    Raises ValueError when the results are not all of one kind of GPU, torch and triton, since that
    line names one.
    """
    lines = [
        "| model, tp, runner and attention or other engine | " + " | ".join(LOADS) + " |",
        "|---" * (len(LOADS) + 1) + "|",
    ]
    for result in results:
        name = f"{result['model']}, tp {result['tp']}, {who_ran(result)}"
        rates = [rate(result["loads"], load) for load in LOADS]
        lines.append(f"| {name} | " + " | ".join(rates) + " |")
    machines = {
        f"{gpu}, torch {result['versions']['torch']}, triton {result['versions']['triton']}"
        for result in results
        for gpu in result["versions"]["gpus"]
    }
    if len(machines) != 1:
        raise ValueError(f"one table, but results of {sorted(machines)}: keep those of one")
    lines.append("")
    lines.append(f"Output tokens/s, of `prefill` input tokens/s, on {machines.pop()}.")
    return "\n".join(lines)


def rate(loads: dict[str, Any], load: str) -> str:
    """Return a load's cell of the table."""
    if load not in loads:
        return "-"
    side = "input" if load in INPUT_LOADS else "output"
    return f"{loads[load][f'{side}_tokens_per_s']:,.0f}"


def with_table(readme: str, body: str) -> str:
    """Return a README's text with `body` between the markers, the second one behind its last line.

    There it takes no line of its own and is no part of what a reader sees.
    """
    begin = readme.index("\n", readme.index(BEGIN)) + 1
    return readme[:begin] + body + " " + readme[readme.index(END) :]


def main() -> int:
    """Rewrite or check the READMEs; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    body = table(read_results(ROOT / "benchmarks" / "h200"))
    code = 0
    for path in (ROOT / name for name in READMES):
        before = path.read_text(encoding="utf-8")
        after = with_table(before, body)
        if not arguments.check:
            path.write_text(after, encoding="utf-8")
        elif before != after:
            print(f"{path.name} differs: run without --check")
            code = 1
        else:
            print(f"{path.name} is up to date")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
