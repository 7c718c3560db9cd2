"""Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors.

The variable must be set before anything imports Triton, so it is set here, before the first test
file of this folder is read. With a GPU it stays unset: there the same tests run compiled.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
