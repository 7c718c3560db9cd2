"""Exercise gumbel: draw from a softmax without computing it.

    score[v] = logits[v] / temperature + noise(seed, position, v)        temperature 0: no noise
    id       = argmax over v of score[v], the lowest id on ties

    nanorunner check gumbel my_gumbel.py

noise is Gumbel-distributed and depends on (seed, position, id) alone: so ranks that each hold a
shard of the vocabulary find the same id by comparing their best scores. Ready to use:

    random_word_reference(seed [n, 1], ids [V], position [n, 1])   -> words [n, V], numpy
    gumbel_noise_reference(words)                                  -> noise [n, V], numpy float32
"""

from __future__ import annotations

import torch

from nanorunner.kernels.philox import gumbel_noise_reference, random_word_reference

READY = (gumbel_noise_reference, random_word_reference)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores [n] float32, ids [n] int64) of the best token in each row.

    logits [n, V] float32: the tokens vocab_offset to vocab_offset + V - 1. temperature [n] float32,
    seed [n] int64, position [n] int64. The ids are the vocabulary's, not the shard's.
    """
    raise NotImplementedError("gumbel_argmax: which token has the best noisy score?")
