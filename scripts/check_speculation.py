"""Greedy with speculation against greedy without: the same ids, request by request, and how fast.

    python scripts/check_speculation.py [--tp 2] [--num-prompts 200] [--draft-model M] [--out FILE]

The embedded SmolLM2-135M-Instruct (or --model) in float32, prompts made of this repository's own
pages: repeat a passage, continue it, mend it, say it shorter. First plain with room for all, then
with drafts and so few KV blocks that requests are preempted: every prompt ends so far in front of a
block's end that it starts in one block and needs a second one later. Exit code 1 when an id differs
or when nothing was preempted.

The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorunner import LLM, SamplingParams
from nanorunner.admission import SOON_TOKENS
from nanorunner.bench.measuring_flags import count_above_0
from nanorunner.flags import Parser
from nanorunner.workers.messages import BLOCK_SIZE

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/architecture.md", "docs/performance-log.md", "docs/compatibility.md")
TASKS = (
    "Repeat this text word for word:\n\n{}",
    "Continue this text:\n\n{}",
    "Correct the spelling of this text and give all of it back:\n\n{}",
    "Say this in one sentence:\n\n{}",
)
PASSAGE_CHARACTERS = 360
LONG_PASSAGE_CHARACTERS = 1200  # more tokens than a prompt keeps
NUM_SEQS = 16
NUM_FEW_BLOCKS = NUM_SEQS + 1
# Ids in front of a block's end: more than the scheduler looks ahead when it lets a request start.
DISTANCE = SOON_TOKENS + 2
FORMAT = "{:<22} {:>6} {:>9} {:>10} {:>9} {:>11} {:>8}"

Ids = list[list[int]]
Figures = dict[str, Any]


def make_prompts(count: int, characters: int = PASSAGE_CHARACTERS) -> list[str]:
    """Return `count` prompts from the pages, the tasks in turn, with so much text each."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    step = max(1, (len(text) - characters) // count)
    passages = [text[i * step : i * step + characters] for i in range(count)]
    return [TASKS[i % len(TASKS)].format(passage) for i, passage in enumerate(passages)]


def run(
    settings: dict[str, Any], prompts: list[str], num_tokens: int
) -> tuple[Ids, dict[str, Any]]:
    """Return the ids of all prompts, and what it took."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(device="cpu", dtype="float32", max_num_seqs=NUM_SEQS, **settings) as llm:
        assert llm.tokenizer is not None, "text needs a tokenizer"
        length = BLOCK_SIZE - DISTANCE
        requests = [{"prompt_token_ids": llm.tokenizer.encode(p)[:length]} for p in prompts]
        begin = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        stats = llm.engine.stats
    ids = [output.token_ids for output in outputs]
    return ids, {
        "settings": settings,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(map(len, ids)) / seconds, 1),
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "drafts_meant": stats.drafts_meant,
        "drafts_accepted": stats.drafts_accepted,
        "mean_accepted_length": round(stats.mean_accepted_length, 3),
    }


def main() -> int:
    """Compare, print and return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="", metavar="NAME", help="default: the embedded one")
    parser.add_argument("--draft-model", metavar="NAME", help="also with this small model")
    parser.add_argument("--tp", type=count_above_0, default=1, metavar="N")
    parser.add_argument("--num-prompts", type=count_above_0, default=200, metavar="N")
    parser.add_argument("--num-tokens", type=count_above_0, default=48, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    prompts = make_prompts(arguments.num_prompts, LONG_PASSAGE_CHARACTERS)
    base = {"model": arguments.model, "tp": arguments.tp, "max_model_len": 2 * BLOCK_SIZE}
    few = {"num_blocks": NUM_FEW_BLOCKS, "prefix_cache": False, "speculative_adaptive": False}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculative": "ngram", **few}}
    if arguments.draft_model:
        draft = {"speculative": "draft", "draft_model": arguments.draft_model}
        ways["draft"] = {**draft, **few}

    print(FORMAT.format("", "equal", "tokens/s", "steps", "preempted", "accepted", "a row"))
    rows: dict[str, dict[str, Any]] = {}
    expected: Ids = []
    for name, way in ways.items():
        ids, row = run({**base, **way}, prompts, arguments.num_tokens)
        expected = expected or ids
        row["equal"] = sum(a == b for a, b in zip(ids, expected, strict=True))
        rows[name] = row
        accepted = f"{row['drafts_accepted']}/{row['drafts_meant']}"
        figures = (row["tokens_per_s"], row["steps"], row["preemptions"], accepted)
        print(FORMAT.format(name, row["equal"], *figures, row["mean_accepted_length"]), flush=True)
    print("a row: ids that a request gets from a verify step", file=sys.stderr)
    is_right = all(row["equal"] == len(prompts) for row in rows.values())
    is_forced = all(row["preemptions"] for name, row in rows.items() if name != "plain")
    write(
        {
            "command": shlex.join(sys.argv),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "num_prompts": len(prompts),
            "num_tokens": arguments.num_tokens,
            "rows": rows,
        },
        arguments.out,
    )
    return 0 if is_right and is_forced else 1


if __name__ == "__main__":
    sys.exit(main())
