"""For check_sync.py: the files that a step of runner v2 runs, and what in them it does not run.

Everything is hot unless it stands here with its reason: a new kernel file is checked at once.
"""

from __future__ import annotations

from pathlib import Path

WORKERS = (
    "model_runner",
    "step_body",
    "places",
    "speculator",
    "ngram_proposer",
    "draft_model",
    "step_inputs",
    "step_output",
    "step_extras",
    "request_rows",
    "request_states",
    "staged_tensor",
    "pinned_ring",
    "sampler_v2",
    "sampling_state",
    "prompt_readers",
    "prompt_logprobs",
    "spans",
    "gpu_spans",
    "gpu_clock",
    "traced_group",
    "cuda_graphs",
    "layer_graphs",
    "distributed",
    "peer_reducer",
    "device",
    "models/decoder",
)
COLD_KERNEL_FILES = {
    "kernels/sample.py": "runner v1's sampler, which waits by design",
    "kernels/top_k_top_p.py": "runner v1's sampler, which waits by design",
    "kernels/warm_up.py": "before the first step",
    "kernels/uva.py": "at the start: it makes the table and tries it out",
    "kernels/host_plan.py": "a CPU's short way; a step on a GPU has no such plan",
    "kernels/huge_pages.py": "of the CPU, at the start",
}
# Read for the types of their fields alone.
TYPES = ("kernels/attention_batch.py", "kernels/state_tables.py", "workers/messages.py")

# file -> function -> why no step on a GPU runs it
COLD = {
    "workers/step_output.py": {"result": "the one place that waits, for a step of its own choice"},
    "workers/staged_tensor.py": {"table": "at the start: a table joins"},
    "workers/pinned_ring.py": {"__init__": "of host memory, when a buffer is made"},
    "workers/device.py": {"result": "runner v1's and the profile's wait"},
    "workers/layer_graphs.py": {"capture": "at the start"},
    "kernels/attention.py": {"_request_rows": "of the reference"},
    "kernels/linear.py": {
        "can_pack": "at the start, about the CPU",
        "has_fast_bfloat16": "at the start, about the CPU",
    },
    "kernels/logit_edits.py": {"_in_shard": "of the reference"},
    "kernels/rms_norm.py": {"_constant": "of the reference"},
}


def hot_files(root: Path) -> list[str]:
    """Return the files to check, relative to root; ValueError where the lists are out of date."""
    kernels = sorted(f"kernels/{path.name}" for path in (root / "kernels").glob("*.py"))
    files = [f"workers/{name}.py" for name in WORKERS]
    files += [name for name in kernels if name not in COLD_KERNEL_FILES]
    listed = [*files, *COLD_KERNEL_FILES, *COLD]
    if missing := sorted({name for name in listed if not (root / name).is_file()}):
        raise ValueError(f"hot_path.py names files that are not there: {', '.join(missing)}")
    return files
