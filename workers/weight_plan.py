"""The weight plan: which slice of which checkpoint tensor goes where in which local parameter.

Pure data, no torch. weights.py follows it, the checkpoint check takes its shapes from it, and the
shard map prints it and proves that the slices tile the checkpoint exactly once.

    checkpoint                                     local parameter of rank r
    q_proj [heads * D, hidden]    -- my heads -->  qkv     [(lq + 2 * lk) * D, hidden]: q rows,
    k_proj, v_proj                -- my kv    -->            then k rows, then v rows
    o_proj [hidden, heads * D]    -- columns  -->  o       [hidden, lq * D]
    gate_proj, up_proj [I, hidden]-- rows     -->  gate_up [2 * li, hidden]: gate rows, then up rows
    down_proj [hidden, I]         -- columns  -->  down    [hidden, li]
    embed_tokens, lm_head         -- ids      -->  embed, lm_head [lv, hidden]
    norms                         -- whole    -->  on every rank
    o_proj.bias, down_proj.bias   -- whole    -->  on rank 0 alone: the all-reduce adds it once

What no piece covers is zero: the padding of shards.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.shards import Span, check_tp, even_shard, head_shard

Box = tuple[Span, ...]  # one span per dimension of a tensor


class Piece(NamedTuple):
    """One slice of one checkpoint tensor and its place in a local parameter; equal extents."""

    key: str  # the checkpoint's name of the tensor
    source: Box  # in the checkpoint's tensor
    target: Box  # in the local parameter
    is_copy: bool  # a lower rank holds the very same slice


class LocalParameter(NamedTuple):
    """One tensor of one rank, and the checkpoint slices that fill it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_padded(self) -> int:
        """How many of its elements are zero padding."""
        return math.prod(self.shape) - sum(_volume(piece.target) for piece in self.pieces)


def checkpoint_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that this model's checkpoint must hold, with its shape, in layer order.

    A tied model needs no lm_head.weight: the flag decides, not what the file happens to hold.
    """
    hidden, intermediate = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{attention}{name}.weight"] = (size, hidden)
            if model.qkv_bias:
                shapes[f"{attention}{name}.bias"] = (size,)
        if model.qk_norm:
            shapes[f"{attention}q_norm.weight"] = (model.head_dim,)
            shapes[f"{attention}k_norm.weight"] = (model.head_dim,)
        shapes[f"{attention}o_proj.weight"] = (hidden, q_size)
        if model.o_bias:
            shapes[f"{attention}o_proj.bias"] = (hidden,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{mlp}{name}.weight"] = (intermediate, hidden)
            if model.mlp_bias:
                shapes[f"{mlp}{name}.bias"] = (intermediate,)
        shapes[f"{mlp}down_proj.weight"] = (hidden, intermediate)
        if model.mlp_bias:
            shapes[f"{mlp}down_proj.bias"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def weight_plan(model: ModelConfig, tp: int, rank: int) -> list[LocalParameter]:
    """Return rank's parameters in layer order, named as decoder.py knows them.

    Raises ValueError when tp is more than the model's query heads.
    """
    check_tp(tp, model.num_heads)
    hidden = model.hidden_size
    vocab = even_shard(model.vocab_size, tp, rank)

    plan = [_rows("embed", [("model.embed_tokens", vocab.local_size, vocab.span, False)], hidden)]
    for layer in range(model.num_layers):
        plan += _layer_plan(model, layer, tp, rank)
    plan.append(_whole("norm", "model.norm.weight", hidden, rank))
    if not model.tie_word_embeddings:
        plan.append(_rows("lm_head", [("lm_head", vocab.local_size, vocab.span, False)], hidden))
    return plan


def _layer_plan(model: ModelConfig, layer: int, tp: int, rank: int) -> Iterator[LocalParameter]:
    """Yield one decoder layer's parameters."""
    hidden, dim = model.hidden_size, model.head_dim
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    attention, mlp = f"{there}self_attn.", f"{there}mlp."

    shard = head_shard(model.num_heads, model.num_kv_heads, tp, rank)
    q_rows, kv_rows = shard.local_heads * dim, shard.local_kv_heads * dim
    heads, kv_heads = _scaled(shard.heads, dim), _scaled(shard.kv_heads, dim)
    qkv = [
        (f"{attention}q_proj", q_rows, heads, False),
        (f"{attention}k_proj", kv_rows, kv_heads, shard.is_kv_copy),
        (f"{attention}v_proj", kv_rows, kv_heads, shard.is_kv_copy),
    ]
    yield _whole(f"{here}input_norm", f"{there}input_layernorm.weight", hidden, rank)
    yield _rows(f"{here}qkv", qkv, hidden)
    if model.qkv_bias:
        yield _rows(f"{here}qkv_bias", qkv, None)
    if model.qk_norm:
        yield _whole(f"{here}q_norm", f"{attention}q_norm.weight", dim, rank)
        yield _whole(f"{here}k_norm", f"{attention}k_norm.weight", dim, rank)
    yield _columns(f"{here}o", f"{attention}o_proj.weight", hidden, q_rows, heads)
    if model.o_bias and rank == 0:
        yield _whole(f"{here}o_bias", f"{attention}o_proj.bias", hidden, rank)

    columns = even_shard(model.intermediate_size, tp, rank)
    gate_up = [
        (f"{mlp}{name}", columns.local_size, columns.span, False)
        for name in ("gate_proj", "up_proj")
    ]
    yield _whole(f"{here}post_norm", f"{there}post_attention_layernorm.weight", hidden, rank)
    yield _rows(f"{here}gate_up", gate_up, hidden)
    if model.mlp_bias:
        yield _rows(f"{here}gate_up_bias", gate_up, None)
    down = f"{mlp}down_proj.weight"
    yield _columns(f"{here}down", down, hidden, columns.local_size, columns.span)
    if model.mlp_bias and rank == 0:
        yield _whole(f"{here}down_bias", f"{mlp}down_proj.bias", hidden, rank)


