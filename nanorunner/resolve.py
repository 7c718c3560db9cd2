"""From what the user asked to what every rank is told: each "auto" becomes a value with a reason.

    Config -> check -> machine facts -> model source -> ModelConfig -> Resolved (RunnerConfig)

Everything that can be refused is refused here, in rank 0, before any process starts: each refusal
is a ValueError that says value, limit and way out. The notes are the start log.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from nanorunner.compatibility import note
from nanorunner.config import Config, check
from nanorunner.machine import Machine, probe
from nanorunner.model_source import ModelSource, resolve_model
from nanorunner.platforms import platform_problem
from nanorunner.rank_rules import why_eager
from nanorunner.resolve_speculation import resolve_speculation
from nanorunner.workers.architectures import parse
from nanorunner.workers.checkpoint import check_checkpoint
from nanorunner.workers.messages import BLOCK_SIZE, RunnerConfig, Speculation
from nanorunner.workers.model_config import ITEM_BYTES, ModelConfig
from nanorunner.workers.shards import check_tp

GIB = 1 << 30
RUNNERS = {"v1": "the textbook runner", "v2": "stable rows, inputs made on the device"}
DEFAULT_DEPTH = 2  # steps in flight: one runs while the next is prepared
DEFAULT_NUM_REQS = 1024
DEFAULT_MAX_MODEL_LEN = 4096  # a model's own 128k would size the KV cache for one such request
FLASH_ATTENTION_MAX_HEAD_DIM = 256
ALL_REDUCES = {
    "auto": "peer memory for small tensors, if the GPUs reach each other's; nccl for the others",
    "nccl": "nccl",
    "peer": "peer memory for small tensors, nccl for the others",
    "cpu": "shared memory for small tensors, gloo for the others",
}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """All that build.py needs to put an engine together."""

    config: Config  # with every "auto" and None that could be decided replaced
    runner_config: RunnerConfig
    source: ModelSource
    notes: tuple[str, ...]  # what was chosen and why, a line each


def resolve(config: Config, machine: Machine | None = None) -> Resolved:
    """Return what `config` means on this machine; raise ValueError when it cannot work."""
    check(config)
    if problem := platform_problem(sys.platform):
        raise ValueError(problem)
    machine = probe() if machine is None else machine
    notes: list[str] = []
    # the machine before the model: a download of many GB should not end in "no such GPU"
    config = _resolve_device(config, machine, notes)
    source = resolve_model(config.model, config.load_format)
    model = parse(source.config_json)
    config = replace(config, load_format=source.load_format)
    config = _resolve_dtype(config, model, machine, notes)
    config = _resolve_attention(config, model, machine, notes)
    config = _resolve_length(config, model, notes)
    config = _resolve_runner(config)
    check_tp(config.tp, model.num_heads)
    speculation = resolve_speculation(config, model, notes)
    kv_cache_bytes = _resolve_kv_cache(config, model, speculation, notes)
    _check_memory(config, model, speculation, machine)
    if source.load_format == "safetensors":
        check_checkpoint(source.folder, model)
    runner_config = _runner_config(config, model, source, kv_cache_bytes, speculation)
    return Resolved(
        config=config,
        runner_config=runner_config,
        source=source,
        notes=(*_model_notes(config, source, model), *notes),
    )


def _resolve_device(config: Config, machine: Machine, notes: list[str]) -> Config:
    num_gpus = len(machine.gpus)
    device = config.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
        reason = f"{num_gpus} GPU(s) found" if machine.gpus else machine.cuda_problem
    else:
        reason = "as asked"
    if device == "cpu" and config.all_reduce != "auto":
        raise ValueError(f"all_reduce {config.all_reduce}: needs NVIDIA GPUs; use auto")
    if device == "cpu" and config.share_gpu:
        raise ValueError(
            f"share_gpu: {machine.cuda_problem or reason}; ranks on a CPU share it anyway, so "
            f"leave it out"
        )
    if device == "cpu":
        notes.append(f"device cpu: {reason}; {machine.cores} core(s) for {config.tp} rank(s)")
        return replace(config, device=device)
    if not machine.gpus:
        raise ValueError(f"device cuda: {machine.cuda_problem}; use --device cpu")
    if config.share_gpu:
        notes.append(
            f"device cuda: {reason}; --share-gpu: all {config.tp} ranks work on GPU 0, "
            f"{machine.gpus[0].name}, to show tp {config.tp}, not for speed"
        )
        return replace(config, device=device)
    if config.tp > num_gpus:
        raise ValueError(
            f"tp {config.tp}: {num_gpus} GPU(s) on this machine, one is needed for each rank; "
            f"use --tp {num_gpus} or fewer, --device cpu, or --share-gpu, which puts every rank "
            f"on GPU 0"
        )
    notes.append(f"device cuda: {reason}; {config.tp} x {machine.gpus[0].name}")
    return replace(config, device=device)


def _resolve_dtype(
    config: Config, model: ModelConfig, machine: Machine, notes: list[str]
) -> Config:
    dtype = config.dtype
    num_gpus = 1 if config.share_gpu else config.tp
    old_gpus = [gpu for gpu in machine.gpus[:num_gpus] if gpu.capability < (8, 0)]
    reason = "as asked"
    if dtype == "auto" and config.device == "cpu":
        dtype, reason = "float32", "what every CPU multiplies well"
    elif dtype == "auto":
        dtype, reason = model.dtype, "the checkpoint's own"
        if dtype == "float32":
            dtype, reason = "bfloat16", "the checkpoint's float32 would halve the speed"
        if dtype == "bfloat16" and old_gpus:
            dtype, reason = "float16", f"{old_gpus[0].name} has no bfloat16"
    elif dtype == "bfloat16" and config.device == "cuda" and old_gpus:
        raise ValueError(f"dtype bfloat16: {old_gpus[0].name} has none; use --dtype float16")
    notes.append(f"dtype {dtype}: {reason}")
    return replace(config, dtype=dtype)


def _resolve_attention(
    config: Config, model: ModelConfig, machine: Machine, notes: list[str]
) -> Config:
    backend, reason = config.attention_backend, "as asked"
    flash_problem = _flash_attention_problem(config, model, machine)
    if backend == "auto" and config.device == "cpu":
        backend, reason = "torch", "the plain PyTorch form, the only one for a CPU"
    elif backend == "auto" and config.batch_invariant:
        backend, reason = "triton", "the only one that is batch-invariant"
    elif backend == "auto" and not flash_problem:
        backend, reason = "flash_attn", "the package is installed"
    elif backend == "auto":
        backend, reason = "triton", f"our own kernels; flash_attn: {flash_problem}"
    if config.batch_invariant and config.device == "cuda" and backend != "triton":
        raise ValueError(
            f"attention_backend {backend}: only triton is batch-invariant on a GPU; use triton or "
            f"auto, or leave batch_invariant out"
        )
    if backend != "torch" and config.device == "cpu":
        raise ValueError(f"attention_backend {backend}: needs an NVIDIA GPU; use torch or auto")
    if backend == "triton" and not machine.has_triton:
        raise ValueError("attention_backend triton: triton is not installed; pip install triton")
    if backend == "flash_attn" and flash_problem:
        raise ValueError(f"attention_backend flash_attn: {flash_problem}; use triton or auto")
    notes.append(f"attention backend {backend}: {reason}")
    return replace(config, attention_backend=backend)


def _flash_attention_problem(config: Config, model: ModelConfig, machine: Machine) -> str:
    """Return why flash_attn cannot serve this model here; "" when it can."""
    if not machine.has_flash_attn:
        return "the package is not installed"
    if config.dtype == "float32":
        return "it has no float32"
    if model.head_dim > FLASH_ATTENTION_MAX_HEAD_DIM:
        return f"heads of {model.head_dim} are wider than its {FLASH_ATTENTION_MAX_HEAD_DIM}"
    return ""


def _resolve_length(config: Config, model: ModelConfig, notes: list[str]) -> Config:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        length = min(limit, DEFAULT_MAX_MODEL_LEN)
        way_up = "" if length == limit else f" of the model's {limit}; --max-model-len raises it"
        notes.append(f"max_model_len {length}{way_up}")
        return replace(config, max_model_len=length)
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len}: the model's positions end at {limit}; "
            f"use at most {limit}"
        )
    return config


def _resolve_runner(config: Config) -> Config:
    depth = config.async_depth or (1 if config.runner == "v1" else DEFAULT_DEPTH)
    # every unread step may hold rows that have ended beside those that go on
    rows = config.max_num_reqs or max(DEFAULT_NUM_REQS, depth * config.max_num_seqs)
    if rows < depth * config.max_num_seqs:
        raise ValueError(
            f"max_num_reqs {rows}: {depth} steps in flight may hold max_num_seqs "
            f"({config.max_num_seqs}) rows each; use {depth * config.max_num_seqs} or more"
        )
    is_eager = config.enforce_eager or (config.device == "cuda" and bool(why_eager(config)))
    return replace(config, async_depth=depth, max_num_reqs=rows, enforce_eager=is_eager)


def _resolve_kv_cache(
    config: Config, model: ModelConfig, speculation: Speculation | None, notes: list[str]
) -> int | None:
    """Return the bytes of KV cache a rank may take; None on a GPU: what its memory leaves."""
    if config.num_blocks is not None:
        notes.append(f"KV cache {config.num_blocks} blocks of {BLOCK_SIZE} tokens: as asked")
        return None
    if config.kv_cache_gib is not None:
        notes.append(f"KV cache {config.kv_cache_gib:g} GiB a rank: as asked")
        return int(config.kv_cache_gib * GIB)
    if config.device == "cuda" and not config.share_gpu:
        notes.append(f"KV cache: what is left of {config.gpu_memory_utilization:.0%} of each GPU")
        return None
    limit = min(GIB, _longest_blocks(config) * _block_bytes(config, model, speculation))
    reason = " (of a shared GPU no rank can tell what is left)" if config.share_gpu else ""
    notes.append(
        f"KV cache at most {limit / GIB:.2g} GiB a rank{reason}; --kv-cache-gib changes it"
    )
    return limit


def _asked_cache_bytes(
    config: Config, model: ModelConfig, speculation: Speculation | None
) -> float:
    """Return the bytes that --num-blocks or --kv-cache-gib ask for on all ranks; 0 for neither.

    No more blocks are made than profile.py makes at the most: twice the longest of all requests.
    """
    block_bytes = _block_bytes(config, model, speculation)
    if config.num_blocks is not None:
        return config.num_blocks * block_bytes
    most = 2 * _longest_blocks(config) * block_bytes
    return min((config.kv_cache_gib or 0) * GIB * config.tp, most)


def _longest_blocks(config: Config) -> int:
    """Return the blocks that all requests at their longest fill."""
    assert config.max_model_len is not None, "the length is resolved before the KV cache"
    return config.max_num_seqs * -(-config.max_model_len // BLOCK_SIZE)


def _block_bytes(config: Config, model: ModelConfig, speculation: Speculation | None) -> int:
    """Return the bytes of a block, a draft model's with it, at tp 1."""
    token_bytes = kv_token_bytes(model, config.dtype)
    if speculation is not None and speculation.draft is not None:
        token_bytes += kv_token_bytes(speculation.draft, config.dtype)
    return BLOCK_SIZE * token_bytes


