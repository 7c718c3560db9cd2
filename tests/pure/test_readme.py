"""Both READMEs say what is so: their table, files, links and flags; and they say the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_text import TEXT, fences, pair_problem

from nanorunner.bench.cli import COMMANDS, parser_of
from nanorunner.bench.workloads import make_workload
from nanorunner.cli import run_parser
from scripts.readme_table import INPUT_LOADS, LOADS, read_results, table, who_ran

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "h200"
PICTURE = "benchmarks/h200/tokens-per-second.png"
READMES = ["README.md", "README.zh.md"]
PAGES = [*READMES, "docs/architecture.md"]
FILE = re.compile(r"\w[\w./-]*\.(?:py|md)\b", re.ASCII)  # Chinese may stand right beside a name
NAMES = re.compile(rf"{FILE.pattern}|\b[A-Z][a-z]+[A-Z]\w*|\b\w+/(?=\s)", re.ASCII)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def files_of_the_project() -> Iterator[str]:
    """Yield every file below the root; not in hidden folders, where others write meanwhile."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from (Path(folder, name).relative_to(ROOT).as_posix() for name in files)


def test_the_table_is_what_the_result_files_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{readme} is up to date" for readme in READMES]


def result(model: str, tp: int, runner: str, torch: str = "2.11.0", **rates: float) -> Any:
    """Return as much of a result file as the table reads; runner "": vLLM's."""
    loads = {
        load: {"output_tokens_per_s": rate, "input_tokens_per_s": rate * 10}
        for load, rate in rates.items()
    }
    config = {"runner": runner, "attention_backend": "triton"}
    ours = {"engine": "nanorunner", "config": config}
    versions = {"gpus": ["NVIDIA H200"] * tp, "torch": torch, "triton": "3.6.0"}
    return {
        **(ours if runner else {"engine": "vllm", "version": "0.25.1"}),
        **{"model": model, "tp": tp, "versions": versions, "loads": loads},
    }


def test_a_row_of_vllm_stands_below_v2_of_its_model_and_tp(tmp_path: Path) -> None:
    sides = [(model, tp) for model in ("qwen3-8b", "qwen3-0.6b") for tp in (2, 1)]
    results = [result(*side, runner, b1=1) for side in sides for runner in ("", "v2", "v1")]
    for number, each in enumerate([*results, {"engine": "nanorunner"}, {"other": "file"}]):
        (tmp_path / f"{number}.json").write_text(json.dumps(each))
    found = read_results(tmp_path)
    names = [f"{each['model']}, tp {each['tp']}" for each in found]
    assert names == [f"{model}, tp {tp}" for model, tp in reversed(sides) for _ in range(3)]
    assert [who_ran(each) for each in found] == ["v1, triton", "v2, triton", "vLLM 0.25.1"] * 4


def test_a_cell_is_the_rate_that_counts_for_its_load_or_a_dash() -> None:
    assert set(LOADS) > set(INPUT_LOADS) == {"prefill"}
    rows = table([result("qwen3-8b", 1, "", b8=1378.8, prefill=4189.12, long=735.9)]).splitlines()
    assert rows[0].endswith("| b1 | b8 | b64 | b256 | nano | prefill | long |")
    assert rows[2] == ("| qwen3-8b, tp 1, vLLM 0.25.1 | - | 1,379 | - | - | - | 41,891 | 736 |")
    assert "`prefill` input tokens/s, on NVIDIA H200, torch 2.11.0, triton 3.6.0." in rows[-1]


def test_a_table_of_results_of_two_torches_is_refused() -> None:
    results = [result("qwen3-8b", tp, "v2", torch=f"2.1{tp}.0", b1=1) for tp in (1, 2)]
    with pytest.raises(ValueError, match=r"torch 2\.11\.0.*torch 2\.12\.0"):
        table(results)


