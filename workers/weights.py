"""Fill one rank's parameters: its slices of a checkpoint, or dummy values with no checkpoint.

Both follow the same plan (weight_plan.py), so a dummy model has the same global weights at any tp
and takes the same code path as a real one. What no slice covers stays zero: the padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from nanorunner.workers.checkpoint import read_headers
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.weight_plan import Box, checkpoint_shapes, weight_plan

DUMMY_STD = 0.02  # the usual initializer_range: activations stay in range through any depth

ReadSlice = Callable[[str, Box], torch.Tensor]
Progress = Callable[[int, int], None]  # parameters filled so far, parameters in all


class WeightSource(NamedTuple):
    """Where a model's weights come from; the target's is its RunnerConfig."""

    checkpoint: str  # folder that holds the safetensors files; "" when load_format is dummy
    load_format: str  # safetensors | dummy
    seed: int  # of dummy weights


def load_weights(
    decoder: Decoder, source: RunnerConfig | WeightSource, progress: Progress | None = None
) -> None:
    """Fill every parameter of this rank's decoder once, and make it ready to run.

    load_format "safetensors" reads only this rank's slices; "dummy" draws them from source.seed
    (normal * 0.02, norms 1). Raises ValueError, with the decoder half filled, by name for a tensor
    that the checkpoint lacks; check_checkpoint() refuses such a folder before any rank starts.
    """
    with ExitStack() as stack:
        if source.load_format == "safetensors":
            read = checkpoint_reader(source.checkpoint, stack)
        elif source.load_format == "dummy":
            read = dummy_reader(decoder.model, source.seed, decoder.dtype, decoder.device)
        else:
            raise ValueError(f"load_format {source.load_format}: use safetensors or dummy")
        fill(decoder, read, progress)
    decoder.pack_for_cpu()


@torch.no_grad()
def fill(decoder: Decoder, read: ReadSlice, progress: Progress | None = None) -> None:
    """Copy what `read` returns into every parameter, as the plan says where."""
    plan = weight_plan(decoder.model, decoder.tp, decoder.rank)
    assert [p.name for p in plan] == list(decoder.parameters), "the decoder follows another plan"
    for num_filled, parameter in enumerate(plan, start=1):
        tensor = decoder.parameters[parameter.name]
        for piece in parameter.pieces:
            tensor[_index(piece.target)].copy_(read(piece.key, piece.source))
        if progress is not None:
            progress(num_filled, len(plan))


def checkpoint_reader(folder: str | Path, stack: ExitStack) -> ReadSlice:
    """Return a reader of checkpoint slices; each file is mapped once, until the stack closes."""
    tensors = read_headers(folder)
    files = {
        file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        for file in sorted({info.file for info in tensors.values()})
    }

    def read(key: str, box: Box) -> torch.Tensor:
        if key not in tensors:
            raise ValueError(f"{folder}: {key} is missing")
        piece: torch.Tensor = files[tensors[key].file].get_slice(key)[_index(box)]
        return piece

    return read


def dummy_reader(
    model: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> ReadSlice:
    """Return a reader of made-up tensors that depend on the seed and the tensor's name alone.

    The whole tensor is drawn on the device and then cut, so that every tp sees the same model.
    """
    shapes = checkpoint_shapes(model)

    def read(key: str, box: Box) -> torch.Tensor:
        shape = shapes[key]
        if key.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)[_index(box)]
        digest = hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)  # a signed 64-bit seed
        whole = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return whole[_index(box)].mul_(DUMMY_STD)

    return read


def _index(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(span.start, span.stop) for span in box)
