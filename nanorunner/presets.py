"""Model shapes by name: configs/models/*.yaml, each the fields of a Hugging Face config.json.

A preset has no weights. It serves `--load-format dummy`, which needs no network, and the tables
that compare models.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

PRESET_FOLDER = Path(__file__).parent / "configs" / "models"


def preset_names() -> list[str]:
    """Return the presets' names, sorted."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """Return a preset as config.json's fields; ValueError with the closest name otherwise."""
    names = preset_names()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"preset {name!r}: {hint}there are {', '.join(names)}")
    fields = yaml.safe_load((PRESET_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{PRESET_FOLDER / name}.yaml: holds no fields")
    return fields


def preset_for_ranks(name: str, tp: int) -> dict[str, Any]:
    """Return a preset's fields, with more query heads where it has fewer than ranks.

    KV heads stay as few as they are, so most ranks share theirs with others.
    """
    fields = load_preset(name)
    own = fields["num_attention_heads"]
    return fields | {"num_attention_heads": own * -(-tp // own)}  # a multiple suits the KV heads