def kv_token_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of K and V of one token, all layers, at tp 1."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * ITEM_BYTES[dtype]


def num_parameters(model: ModelConfig) -> int:
    """Return the number of weights, norms and biases left out: they are under a percent."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * (attention + mlp) + tables


def _check_memory(
    config: Config, model: ModelConfig, speculation: Speculation | None, machine: Machine
) -> None:
    """Refuse weights that cannot fit. What else a step needs is measured by profile()."""
    weights = num_parameters(model) * ITEM_BYTES[config.dtype]
    drafting, beside = 0, ""  # a draft model is whole on every rank
    if speculation is not None and speculation.draft is not None:
        drafting = num_parameters(speculation.draft) * ITEM_BYTES[config.dtype]
        beside = f" with draft_model {config.draft_model}"
    if config.device == "cpu":
        weights += drafting * config.tp
        if weights > machine.free_memory_bytes:
            raise ValueError(
                f"model {config.model or 'default'}{beside}: its weights take "
                f"{weights / GIB:.1f} GiB in "
                f"{config.dtype}, but {machine.free_memory_bytes / GIB:.1f} GiB of memory are "
                f"free; use a smaller model or a narrower --dtype"
            )
        cache = _asked_cache_bytes(config, model, speculation)
        if cache > machine.free_memory_bytes:
            raise ValueError(
                f"the KV cache that is asked for takes {cache / GIB:.1f} GiB on {config.tp} "
                f"rank(s), but {machine.free_memory_bytes / GIB:.1f} GiB of memory are free; lower "
                "--kv-cache-gib or --num-blocks"
            )
        return
    gpu = machine.gpus[0]
    share = weights / config.tp + drafting
    whose, way_out = f"a rank's weights{beside}", "a larger --tp"
    if config.share_gpu:
        share = weights + drafting * config.tp
        whose, way_out = f"the weights of {config.tp} ranks{beside}", "a smaller model"
    room = gpu.total_bytes * config.gpu_memory_utilization
    if gpu.free_bytes is not None:
        room = min(room, gpu.free_bytes)
    if share > room:
        raise ValueError(
            f"GPU 0: {whose} take {share / GIB:.1f} GiB, but "
            f"gpu_memory_utilization {config.gpu_memory_utilization:g} and other programs leave "
            f"{room / GIB:.1f} GiB; use {way_out}, a higher "
            f"--gpu-memory-utilization, or free the GPU"
        )


def _runner_config(
    config: Config,
    model: ModelConfig,
    source: ModelSource,
    kv_cache_bytes: int | None,
    speculation: Speculation | None,
) -> RunnerConfig:
    assert config.max_model_len is not None, "the length is resolved before the runner's settings"
    assert config.async_depth is not None, "the depth is resolved before the runner's settings"
    assert config.max_num_reqs is not None, "so are the rows"
    return RunnerConfig(
        model=model,
        checkpoint="" if source.load_format == "dummy" else source.folder,
        load_format=source.load_format,
        runner=config.runner,
        async_depth=config.async_depth,
        tp=config.tp,
        device=config.device,
        dtype=config.dtype,
        attention_backend=config.attention_backend,
        all_reduce=config.all_reduce,
        enforce_eager=config.enforce_eager,
        batch_invariant=config.batch_invariant,
        max_num_seqs=config.max_num_seqs,
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_bytes=kv_cache_bytes,
        num_blocks=config.num_blocks,
        seed=config.seed,
        step_timeout_s=config.step_timeout_s,
        start_timeout_s=config.start_timeout_s,
        spans=config.step_times or config.trace is not None,
        check_ranks=config.check_ranks,
        share_gpu=config.share_gpu,
        speculation=speculation,
    )


def _model_notes(config: Config, source: ModelSource, model: ModelConfig) -> list[str]:
    weights = "random weights" if source.load_format == "dummy" else source.folder
    graphs = "on: decode steps are replayed"
    if config.device == "cpu":
        graphs = "off: a CPU has none"
    elif config.enforce_eager:
        graphs = f"off: {why_eager(config) or '--enforce-eager'}"
    sums = "none: one rank"
    if config.tp > 1:
        sums = ALL_REDUCES["cpu" if config.device == "cpu" else config.all_reduce]
    if config.share_gpu:
        sums = "gloo, through host memory"
    return [
        f"model {source.name}: {model.architecture}, {model.num_layers} layers, "
        f"{model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}; {weights}",
        f"tp {config.tp}, runner {config.runner}: {RUNNERS[config.runner]}; "
        f"{config.async_depth} step(s) in flight",
        note(config.runner),
        f"CUDA graphs {graphs}",
        *(["batch-invariant: fixed tiles, sums in rank order"] if config.batch_invariant else []),
        *(["check-ranks: weights and every step; slow"] if config.check_ranks else []),
        f"all-reduce {sums}",
    ]
