"""One rank's share of a Llama, Qwen2 or Qwen3 decoder: the forward pass, read like the paper.

    ids -> embed -> [ norm, qkv, rope + KV write, attention, o, all-reduce,
                      norm, gate_up, silu * up, down, all-reduce ] x layers -> norm -> logits

x is what the next sub-layer reads; residual is the stream that every sub-layer adds to. The sum of
a sub-layer's output over the ranks is added to residual inside the next norm, so no rank adds it
twice. Each rank runs this same code on its own heads, MLP columns and vocabulary ids.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.attention_batch_invariant import BATCH_INVARIANT
from nanorunner.kernels.few_rows import add_norm_gate_up_silu, add_norm_linear, linear_few
from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, NORM, PLAIN
from nanorunner.kernels.few_rows_triton import compiled_for
from nanorunner.kernels.huge_pages import use_huge_pages
from nanorunner.kernels.linear import can_pack, has_fast_bfloat16, linear, pack
from nanorunner.kernels.linear_batch_invariant import linear_batch_invariant
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import (
    ADDED,
    Place,
    most_medium_rows,
    plan_medium_rows,
)
from nanorunner.kernels.product_plans import why_mute
from nanorunner.kernels.rms_norm import add_rms_norm, rms_norm
from nanorunner.kernels.self_attention import (
    AttentionPlan,
    HeadShape,
    differs_when_even,
    plan_attention,
    self_attention,
)
from nanorunner.kernels.silu_mul import silu_mul
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.models.rope import cos_sin_table
from nanorunner.workers.shards import even_shard, head_shard
from nanorunner.workers.weight_plan import weight_plan

logger = logging.getLogger("nanorunner")

PROJECTIONS = ("qkv", "o", "gate_up", "down")  # the fields of Layer that linear() multiplies
NORMS = ("input_norm", "post_norm")


class AllReduce(Protocol):
    """What the decoder needs of a group of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks, in place; x itself at tp 1."""

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x over the ranks to residual in place, and return the norm of that."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's parameters on this rank, the tensors of Decoder.parameters; None where absent."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(local_heads + 2 * local_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: torch.Tensor  # [hidden, local_heads * head_dim]
    o_bias: torch.Tensor | None  # rank 0 alone: the all-reduce adds it once
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * local_intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, local_intermediate]
    down_bias: torch.Tensor | None  # rank 0 alone


class Decoder:
    """The model of one rank. Zero until weights.load_weights() has filled `parameters`.

    parameters: name -> tensor as weight_plan.py lists them. Owner: this object. Place: `device`.
    Lifetime: until release(). Last writer: load_weights, which ends with pack_for_cpu().
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        tp: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: AllReduce,
        attention_backend: str = "torch",
        max_model_len: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Allocate zero parameters. Raises ValueError when tp exceeds the query heads.

        batch_invariant: a token's results do not depend on what else is in the batch, not by a bit.
        """
        self.model, self.tp, self.rank = model, tp, rank
        self.dtype, self.device, self.group = dtype, device, group
        self.attention_backend = BATCH_INVARIANT if batch_invariant else attention_backend
        # as attributes: --check-ranks looks at what they return (workers/check_ranks.py)
        self.linear = linear_batch_invariant if batch_invariant else linear
        self.linear_few, self.add_norm_linear = linear_few, add_norm_linear
        self.add_norm_gate_up_silu = add_norm_gate_up_silu
        self.linear_medium, self.linear_add_norm = linear_medium, linear_add_norm
        self.gate_up_silu = gate_up_silu
        self.has_few_rows = device.type == "cuda" and self.attention_backend == "triton"
        if rank == 0 and device.type == "cuda" and (note := why_mute(device)) is not None:
            logger.info(note)
        heads = head_shard(model.num_heads, model.num_kv_heads, tp, rank)
        self.local_heads, self.local_kv_heads = heads.local_heads, heads.local_kv_heads
        self.local_vocab, self.vocab = even_shard(model.vocab_size, tp, rank)
        self.head_shape = HeadShape(heads.local_heads, heads.local_kv_heads, model.head_dim)

        self.parameters = {
            parameter.name: torch.zeros(parameter.shape, dtype=dtype, device=device)
            for parameter in weight_plan(model, tp, rank)
        }
        self.layers = [self._layer(index) for index in range(model.num_layers)]
        # Decodes of more than MAX_ROWS and up to so many rows go through decode_medium().
        self.max_medium_rows = self._max_medium_rows() if self.has_few_rows else 0
        self.embed = self.parameters["embed"]  # [local_vocab, hidden]
        self.norm = self.parameters["norm"]  # [hidden]
        # Tied: the head is the embedding, the same storage.
        self.lm_head = self.parameters.get("lm_head", self.embed)
        self.cos_sin = cos_sin_table(model, max_model_len or model.max_position_embeddings, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the normed last hidden states [num_tokens, hidden]; writes the step's K and V.

        input_ids and positions are [num_tokens] int64; k_caches[layer] and v_caches[layer] are
        [num_blocks, 256, local_kv_heads, head_dim].
        """
        eps = self.model.rms_norm_eps
        plan = plan_attention(positions, self.cos_sin, batch, self.attention_backend, k_caches[0])
        if self.has_few_rows and batch.max_query_len == 1:
            if len(input_ids) <= MAX_ROWS:
                return self.decode_few(input_ids, plan, k_caches, v_caches)
            if len(input_ids) <= self.max_medium_rows:
                return self.decode_medium(input_ids, plan, k_caches, v_caches)
        residual = self.embed_tokens(input_ids)
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, layer in enumerate(self.layers):
            x = self.attention(layer, x, plan, k_caches[index], v_caches[index])
            x = self.group.all_reduce_add_rms_norm(x, residual, layer.post_norm, eps)
            x = self.mlp(layer, x)
            x = self.group.all_reduce_add_rms_norm(x, residual, next_norms[index], eps)
        return x

    def compiled_for(self, rows: int) -> tuple[object, ...]:
        """Return what enters the compiled projections of a decode of so many rows, () for none.

        Steps of row counts that agree in it launch the same kernels.
        """
        layer = self.layers[0]
        if self.has_few_rows and rows <= MAX_ROWS:
            few = (NORM, layer.qkv), (PLAIN, layer.o), (GATED, layer.gate_up), (PLAIN, layer.down)
            return tuple(compiled_for(op, rows, weight) for op, weight in few)
        if rows <= self.max_medium_rows:
            return tuple(plan_medium_rows(op, rows, weight) for op, weight in self._medium_places())
        return ()

    def decode_few(
        self,
        input_ids: torch.Tensor,
        plan: AttentionPlan,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """forward() for few rows on a GPU: norms and gate are folded into the projections.

        There the gaps between kernels weigh as much as the kernels. Which kernel multiplies, one of
        kernels/few_rows.py or the tiles of decode_medium(), is their tables' choice.
        """
        eps = self.model.rms_norm_eps
        x, residual = self.embed_tokens(input_ids), None
        for index, layer in enumerate(self.layers):
            qkv, residual = self.add_norm_linear(
                x, residual, layer.input_norm, eps, layer.qkv, layer.qkv_bias
            )
            out = self.attend(layer, qkv, plan, k_caches[index], v_caches[index], reads_early=True)
            x = self.group.all_reduce(self.linear_few(out, layer.o, layer.o_bias))
            x, residual = self.add_norm_gate_up_silu(
                x, residual, layer.post_norm, eps, layer.gate_up, layer.gate_up_bias
            )
            x = self.group.all_reduce(self.linear_few(x, layer.down, layer.down_bias))
        assert residual is not None, "a model has layers"
        return add_rms_norm(x, residual, self.norm, eps)

    def decode_medium(
        self,
        input_ids: torch.Tensor,
        plan: AttentionPlan,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """forward() for more rows, where a table has tiles for them (kernels/medium_rows.py).

        A shape without an entry is multiplied as forward() does it.
        """
        eps = self.model.rms_norm_eps
        residual = self.embed_tokens(input_ids)
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, layer in enumerate(self.layers):
            qkv = self.linear_medium(x, layer.qkv, layer.qkv_bias)
            out = self.attend(layer, qkv, plan, k_caches[index], v_caches[index])
            x = self._add_medium(out, layer.o, layer.o_bias, residual, layer.post_norm)
            x = self.gate_up_silu(x, layer.gate_up, layer.gate_up_bias)
            x = self._add_medium(x, layer.down, layer.down_bias, residual, next_norms[index])
        return x

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, hidden]: each rank looks up its own ids, the sum has them all."""
        if self.tp == 1:
            return F.embedding(input_ids, self.embed)
        local_ids = input_ids - self.vocab.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.vocab.size)
        x = F.embedding(local_ids.masked_fill_(is_elsewhere, 0), self.embed)
        return self.group.all_reduce(x.masked_fill_(is_elsewhere.unsqueeze(-1), 0))

    def attention(
        self,
        layer: Layer,
        x: torch.Tensor,
        plan: AttentionPlan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Return this rank's share of self-attention's output [num_tokens, hidden]."""
        qkv = self.linear(x, layer.qkv, layer.qkv_bias)
        out = self.attend(layer, qkv, plan, k_cache, v_cache)
        return self.linear(out, layer.o, layer.o_bias)

    def attend(
        self,
        layer: Layer,
        qkv: torch.Tensor,
        plan: AttentionPlan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        reads_early: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what stands between the layer's qkv and its o; writes the step's K and V.

        reads_early, out: what self_attention means by them.
        """
        return self_attention(
            qkv,
            plan,
            k_cache,
            v_cache,
            self.head_shape,
            layer.q_norm,
            layer.k_norm,
            self.model.rms_norm_eps,
            reads_early=reads_early,
            out=out,
        )

    def differs_when_even(self, num_reqs: int) -> bool:
        """Return whether a decode of even requests takes another way through attention."""
        return differs_when_even(
            num_reqs, self.head_shape, self.attention_backend, self.dtype, self.device
        )

    def mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the SwiGLU MLP's output [num_tokens, hidden]."""
        x = silu_mul(self.linear(x, layer.gate_up, layer.gate_up_bias))
        return self.linear(x, layer.down, layer.down_bias)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits [rows, local_vocab] of the rows that the caller picked.

        An fp32 sum rounded to the model dtype. Column i is id vocab.start + i; padded ids are -inf.
        """
        logits = self.linear(hidden, self.lm_head)
        if self.vocab.size < self.local_vocab:
            logits[:, self.vocab.size :] = -torch.inf
        return logits

    def pack_for_cpu(self) -> None:
        """Lay the parameters out for the CPU, once, after the last weight was written.

        Norm weights become float32, as the norm multiplies. Projections are packed, where that is
        best (kernels/linear.py). The plain copies go, but for an embedding that a tied head needs
        too: there the packed head is a second copy.
        """
        if self.device.type != "cpu":
            return
        if self.rank == 0 and self.dtype == torch.float32 and has_fast_bfloat16():
            logger.info("this CPU multiplies bfloat16 natively: --dtype bfloat16 would be faster")
        is_packed = can_pack(self.device, self.dtype)
        for index in range(len(self.layers)):
            for field in NORMS:
                name = f"layers.{index}.{field}"
                self.parameters[name] = self.parameters[name].float()
            for field in PROJECTIONS if is_packed else ():
                name = f"layers.{index}.{field}"
                self.parameters[name] = pack(self.parameters[name])
            self.layers[index] = self._layer(index)
        self.norm = self.parameters["norm"] = self.norm.float()
        if is_packed:
            self.lm_head = pack(self.lm_head)
        if not self.model.tie_word_embeddings:
            self.parameters["lm_head"] = self.lm_head
        use_huge_pages(
            [getattr(layer, field) for layer in self.layers for field in PROJECTIONS]
            + [self.lm_head]
        )

    def release(self) -> None:
        """Let go of every tensor; the model cannot run afterwards. A second call does nothing."""
        self.parameters = {}
        self.layers = []
        self.embed = self.lm_head = self.norm = self.cos_sin = torch.empty(0)

    def _add_medium(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
    ) -> torch.Tensor:
        """Add a projection, summed over the ranks, to residual in place; return the norm."""
        eps = self.model.rms_norm_eps
        if self.tp == 1:
            return self.linear_add_norm(x, weight, bias, residual, gain, eps)
        x = self.linear_medium(x, weight, bias)
        return self.group.all_reduce_add_rms_norm(x, residual, gain, eps)

    def _max_medium_rows(self) -> int:
        """Return up to how many rows a measured plan serves one of this rank's projections."""
        return most_medium_rows(self._medium_places())

    def _medium_places(self) -> list[Place]:
        """Return what decode_medium() multiplies in a layer."""
        layer = self.layers[0]  # the others have the same shapes
        last = ADDED if self.tp == 1 else PLAIN
        return [(PLAIN, layer.qkv), (last, layer.o), (GATED, layer.gate_up), (last, layer.down)]

    def _layer(self, index: int) -> Layer:
        """Return the layer's parameters; each field of Layer is the last part of a name."""
        names = Layer.__dataclass_fields__
        tensors: dict[str, Any] = {n: self.parameters.get(f"layers.{index}.{n}") for n in names}
        return Layer(**tensors)
