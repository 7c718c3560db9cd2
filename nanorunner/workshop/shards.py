"""The shard map: who holds what of a model's weights, without starting a rank.

For each parameter: the slice, the bytes, the padding and the checksum on each rank, how it is cut,
and which all-reduce follows. Then the proof that the slices tile the checkpoint exactly once: the
plan is checked on paper, and every tensor is put together again from the slices and compared with
the file, byte by byte.

    nanorunner shards --tp 4
    nanorunner shards --tp 4 --tensor 'layers.*.o'
    nanorunner shards --tp 4 --tensor model.layers.3.self_attn.k_proj.weight
    nanorunner shards --tp 4 --model qwen3-0.6b --load-format dummy     the plan of a preset
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from typing import Any

from nanorunner.exit_codes import OK, REQUEST_FAILED
from nanorunner.model_source import ModelSource, resolve_model
from nanorunner.workers.architectures import parse
from nanorunner.workers.checkpoint import DTYPE_BYTES, check_checkpoint, read_headers
from nanorunner.workers.model_config import ITEM_BYTES, ModelConfig
from nanorunner.workers.shards import head_shard
from nanorunner.workers.weight_plan import Piece, checkpoint_shapes, tiling_errors
from nanorunner.workshop.shard_map import (
    COLUMN,
    RANK_0,
    ROW,
    VOCABULARY,
    WHOLE,
    Entry,
    Share,
    chosen,
    shard_map,
    with_checksums,
)

FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # stacked in one parameter
LEGEND = """\
column-parallel: each rank has some rows of the weight (dim 0) and makes its part of the output
row-parallel: each rank has some columns (dim 1) and makes a partial sum, so an all-reduce follows
vocabulary-parallel: each rank has some token ids
crc: CRC-32 of the bytes that the rank holds, padding included"""
HEAD = "then v1 gathers the logits on rank 0, v2 takes the maximum of one key a row"


def add_flags(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--model", default="", metavar="NAME", help="folder, hub id or preset")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--load-format", default="auto", metavar="NAME", help="dummy: the plan, no weights"
    )
    parser.add_argument("--tensor", metavar="NAME", help="only these; a pattern, or a file's name")
    parser.add_argument("--all", action="store_true", help="every layer, not the first one alone")
    parser.add_argument("--json", action="store_true", help="one line of JSON, every layer")


def run(arguments: Namespace) -> int:
    """Print the map and the proof; 1 when the slices do not tile the checkpoint."""
    source = resolve_model(arguments.model, arguments.load_format)
    model = parse(source.config_json)
    entries = shard_map(model, arguments.tp)
    errors = tiling_errors(model, arguments.tp)
    shown = entries if arguments.tensor is None else chosen(entries, arguments.tensor)
    item_bytes = ITEM_BYTES[model.dtype]
    if source.load_format == "safetensors":
        check_checkpoint(source.folder, model)
        headers = read_headers(source.folder)
        item_bytes = DTYPE_BYTES[headers[next(iter(checkpoint_shapes(model)))].dtype]
        shown = _read(shown, model, source, errors)
    if arguments.json:
        print(json.dumps(_as_json(shown, arguments.tp, item_bytes, errors)))
        return REQUEST_FAILED if errors else OK

    print(f"{source.name} at tp {arguments.tp}: {_shape(model)}, {item_bytes} bytes a number")
    print(f"\n{LEGEND}\n")
    folds = arguments.tensor is None and not arguments.all and model.num_layers > 1
    num_all_reduces = max(entry.all_reduce for entry in entries)
    for entry in shown:
        if folds and _layer(entry.name) > 0:
            continue
        print("\n".join(_entry_lines(entry, model, item_bytes, num_all_reduces)))
    if folds:
        print(f"layers.1 to layers.{model.num_layers - 1} are cut the same way; --all lists them")
    print()
    print("\n".join(_total_lines(entries, model, arguments.tp, item_bytes)))
    print("\n".join(_proof_lines(shown, model, source, errors)))
    return REQUEST_FAILED if errors else OK


def _read(
    shown: list[Entry], model: ModelConfig, source: ModelSource, errors: list[str]
) -> list[Entry]:
    """Return the entries with checksums out of the checkpoint's file."""
    # here: it needs torch, which takes seconds, and a preset has no file
    from nanorunner.workers.weights import checkpoint_reader

    with ExitStack() as stack:
        read = checkpoint_reader(source.folder, stack)
        return list(with_checksums(shown, model, read, errors))


def _shape(model: ModelConfig) -> str:
    return (
        f"{model.num_layers} layers, {model.num_heads} query and {model.num_kv_heads} KV heads of "
        f"{model.head_dim}, hidden {model.hidden_size}, MLP {model.intermediate_size}, "
        f"vocabulary {model.vocab_size}"
    )


def _entry_lines(
    entry: Entry, model: ModelConfig, item_bytes: int, num_all_reduces: int
) -> list[str]:
    """Return what is to say of one parameter: a line, then one for each rank."""
    shares = entry.shares
    local = list(shares[0].parameter.shape)
    cut = "" if list(entry.whole_shape) == local else f" -> {len(shares)} x {local}"
    after = _after(entry, num_all_reduces)
    lines = [f"{entry.name}  {list(entry.whole_shape)}{cut}  {entry.split}{after}"]
    if entry.name == "embed" and model.tie_word_embeddings:
        lines.append(f"  tied: it is the head too{', ' + HEAD if num_all_reduces else ''}")
    if entry.split == WHOLE and len({share.checksum for share in shares}) == 1:
        return [*lines, f"  each rank  {_figures(shares[0], item_bytes)}"]
    what = [_slices(share, entry, model) for share in shares]
    width = max(map(len, what))
    for share, slices in zip(shares, what, strict=True):
        lines.append(f"  rank {share.rank}  {slices:<{width}}  {_figures(share, item_bytes)}")
    return lines