def tiling_errors(model: ModelConfig, tp: int) -> list[str]:
    """Return what is wrong with the plan of all tp ranks; an empty list is the proof that it holds.

    For every checkpoint tensor the slices that are no copies cover each element exactly once, and
    every copy equals one of them. In every local parameter no two pieces overlap.
    """
    errors: list[str] = []
    owned: dict[str, list[Box]] = {key: [] for key in checkpoint_shapes(model)}
    copies: list[Piece] = []
    for rank in range(tp):
        for parameter in weight_plan(model, tp, rank):
            where = f"rank {rank}, {parameter.name}"
            targets = [piece.target for piece in parameter.pieces]
            errors += _box_errors(where, targets, parameter.shape)
            for piece in parameter.pieces:
                if [s.size for s in piece.source] != [s.size for s in piece.target]:
                    errors.append(f"{where}: {piece.key} changes its extents")
                if piece.is_copy:
                    copies.append(piece)
                elif piece.key in owned:
                    owned[piece.key].append(piece.source)
                else:
                    errors.append(f"{where}: {piece.key} is in no checkpoint of this model")
    for key, shape in checkpoint_shapes(model).items():
        errors += _box_errors(key, owned[key], shape)
        covered = sum(_volume(box) for box in owned[key])
        if covered != math.prod(shape):
            errors.append(f"{key}: {covered} of {math.prod(shape)} elements are on some rank")
    errors += [f"{c.key}: a copy of nothing" for c in copies if c.source not in owned[c.key]]
    return errors


def _rows(name: str, parts: list[tuple[str, int, Span, bool]], width: int | None) -> LocalParameter:
    """Return a parameter that stacks row slices: (module, local rows, its span, is a copy).

    width None takes the modules' 1-dimensional biases instead of their weights.
    """
    pieces: list[Piece] = []
    offset = 0
    kind, rest = (".bias", ()) if width is None else (".weight", (Span(0, width),))
    for module, local_rows, span, is_copy in parts:
        if span.size:
            target = Span(offset, offset + span.size)
            pieces.append(Piece(module + kind, (span, *rest), (target, *rest), is_copy))
        offset += local_rows
    shape = (offset,) if width is None else (offset, width)
    return LocalParameter(name, shape, tuple(pieces))


def _columns(name: str, key: str, height: int, local_width: int, span: Span) -> LocalParameter:
    """Return a row-parallel weight: a slice of the columns (its input) of the whole tensor."""
    rows = Span(0, height)
    piece = Piece(key, (rows, span), (rows, Span(0, span.size)), False)
    return LocalParameter(name, (height, local_width), (piece,) if span.size else ())


def _whole(name: str, key: str, size: int, rank: int) -> LocalParameter:
    """Return a 1-dimensional parameter that every rank which has it holds whole."""
    box = (Span(0, size),)
    return LocalParameter(name, (size,), (Piece(key, box, box, rank > 0),))


def _scaled(span: Span, factor: int) -> Span:
    """Return the rows of a span of heads."""
    return Span(span.start * factor, span.stop * factor)


def _volume(box: Box) -> int:
    """Return how many elements a box holds."""
    return math.prod(span.size for span in box)


def _box_errors(where: str, boxes: list[Box], shape: tuple[int, ...]) -> list[str]:
    """Return a line for each box outside the shape and for each two that overlap."""
    errors = []
    for i, box in enumerate(boxes):
        if len(box) != len(shape) or any(
            not 0 <= s.start < s.stop <= n for s, n in zip(box, shape, strict=False)
        ):
            errors.append(f"{where}: {box} lies outside {shape}")
        for other in boxes[:i]:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=False)):
                errors.append(f"{where}: {box} overlaps {other}")
    return errors
