"""What a Hugging Face folder holds, read from safetensors headers alone: no weights, no torch.

Rank 0 runs check_checkpoint() before any process starts, so a missing shard, a missing tensor or a
quantised one is one clear line and not a dead rank. Every rank then reads the same headers again
(milliseconds) to find its slices.

    model.safetensors.index.json   {"weight_map": {tensor name: file name}}, followed if there
    model.safetensors              otherwise

    a safetensors file: | header bytes, u64 little-endian | JSON header | tensor data ... |
"""

from __future__ import annotations

import json
import logging
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.weight_plan import checkpoint_shapes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # safetensors' names of the dtypes that we load
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_NAMES = 5  # how many tensor names an error spells out
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)  # old checkpoints carry it; rope.py computes it

logger = logging.getLogger(__name__)


class TensorInfo(NamedTuple):
    """Where one tensor lies, and what it is."""

    file: Path
    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]


def check_checkpoint(folder: str | Path, model: ModelConfig) -> None:
    """Return if the folder's weights fill this model; else raise ValueError naming what is wrong.

    Missing tensors, wrong shapes and dtypes other than float32, bfloat16 and float16 are refused.
    Tensors that the model does not use are reported by a warning, since they may be a sign that
    the config describes another model.
    """
    tensors = read_headers(folder)
    wanted = checkpoint_shapes(model)
    missing = [key for key in wanted if key not in tensors]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(wanted)} tensors of {model.architecture} are "
            f"missing: {_names(missing)}{_missing_hint(missing, tensors)}"
        )
    for key, shape in wanted.items():
        info = tensors[key]
        if info.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{info.file}: {key} is {info.dtype}; only {', '.join(DTYPE_BYTES)} are "
                "supported, so use a checkpoint that is not quantised"
            )
        if info.shape != shape:
            raise ValueError(
                f"{info.file}: {key} has shape {list(info.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
    unused = [key for key in tensors if key not in wanted and not key.endswith(HARMLESS_SUFFIXES)]
    if model.tie_word_embeddings and "lm_head.weight" in unused:
        unused.remove("lm_head.weight")
        logger.warning(
            "%s: lm_head.weight is not used: config.json ties it to the embedding", folder
        )
    if unused:
        logger.warning("%s: %d tensors are not used: %s", folder, len(unused), _names(unused))


def read_headers(folder: str | Path) -> dict[str, TensorInfo]:
    """Return every tensor of the folder's checkpoint by name.

    The index is followed if there is one: each file and each tensor that it names must exist, and
    files that it does not name are reported and left alone. Raises ValueError by name otherwise.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    others = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_index(folder / INDEX_FILE)
        used = set(weight_map.values())
        headers = {name: _read_file_header(folder / name) for name in sorted(used)}
        for key, name in weight_map.items():
            if key not in headers[name]:
                raise ValueError(f"{folder / name}: holds no {key}, which {INDEX_FILE} says it has")
        tensors = {key: headers[name][key] for key, name in weight_map.items()}
    elif SINGLE_FILE in others:
        used = {SINGLE_FILE}
        tensors = _read_file_header(folder / SINGLE_FILE)
    else:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:MAX_NAMES]) or "nothing"
        raise ValueError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} (found {found}); give a Hugging "
            "Face folder with safetensors weights"
        )
    if others - used:
        logger.warning("%s: files that are not used: %s", folder, _names(sorted(others - used)))
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's {tensor: file}; its files exist and lie in the index's own folder."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # A name with a path in it could point anywhere on the user's machine.
        if Path(name).name != name:
            raise ValueError(f"{path}: names {name!r}, which is not a file of its own folder")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{path.parent}: {len(missing)} of {len(names)} files named in {INDEX_FILE} are "
            f"missing: {_names(missing)}; download the checkpoint again"
        )
    return {str(key): str(name) for key, name in weight_map.items()}


def _read_file_header(path: Path) -> dict[str, TensorInfo]:
    """Return one safetensors file's tensors; a file shorter than its header says is refused."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(f"{path}: not a safetensors file, or cut short ({file_bytes} bytes)")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            tensors = {
                key: TensorInfo(path, entry["dtype"], tuple(entry["shape"]))
                for key, entry in header.items()
            }
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: its safetensors header is broken ({error!r})") from error
    data_bytes = file_bytes - 8 - header_bytes
    if end > data_bytes:
        raise ValueError(
            f"{path}: cut short: {data_bytes} bytes of weights, but its header promises {end}; "
            "download it again"
        )
    return tensors


def weight_bytes(tensors: dict[str, TensorInfo]) -> int:
    """Return the size of the weights on disk, for a progress bar or a log line."""
    return sum(math.prod(t.shape) * DTYPE_BYTES.get(t.dtype, 0) for t in tensors.values())


def _missing_hint(missing: list[str], tensors: dict[str, TensorInfo]) -> str:
    """Return what the missing names suggest, or nothing."""
    if missing == ["lm_head.weight"]:
        return " (config.json says tie_word_embeddings false, so the head needs its own weights)"
    if missing[0] == "model.embed_tokens.weight" and "embed_tokens.weight" in tensors:
        return " (the names lack the prefix `model.`: save the whole causal LM, not its base)"
    return ""


def _names(names: list[str]) -> str:
    """Return the first few names and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