@pytest.mark.parametrize("page", READMES)
def test_the_words_about_the_figures_are_what_the_files_and_loads_say(page: str) -> None:
    section = numbers_section(page)
    ours = {
        (each["model"], each["tp"]): each
        for each in read_results(RESULTS)
        if who_ran(each).startswith("v2")
    }
    theirs = [each for each in read_results(RESULTS) if each["engine"] == "vllm"]
    assert {(each["model"], each["tp"]) for each in theirs} == set(ours)
    for each in theirs:
        own = ours[each["model"], each["tp"]]
        assert "same GPUs, same hour" in each["beside"]
        assert each["settings"]["rest"] == "vLLM's defaults"
        assert own["date"][:10] == each["date"]
        assert f"commit {own['versions']['commit']}" in section
    older = {
        (*side, load)
        for side, each in ours.items()
        for load, row in each["loads"].items()
        if row.get("commit", each["versions"]["commit"]) != each["versions"]["commit"]
    }
    assert older == {("qwen3-0.6b", 2, load) for load in ("b1", "b8", "b64")}
    for each in read_results(RESULTS):
        assert all(len(row["seconds"]) == 3 for row in each["loads"].values())
    for load in LOADS:
        prompts, output_lens = make_workload(load, 2)
        assert f"`{load}`" in section
        lengths = {len(prompt) for prompt in prompts} | set(output_lens)
        if load == "nano":  # drawn from 100 to 1,024; the very ends need not come up
            assert 100 <= min(lengths) < 110
            assert 1014 < max(lengths) <= 1024
            lengths = {100, 1024}
        for number in {len(prompts)} | lengths:
            assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", section), (load, number)


@pytest.mark.parametrize("page", READMES)
def test_the_latencies_under_timed_arrivals_are_the_files(page: str) -> None:
    section = numbers_section(page)
    ours, theirs, elsewhere = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("arrivals-v2", "arrivals-vllm", "other-runs/arrivals-vllm-two-gpus")
    )
    assert ours["commit"] == theirs["commit"]
    assert ours["started"][:13] == theirs["started"][:13], "the same hour"
    assert f"commit {ours['commit']}" in section
    (own,) = ours["repeats"]
    assert f"{own['offered_per_s']:.1f}" in section
    places = []
    for result in (ours, theirs, elsewhere):
        (each,) = result["repeats"]
        assert result["workload"]["name"] == "nano"
        for figure in (f"{each['ttft_ms_p95']:.0f}", f"{each['itl_ms_p95']:.1f}"):
            found = re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", section)
            assert found, figure
            places.append(found.start())
    assert places == sorted(places), "in the order of the sentence"


def numbers_section(page: str) -> str:
    """Return the words that stand below the table, up to the next heading."""
    return text(page).partition("<!-- /table -->")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", READMES)
def test_the_picture_of_the_figures_is_shown(page: str) -> None:
    assert re.search(rf"^!\[[^]]+\]\({PICTURE}\)$", text(page), re.MULTILINE)
    assert (ROOT / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) < 200


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    names = set(FILE.findall(text(page)))
    everywhere = set(files_of_the_project())
    missing = [n for n in names if not any(f == n or f.endswith("/" + n) for f in everywhere)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", text(page)):
        assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text(page), re.ASCII))
    script_flags = {"--model", "--tp", "--loads"}  # of scripts/bench_engine.py
    known = set(run_parser().long_flags()) | script_flags
    for name in COMMANDS:
        known |= set(parser_of(name).long_flags())
    assert flags <= known, flags - known


def test_both_readmes_have_the_same_sections_commands_and_code() -> None:
    english, chinese = map(comparable, READMES)
    assert pair_problem(english, chinese) == ""


def test_both_readmes_list_the_same_files_and_parts_in_their_drawings() -> None:
    ours, theirs = ([f for f in fences(comparable(page)) if f.kind == TEXT] for page in READMES)
    for own, other in zip(ours, theirs, strict=True):
        assert NAMES.findall("\n".join(own.lines)) == NAMES.findall("\n".join(other.lines))


@pytest.mark.parametrize(
    ("old", "new"),
    [("--tp 2", "--tp 3"), ("\n## ", "\n### "), ("temperature=0,", "temperature=1,")],
)
def test_a_readme_with_another_command_heading_or_line_of_code_is_found(old: str, new: str) -> None:
    english, chinese = map(comparable, READMES)
    assert old in chinese
    assert pair_problem(english, chinese.replace(old, new, 1)) != ""


def comparable(page: str) -> str:
    """Return a README whose comments are empty, and whose blocks that name no language are `text`.

    So the words in comments and drawings may be in another language; all else is compared.
    """
    lines = text(page).splitlines()
    for fence in fences(text(page)):
        if not fence.kind:
            lines[fence.line - 1] += TEXT
    return "\n".join(re.sub(r" {2,}# .*$", "  #", line) for line in lines)


def test_no_page_names_a_path_of_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|home)/", text(page))
