"""Which model a user means: an embedded one, a folder, a preset of shapes, or a hub id.

engine start-up calls resolve_model() before any process starts; from here on a model is a folder
of safetensors (or nothing but a config, with load_format dummy).

    ""                       -> the embedded SmolLM2-135M-Instruct (embedded_model.py)
    an existing folder       -> itself
    a preset's name          -> its shape; only with load_format dummy
    anything that is a path  -> refused: no such folder
    owner/name               -> downloaded from the Hugging Face hub, or found in its cache
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorunner.did_you_mean import did_you_mean
from nanorunner.embedded_model import MODEL_NAME, embedded_model_folder
from nanorunner.presets import load_preset, preset_names
from nanorunner.workers.architectures import parse

INDEX_FILE = "model.safetensors.index.json"

# What may be fetched: weights as data, configs, tokenizers. No pickled weights and no code.
CONFIG_PATTERNS = ["config.json", "generation_config.json"]
TOKENIZER_PATTERNS = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
]
WEIGHT_PATTERNS = ["*.safetensors", INDEX_FILE]
# A second copy of the weights in another layout (Mistral), and sub-folders (onnx/, original/).
IGNORED_PATTERNS = ["consolidated*.safetensors", "*/*"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODEL_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that was found: where its files are and what its configs say."""

    name: str  # as a person would call it, for logs and results
    folder: str  # "" for a preset, which has no files
    config_json: dict[str, Any]
    generation_config: dict[str, Any]  # {} when there is none
    load_format: str  # safetensors | dummy
    has_tokenizer: bool


def resolve_model(model: str, load_format: str = "auto") -> ModelSource:
    """Return the model that `model` names, converted or downloaded if it must be.

    Raises ValueError, saying what was looked for and what to do, when there is no such model, when
    its files are of another kind, or when the hub does not give them.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ValueError(f"load_format {load_format!r}: use auto, safetensors or dummy")
    if not model:
        return folder_source(embedded_model_folder(), MODEL_NAME, load_format)
    path = Path(model).expanduser()
    if path.is_dir():
        return folder_source(path, path.resolve().name, load_format)
    if model in preset_names():
        return preset_source(model, load_format)
    refuse_paths(model, path)
    if not HUB_ID.fullmatch(model):
        hint = did_you_mean(model, preset_names())
        raise ValueError(
            f"model {model!r}: neither a folder nor a preset nor a hub id (owner/name); {hint}"
        )
    return folder_source(download(model, load_format), model, load_format)


def preset_source(name: str, load_format: str) -> ModelSource:
    """Return a preset's shape; it has no weights, so only load_format dummy can run it."""
    if load_format != "dummy":
        raise ValueError(
            f"model {name!r} is a preset: a shape without weights; add --load-format dummy to run "
            "it with random weights, or give a folder or a hub id (owner/name)"
        )
    return ModelSource(
        name=name,
        folder="",
        config_json=load_preset(name),
        generation_config={},
        load_format="dummy",
        has_tokenizer=False,
    )


def refuse_paths(model: str, path: Path) -> None:
    """Refuse what can only be a path; it must never be looked up on the hub."""
    if path.is_file():
        raise ValueError(
            f"model {model!r} is a file; give the Hugging Face folder that holds config.json and "
            "the .safetensors files"
        )
    looks_like_path = (
        model.startswith(("/", ".", "~"))
        or model.endswith(("/", *MODEL_FILE_SUFFIXES))
        or model.count("/") > 1
        or "\\" in model
    )
    if looks_like_path:
        raise ValueError(f"model {model!r}: no such folder; check the path")


def folder_source(folder: Path, name: str, load_format: str) -> ModelSource:
    """Return the source for a folder, after checking that what will be read is there."""
    config_json = read_json(folder / "config.json")
    if load_format != "dummy":
        check_weights(folder)
    generation_path = folder / "generation_config.json"
    return ModelSource(
        name=name,
        folder=str(folder.resolve()),
        config_json=config_json,
        generation_config=read_json(generation_path) if generation_path.is_file() else {},
        load_format="dummy" if load_format == "dummy" else "safetensors",
        has_tokenizer=has_tokenizer(folder),
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether tokenizer.load_tokenizer has something to read."""
    names = {path.name for path in folder.iterdir()}
    return (
        bool(names & {"tokenizer.json", "tokenizer.model"})
        or {
            "vocab.json",
            "merges.txt",
        }
        <= names
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a model's folder; ValueError names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path.parent} has no {path.name}: it is not a Hugging Face model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; fetch it again")
    return content


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are missing, incomplete or of another kind."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map; fetch the file again")
        missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of the files that {INDEX_FILE} names: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; fetch them again"
            )
        return
    if any(folder.glob("*.safetensors")):
        return
    others = [
        f"{kind} ({next(iter(found)).name})"
        for kind, pattern in (("pickled PyTorch weights", "*.bin"), ("GGUF", "*.gguf"))
        if (found := sorted(folder.glob(pattern)))
    ]
    if others:
        raise ValueError(
            f"{folder} has no .safetensors file, only {' and '.join(others)}, which nanorunner "
            "does not read; get the safetensors version of this model"
        )
    raise ValueError(
        f"{folder} has no .safetensors file; fetch the weights, or run random ones with "
        "--load-format dummy"
    )


def download(model: str, load_format: str) -> Path:
    """Return the local folder of a hub id; ValueError says why there is none.

    The config comes first and is checked, so that a model that cannot run here costs no gigabytes.
    """
    folder = fetch(model, CONFIG_PATTERNS)
    parse(read_json(folder / "config.json"))
    patterns = CONFIG_PATTERNS + TOKENIZER_PATTERNS
    return fetch(model, patterns if load_format == "dummy" else patterns + WEIGHT_PATTERNS)


def fetch(model: str, patterns: list[str]) -> Path:
    """Return the local folder with a hub id's files of these names; ValueError if it fails.

    The error says all that the hub's library did, without its traceback of a hundred lines.
    """
    # Imported here: a folder or a preset needs no network library.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    closest = did_you_mean(model.rpartition("/")[2], preset_names())
    hint = f"or name a folder or a preset ({closest})"
    try:
        return Path(
            snapshot_download(model, allow_patterns=patterns, ignore_patterns=IGNORED_PATTERNS)
        )
    except GatedRepoError:  # before its parent, RepositoryNotFoundError
        raise ValueError(
            f"model {model!r} is gated: accept its licence at https://huggingface.co/{model} and "
            "log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"model {model!r}: no such model on the hub (or a private one: `hf auth login`); "
            f"check the name, {hint}"
        ) from None
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"model {model!r} is not in the local cache and the hub cannot be reached "
            f"({error.__cause__ or error}); connect to the network (and unset HF_HUB_OFFLINE), "
            f"{hint}"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"model {model!r}: the download failed: {error}; try again, {hint}"
        ) from None
