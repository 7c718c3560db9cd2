"""nanorunner: a tensor-parallel LLM inference runtime to read, to measure and to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nanorunner.llm import LLM
    from nanorunner.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import LLM and SamplingParams when first asked for: `nanorunner --help` needs no torch."""
    if name == "LLM":
        from nanorunner.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nanorunner.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'nanorunner' has no attribute {name!r}")
