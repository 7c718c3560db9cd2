"""Where Triton has no wheel, the kernels import, compute by PyTorch, and refuse Triton by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["triton"] = None  # what import takes for "not installed"
import torch
from nanorunner.kernels import sample, warm_up  # noqa: F401
from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rms_norm import rms_norm

assert rms_norm(torch.ones(2, 8), torch.ones(8), 0.0).allclose(torch.ones(2, 8))
cache = torch.ones(1, 256, 1, 16)
ints = torch.tensor([0, 1], dtype=torch.int32)
batch = AttentionBatch(ints, ints[1:], ints[:1, None], ints[:1].long(), 1, 1)
q = torch.ones(1, 2, 16)
assert paged_attention(q, cache, cache, batch, 1.0, "torch").eq(1).all()
try:
    paged_attention(q, cache, cache, batch, 1.0, "triton")
except ImportError as error:
    print(error)
"""


def test_without_triton_everything_imports_and_only_the_triton_backend_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "_decode_kernel needs Triton (Linux only)" in done.stdout
    assert "use the attention backend torch" in done.stdout
