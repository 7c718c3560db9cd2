"""Write the READMEs' table of measurements from benchmarks/h200/*.json, between two markers.

    python scripts/readme_table.py            rewrite README.md and README.zh.md
    python scripts/readme_table.py --check    exit 1 when one of them and the files differ

One row a file of scripts/bench_engine.py: output tokens/s of each load, median of its repeats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh.md")
BEGIN, END = "<!-- table:", "<!-- /table -->"
LOADS = ["b1", "b8", "b64", "b256", "nano"]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the engine results in `folder`, ordered by model size, tp and runner."""
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("engine") == "nanorunner" and "loads" in result:
            results.append(result)
    sizes = {"qwen3-0.6b": 0, "qwen3-1.7b": 1, "qwen3-8b": 2}
    return sorted(results, key=lambda r: (sizes[r["model"]], r["tp"], r["config"]["runner"]))


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table, output tokens/s; a load that was not run is a dash."""
    lines = [
        "| model, tp, runner, attention | " + " | ".join(LOADS) + " |",
        "|---" * (len(LOADS) + 1) + "|",
    ]
    for result in results:
        config, loads = result["config"], result["loads"]
        rates = [
            f"{loads[load]['output_tokens_per_s']:,.0f}" if load in loads else "-" for load in LOADS
        ]
        name = (
            f"{result['model']}, tp {result['tp']}, {config['runner']}, "
            f"{config['attention_backend']}"
        )
        lines.append(f"| {name} | " + " | ".join(rates) + " |")
    versions = results[0]["versions"]
    lines.append("")
    lines.append(
        f"Output tokens/s on {versions['gpus'][0]}, torch {versions['torch']}, "
        f"triton {versions['triton']}."
    )
    return "\n".join(lines)


def with_table(readme: str, body: str) -> str:
    """Return a README's text with `body` between the markers."""
    begin = readme.index("\n", readme.index(BEGIN)) + 1
    return readme[:begin] + body + "\n" + readme[readme.index(END) :]


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
