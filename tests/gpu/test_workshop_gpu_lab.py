"""The workshop's lab on a GPU shows what its page says, GPU blocks included."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_shell import lab_shell, work_through
from lab_text import CONSOLE, GPU, WORKSHOP, commands, fences

PAGE = WORKSHOP / "7-gpu.md"
COMMAND_LIMIT_S = 300.0  # kernels may have to be compiled


@pytest.mark.limit(900)
def test_the_lab_on_a_gpu_shows_what_its_page_says(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    kinds = (CONSOLE, GPU)
    assert GPU in {fence.kind for fence in fences(page)}
    todo = sum(len(commands(fence)) for fence in fences(page) if fence.kind in kinds)
    with lab_shell(tmp_path, with_gpu=True) as shell:
        assert work_through(page, shell, kinds, COMMAND_LIMIT_S) == todo
