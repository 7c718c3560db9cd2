"""RoPE's table of cosines and sines, with Llama 3's stretching of long wavelengths."""

from __future__ import annotations

import math

import torch

from nanorunner.workers.model_config import Llama3Rope, ModelConfig


def cos_sin_table(model: ModelConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """Return [max_len, head_dim] float32: row p holds cos, then sin, of p times each frequency.

    Computed on the CPU and then moved, so that every rank and device holds the same bits.
    """
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequency = 1.0 / (model.rope_theta**exponent)  # [head_dim / 2], radians per position
    if model.rope_scaling is not None:
        frequency = _llama3_frequency(frequency, model.rope_scaling)
    angle = torch.outer(torch.arange(max_len, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def _llama3_frequency(frequency: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Return the frequencies with wavelengths beyond the original context stretched by `factor`.

    Wavelengths under context / high_freq_factor stay, those over context / low_freq_factor are
    stretched, and between the two the share of the unstretched frequency grows from 0 to 1.
    """
    periods = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    share = (periods - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    share = share.clamp(0, 1)
    return (1 - share) * frequency / scaling.factor + share * frequency
