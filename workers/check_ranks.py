"""--check-ranks: in every step, prove that the ranks hold equal values where they must.

    step -> RankCheck.watched(step)          the checks are on from here to the step's end
    forward and projections                  wrapped: they add columns
    CheckedGroup (checked_group.py)          each of its calls adds columns too, and ends a place
    a place's columns -> a row of digests -> gathered on rank 0 -> Judge (rank_agreement.py)

Equal on all ranks: the inputs, the hidden state and the residual after each all-reduce, the final
norm, gathered logits, the best keys after their exchange. Different where the shard map gives the
ranks different slices, and equal where they share a KV head: q, k, v, gate, up and logits.

What this finds is a rank whose copy of a value has drifted: by a kernel, an all-reduce, a buffer
that was written too early, an all-reduce that was left out. What it cannot find is a wrong weight
shard, nor a wrong partial result: the all-reduce makes of it the same wrong sum on every rank (a
norm that a GPU folds into a projection of few rows is a part of one). For that the weights are
compared with the checkpoint after loading (nanorunner/check_shards.py).

A digest is exact to the bit: one different element always changes it, several do but for one case
in 2**32. Rank 0 reads the digests at each place, so a step takes longer: SmolLM2 at tp 2, one
request, on two busy cores 1.2 to 2.4 times as long in three pairs of runs. It runs eagerly: a
graph's replay comes to no place. Without the flag none of this exists.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch

from nanorunner.workers.device import Download
from nanorunner.workers.digest import Digester
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.rank_agreement import (
    ATTENTION_PARTS,
    END,
    EXCHANGED,
    FINAL,
    GATED,
    GATHERED,
    INPUTS,
    LOGITS,
    MAX_COLUMNS,
    MLP_PARTS,
    PROJECTIONS,
    REDUCED,
    SAME,
    Column,
    Judge,
    Place,
)

MOST_TOLD = 8  # of the pairs whose weights the checkpoint repeats

logger = logging.getLogger("nanorunner")

Step = Callable[[tuple[Any, ...]], Any]


class RankCheck:
    """One rank's part of the check; every rank comes to the same places in the same order."""

    def __init__(self, config: RunnerConfig, group: Group) -> None:
        self._group = group
        self._timeout_s = config.step_timeout_s
        self._digester = Digester(group.device)
        self._judge = Judge(config.model, config.tp)  # rank 0's is asked
        self._columns: list[Column] = []
        self._digests: list[torch.Tensor] = []  # of the columns, each [] int64 on the device
        self._layout = 0  # a checksum of the columns' names, shapes and types
        self._is_on = False
        self._is_in_forward = False
        self._step = 0
        self._projections = self._all_reduces = self._others = 0

    def watched(self, step: Step) -> Step:
        """Return a runner's step with the checks on; raises RankCheckFailed on rank 0."""

        def checked_step(wire: tuple[Any, ...]) -> Any:
            self._step, self._is_on = wire[0], True
            self._others = 0
            self._judge.begin()
            try:
                handle = step(wire)
                with torch.inference_mode():
                    self.compare(END)
            finally:
                self._is_on = self._is_in_forward = False
                self._forget()
            return handle

        return checked_step

    @torch.inference_mode()
    def watch(self, decoder: Decoder) -> None:
        """Look at a loaded decoder's calls from now on, and at which ranks its weights are alike.

        Every rank must take part, before the first step.
        """
        self._find_alike(decoder)
        decoder.forward = self._watched_forward(decoder.forward)  # type: ignore[method-assign]
        decoder.linear = self._watched_linear(decoder, decoder.linear)
        decoder.linear_few = self._watched_linear(decoder, decoder.linear_few)
        decoder.linear_medium = self._watched_linear(decoder, decoder.linear_medium)
        decoder.gate_up_silu = self._watched_linear(decoder, decoder.gate_up_silu, is_fused=True)
        decoder.add_norm_linear = self._watched_fused(decoder, decoder.add_norm_linear)
        decoder.add_norm_gate_up_silu = self._watched_fused(decoder, decoder.add_norm_gate_up_silu)

    # What CheckedGroup (checked_group.py) reports.

    def reduced(self, *columns: tuple[str, torch.Tensor]) -> None:
        """An all-reduce is over; columns: what every rank holds alike now."""
        if not self._is_on:
            return
        if self._is_in_forward:
            self._all_reduces += 1
        else:
            self._others += 1
        for name, tensor in columns:
            self._add(Column(name), tensor)
        self.compare(REDUCED)

    def exchanged(self, keys: torch.Tensor) -> None:
        """The best keys [n] of all ranks are known."""
        if self._is_on:
            self._add(Column("the best keys"), keys)
            self.compare(EXCHANGED)

    def gathered(self, whole: torch.Tensor | None) -> None:
        """Shares were put side by side, on every rank or, with None, on rank 0 alone."""
        if not self._is_on:
            return
        if whole is not None:
            self._add(Column("what was gathered"), whole)
        self.compare(GATHERED)

    def compare(self, kind: int) -> None:
        """End a place: gather its columns on rank 0, which judges them. No columns, no place."""
        if not self._columns:
            return
        place = Place(kind, self._projections, self._all_reduces, self._others)
        head = torch.tensor([place.pack(), self._layout], device=self._group.device)
        padding = head.new_zeros(MAX_COLUMNS - len(self._digests))
        row = torch.cat([head, torch.stack(self._digests), padding])
        columns = self._columns
        self._forget()
        rows = self._gather(row)
        if rows is not None:
            self._judge.judge(self._step, columns, rows)

    def _add(self, column: Column, tensor: torch.Tensor) -> None:
        assert len(self._columns) < MAX_COLUMNS, "a place has no room for another column"
        digest = self._digester.of(tensor)
        if column.part != SAME:
            digest = self._digester.zero_if_flat(digest, tensor)
        self._columns.append(column)
        self._digests.append(digest)
        words = f"{column.name} {tuple(tensor.shape)} {tensor.dtype}"
        self._layout = zlib.crc32(words.encode(), self._layout)

    def _forget(self) -> None:
        self._columns, self._digests, self._layout = [], [], 0

    def _gather(self, row: torch.Tensor) -> list[list[int]] | None:
        """Return every rank's row on rank 0, None elsewhere."""
        parts = self._group.gather(row)
        if parts is None:
            return None
        rows: list[list[int]] = Download(torch.stack(parts)).result(self._timeout_s).tolist()
        return rows

    # What the decoder does.

    def _watched_forward(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def checked_forward(
            input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, *caches: Any
        ) -> torch.Tensor:
            if not self._is_on:
                return forward(input_ids, positions, batch, *caches)
            self._projections = self._all_reduces = self._others = 0
            self._is_in_forward = True
            self._add(Column("input ids"), input_ids)
            self._add(Column("positions"), positions)
            self._add(Column("slots"), batch.slot_mapping)
            self._add(Column("sequence lengths"), batch.seq_lens)
            self._add(Column("beginnings of requests"), batch.query_start_loc)
            self.compare(INPUTS)
            hidden = forward(input_ids, positions, batch, *caches)
            self._add(Column("the final norm"), hidden)
            self.compare(FINAL)
            self._is_in_forward = False
            return hidden

        return checked_forward

    def _watched_linear(
        self, decoder: Decoder, linear: Callable[..., torch.Tensor], is_fused: bool = False
    ) -> Callable[..., torch.Tensor]:
        """Wrap a projection; is_fused: the gate is folded in."""

        def checked_linear(*args: Any) -> torch.Tensor:
            out = linear(*args)
            if self._is_on:
                self._made(decoder, out, is_fused)
            return out

        return checked_linear

    def _watched_fused(
        self, decoder: Decoder, project: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Wrap a projection that has added its input to the residual, and returns that too."""

        def checked_project(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, residual = project(*args, **kwargs)
            if self._is_on:
                self._made(decoder, out, is_fused=True)
                self._add(Column("the residual"), residual)
            return out, residual

        return checked_project

    def _made(self, decoder: Decoder, out: torch.Tensor, is_fused: bool = False) -> None:
        """Take in a projection's output [rows, local columns]."""
        if not self._is_in_forward:
            self._add(Column("local logits", LOGITS), out)
            return
        projection = PROJECTIONS[self._projections % len(PROJECTIONS)]
        self._projections += 1
        if projection == "qkv":
            for part, columns in zip(ATTENTION_PARTS, _split_qkv(decoder, out), strict=True):
                self._add(Column(part, part), columns)
        elif projection == "gate_up" and is_fused:
            self._add(Column(GATED, GATED), out)
        elif projection == "gate_up":
            for part, columns in zip(MLP_PARTS, out.chunk(2, dim=1), strict=True):
                self._add(Column(part, part), columns)

    def _find_alike(self, decoder: Decoder) -> None:
        """Let rank 0 know where the checkpoint holds the same values twice, and say so.

        Some do: KV heads that were copied to make more of them, say.
        """
        digests = []
        for layer in decoder.layers:
            for weight, bias in ((layer.qkv, layer.qkv_bias), (layer.gate_up, layer.gate_up_bias)):
                plain = weight.to_dense() if weight.is_mkldnn else weight
                whole = plain if bias is None else torch.cat([plain, bias[:, None]], dim=1)
                is_qkv = weight is layer.qkv
                parts = _split_qkv(decoder, whole.T) if is_qkv else whole.T.chunk(2, dim=1)
                digests += [self._digester.of(part.T) for part in parts]
        head = decoder.lm_head.to_dense() if decoder.lm_head.is_mkldnn else decoder.lm_head
        digests.append(self._digester.of(head))
        rows = self._gather(torch.stack(digests))
        if rows is None:
            return
        told = self._judge.find_alike(rows)
        if told:
            others = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
            logger.warning(
                "check-ranks: the checkpoint holds the same values in different slices, which "
                "are not told apart: %s%s",
                "; ".join(told[:MOST_TOLD]),
                others,
            )


def _split_qkv(decoder: Decoder, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the columns of q, of k and of v."""
    shape = decoder.head_shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return torch.split_with_sizes(out, [count * shape.head_dim for count in heads], dim=1)
