"""From a step's logits to its token ids. Runner v1 calls this on rank 0 alone.

    logits [n, V], one row a request that samples, and its settings as tensors [n]
        rows with top-k or top-p   -> kernels/top_k_top_p.py -> kernels/sample.py
        the other rows             -> kernels/sample.py
    -> ids [n]

A row's id depends on its own logits, settings, seed and position: not on the batch, on the row's
place in it or on what a neighbour asked for. So a preempted request goes on as if nothing happened.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.sample import gumbel_argmax
from nanorunner.kernels.top_k_top_p import mask_top_k_top_p, uses_top_k_top_p


class Sampler:
    """Draws one token id a row; keeps nothing between calls."""

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sampled ids [n] int64, on the device of logits [n, V].

        temperature [n] float32, 0 is greedy; top_k [n] integers, 0 and -1 are off; top_p [n]
        float32, 1 is off; seed [n] int64; position [n] int64: of each row's input token.

        top_k and top_p are looked at on the host. As CPU tensors they cost nothing; on a GPU
        that look waits for the step's logits.
        """
        device = logits.device
        rows = uses_top_k_top_p(top_k, top_p).nonzero()[:, 0]
        if len(rows) == 0:
            return gumbel_argmax(logits, temperature, seed, position)[1]
        top_k, top_p = top_k[rows].to(device), top_p[rows].to(device)
        rows = rows.to(device)
        masked = mask_top_k_top_p(logits[rows], temperature[rows], top_k, top_p)
        drawn = gumbel_argmax(masked, temperature[rows], seed[rows], position[rows])[1]
        if len(rows) == len(logits):
            return drawn
        ids = gumbel_argmax(logits, temperature, seed, position)[1]
        return ids.index_copy_(0, rows, drawn)