def _figures(share: Share, item_bytes: int) -> str:
    padding = share.padding_bytes(item_bytes)
    zeros = f", {padding:,} of them padding" if padding else ""
    check = "" if share.checksum is None else f"  crc {share.checksum:08x}"
    return f"{share.num_bytes(item_bytes):>11,} bytes{zeros}{check}"


def _after(entry: Entry, num_all_reduces: int) -> str:
    """Return what the ranks do together after this parameter."""
    if entry.all_reduce:
        return f"; then all-reduce {entry.all_reduce} of {num_all_reduces}"
    if entry.split == COLUMN:
        return "; no all-reduce: its output stays cut"
    if entry.split == VOCABULARY:  # the head: the embedding has an all-reduce
        return f"; {HEAD}"
    if entry.split == RANK_0:
        return ": the all-reduce adds it once"
    return ""


def _slices(share: Share, entry: Entry, model: ModelConfig) -> str:
    pieces = share.parameter.pieces
    if not pieces:
        return "nothing: all padding"
    return ", ".join(_slice(piece, entry, model) for piece in pieces)


def _slice(piece: Piece, entry: Entry, model: ModelConfig) -> str:
    """Return one slice in words: which rows, ids or columns of the checkpoint's tensor."""
    span = piece.source[1 if entry.split == ROW else 0]
    module = piece.key.split(".")[-2]
    where = f"{span.start}..{span.stop - 1}"
    if module in ("embed_tokens", "lm_head"):
        return f"ids {where}"
    if entry.split == ROW:
        heads = f" ({_heads(span.start, span.stop, model)})" if module == "o_proj" else ""
        return f"columns {where}{heads}"
    if entry.split == RANK_0 or (entry.split == WHOLE and module not in FUSED):
        return "all of it"
    name = module.removesuffix("_proj")
    if name in "qkv":
        copy = ", a copy" if piece.is_copy else ""
        return f"{name} {where} ({_heads(span.start, span.stop, model)}{copy})"
    return f"{name} {where}"


def _heads(start: int, stop: int, model: ModelConfig) -> str:
    first, last = start // model.head_dim, stop // model.head_dim - 1
    return f"head {first}" if first == last else f"heads {first}..{last}"


def _total_lines(entries: list[Entry], model: ModelConfig, tp: int, item_bytes: int) -> list[str]:
    lines = []
    total = 0
    for rank in range(tp):
        shares = [share for entry in entries for share in entry.shares if share.rank == rank]
        num_bytes = sum(share.num_bytes(item_bytes) for share in shares)
        padding = sum(share.padding_bytes(item_bytes) for share in shares)
        total += num_bytes
        heads = head_shard(model.num_heads, model.num_kv_heads, tp, rank)
        zero = heads.local_kv_heads - heads.kv_heads.size
        note = " (a copy)" if heads.is_kv_copy else f" ({zero} of zeros)" if zero else ""
        lines.append(
            f"rank {rank}: {num_bytes:,} bytes of weights, {padding:,} of them padding; "
            f"KV heads: {heads.local_kv_heads}{note}"
        )
    local_kv_heads = head_shard(model.num_heads, model.num_kv_heads, tp, 0).local_kv_heads
    whole = sum(
        share.num_bytes(item_bytes) for entry in shard_map(model, 1) for share in entry.shares
    )
    lines.append(
        f"all ranks: {total:,} bytes, {total / whole:.3f} times the model's {whole:,}; KV cache "
        f"{tp * local_kv_heads}/{model.num_kv_heads} of tp 1's"
    )
    return lines


def _proof_lines(
    shown: list[Entry], model: ModelConfig, source: ModelSource, errors: list[str]
) -> list[str]:
    if errors:
        return [f"NOT TILED: {error}" for error in errors]
    num_tensors = len(checkpoint_shapes(model))
    lines = [f"plan: each element of {num_tensors} tensors is on exactly one rank, copies aside"]
    if source.load_format == "dummy":
        return [*lines, "file: none was read (--load-format dummy), so there are no checksums"]
    keys = {p.key for entry in shown for share in entry.shares for p in share.parameter.pieces}
    return [
        *lines,
        f"file: {len(keys)} of them, put together again from the ranks' slices, equal the "
        f"checkpoint byte by byte; all padding is zero",
    ]


def _layer(name: str) -> int:
    """Return the layer of a parameter, 0 for one of no layer."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else 0


def _as_json(entries: list[Entry], tp: int, item_bytes: int, errors: list[str]) -> dict[str, Any]:
    return {
        "tp": tp,
        "tiles": not errors,
        "errors": errors,
        "parameters": [
            {
                "name": entry.name,
                "shape": list(entry.whole_shape),
                "split": entry.split,
                "all_reduce": entry.all_reduce,
                "ranks": [
                    {
                        "rank": share.rank,
                        "shape": list(share.parameter.shape),
                        "bytes": share.num_bytes(item_bytes),
                        "padding_bytes": share.padding_bytes(item_bytes),
                        "checksum": None if share.checksum is None else f"{share.checksum:08x}",
                        "slices": [
                            {"tensor": p.key, "from": p.source, "to": p.target, "copy": p.is_copy}
                            for p in share.parameter.pieces
                        ],
                    }
                    for share in entry.shares
                ],
            }
            for entry in entries
        ],
    }
