"""What all ranks must hold alike in a step and what they must not, and the sentence when it fails.

    check_ranks.py   at a place of the step, on every rank: its row of digests, gathered on rank 0
    judge()          rank 0, here: the rows of all ranks -> "" or what is wrong

    row [WIDTH] int64:  place | layout | digest of column 0 | digest of column 1 | ... | 0

A column is SAME (all ranks must hold it bit for bit) or names a part of a layer's output that is
cut over the ranks: the shard map then says which ranks hold the same slice and which do not. Pure
Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.shards import Span, even_shard, head_shard

MAX_COLUMNS = 10
WIDTH = 2 + MAX_COLUMNS
SAME = ""
FLAT = 0  # the digest of a share whose elements are all one value: it tells nothing apart
PROJECTIONS = ("qkv", "o", "gate_up", "down")  # of a layer, in the order of the forward
ATTENTION_PARTS, MLP_PARTS = ("q", "k", "v"), ("gate", "up")
GATED = "silu(gate) * up"  # where one kernel makes it of both
LOGITS = "logits"
PARTS = (*ATTENTION_PARTS, *MLP_PARTS)  # of a layer's weights, as their outputs are called
# What a place is behind, beside its counts.
INPUTS, REDUCED, FINAL, EXCHANGED, GATHERED, END = range(6)

Pair = tuple[int, int]  # two ranks, the lower one first


class RankCheckFailed(Exception):
    """What --check-ranks found; says step, place and ranks, or rank, layer and tensor."""


class Column(NamedTuple):
    """One column of the rows at a place."""

    name: str  # what it is a digest of, in words
    part: str = SAME  # or one of PARTS, GATED, LOGITS


class Place(NamedTuple):
    """A place in a step, as a rank counts its way there."""

    kind: int  # INPUTS to END
    projections: int  # that the forward has made so far, 4 a layer
    all_reduces: int  # that the forward has made so far: the embedding's, then 2 a layer
    others: int  # that were made outside a forward in this step

    def pack(self) -> int:
        """Return the place as one number."""
        return ((self.others << 20 | self.all_reduces) << 20 | self.projections) << 4 | self.kind

    @classmethod
    def unpack(cls, packed: int) -> Place:
        """Return the place that pack() made the number of."""
        low = (1 << 20) - 1
        return cls(packed & 15, packed >> 4 & low, packed >> 24 & low, packed >> 44)

    def text(self, num_layers: int) -> str:
        """Return the place in words."""
        if self.kind == REDUCED and self.others:
            return f"all-reduce {self.others} outside the model's forward"
        if self.kind == REDUCED:
            return f"the all-reduce of {self._parameter(num_layers)}"
        return {
            INPUTS: "the step's inputs",
            FINAL: "the final norm",
            EXCHANGED: "the exchange of the best keys",
            GATHERED: "the gathering of logits",
            END: "the step's end",
        }[self.kind]

    def layer(self) -> int:
        """Return the layer of the last projection."""
        return (self.projections - 1) // len(PROJECTIONS)

    def num_missing(self, num_layers: int) -> int:
        """Return how many all-reduces were left out on the way here; below 0: too many made."""
        if self.kind == FINAL:
            return 1 + 2 * num_layers - self.all_reduces
        if self.kind != REDUCED or self.others:
            return 0
        # the embedding's, o's and down's: one for every two projections, and this one
        return self.projections // 2 + 1 - self.all_reduces

    def _parameter(self, num_layers: int) -> str:
        layer, projection = divmod(self.projections - 1, len(PROJECTIONS))
        if self.projections == 0:
            return "embed"
        return f"layers.{layer}.{PROJECTIONS[projection]}" if layer < num_layers else "the head"


class Slices:
    """Which ranks hold the same slice of a part, and which hold different ones."""

    def __init__(self, model: ModelConfig, tp: int) -> None:
        heads = [head_shard(model.num_heads, model.num_kv_heads, tp, rank) for rank in range(tp)]
        columns = [even_shard(model.intermediate_size, tp, rank).span for rank in range(tp)]
        vocabulary = [even_shard(model.vocab_size, tp, rank).span for rank in range(tp)]
        kv_heads = [shard.kv_heads for shard in heads]
        self._spans: dict[str, tuple[str, list[Span]]] = {
            "q": ("query heads", [shard.heads for shard in heads]),
            "k": ("KV heads", kv_heads),
            "v": ("KV heads", kv_heads),
            **{part: ("MLP columns", columns) for part in (*MLP_PARTS, GATED)},
            LOGITS: ("ids", vocabulary),
        }
        # part -> the pairs of ranks that hold the same slice, and those that hold different ones
        self.copies: dict[str, list[Pair]] = {}
        self.others: dict[str, list[Pair]] = {}
        for part, (_, spans) in self._spans.items():
            held = [rank for rank, span in enumerate(spans) if span.size]  # else it is all padding
            pairs = list(combinations(held, 2))
            self.copies[part] = [(a, b) for a, b in pairs if spans[a] == spans[b]]
            self.others[part] = [(a, b) for a, b in pairs if spans[a] != spans[b]]

    def text(self, part: str, rank: int) -> str:
        """Return which slice a rank holds, in words."""
        what, spans = self._spans[part]
        return f"{what} {spans[rank].start}..{spans[rank].stop - 1}"


class Judge:
    """Rank 0's: reads the rows of all ranks at each place of a step.

    alike: pairs whose weights hold the same values in different slices, by (layer, part), because
    the checkpoint repeats itself; their outputs are equal and that is no error.
    """

    def __init__(self, model: ModelConfig, tp: int) -> None:
        self.alike: dict[tuple[int, str], set[Pair]] = {}
        self._slices = Slices(model, tp)
        self._num_layers = model.num_layers
        self._last_good = ""

    def begin(self) -> None:
        """Forget the places of the step before."""
        self._last_good = "the step's beginning"

    def find_alike(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Note which ranks hold equal values in different slices, and return that in words.

        rows: each rank's digests of its weights, layer by layer in the order of PARTS, the head's
        last.
        """
        names = [(layer, part) for layer in range(self._num_layers) for part in PARTS]
        names.append((0, LOGITS))
        told = []
        for index, (layer, part) in enumerate(names):
            values = [row[index] for row in rows]
            for a, b in self._slices.others[part]:
                if values[a] == values[b]:
                    self.alike.setdefault((layer, part), set()).add((a, b))
                    told.append(f"layer {layer}, {part}: ranks {a} and {b}")
        for layer in range(self._num_layers):
            gate, up = (self.alike.get((layer, part), set()) for part in MLP_PARTS)
            self.alike[layer, GATED] = gate & up
        return told

    def judge(self, step: int, columns: Sequence[Column], rows: Sequence[Sequence[int]]) -> None:
        """Raise RankCheckFailed for what the rows of one place disprove; rows[rank] [WIDTH]."""
        places = [Place.unpack(row[0]) for row in rows]
        here = places[0].text(self._num_layers)
        wrong = self._way_errors(places) or self._layout_errors(rows)
        for index, column in enumerate(columns):
            values = [row[2 + index] for row in rows]
            if not wrong and column.part == SAME:
                wrong = self._same_errors(column.name, values)
            elif not wrong:
                wrong = self._own_errors(places[0].layer(), column, values)
        if wrong:
            raise RankCheckFailed(f"step {step}, after {here}: {wrong}")
        self._last_good = here

    def _way_errors(self, places: Sequence[Place]) -> str:
        """Return how the ranks' ways to this place differ from each other or from a forward's."""
        for rank, place in enumerate(places):
            if place != places[0]:
                return (
                    f"rank {rank} is after {place.text(self._num_layers)} instead: one of the "
                    f"ranks has left an all-reduce out, or made one too many; the last place "
                    f"where all were together is {self._last_good}"
                )
        missing = places[0].num_missing(self._num_layers)
        if missing:
            how = f"{missing} all-reduce(s) were left out" if missing > 0 else "too many were made"
            return f"{how} on every rank since {self._last_good}"
        return ""

    def _layout_errors(self, rows: Sequence[Sequence[int]]) -> str:
        for rank, row in enumerate(rows):
            if row[1] != rows[0][1]:
                return f"rank {rank} holds tensors of another shape or type than rank 0"
        return ""

    def _same_errors(self, name: str, values: Sequence[int]) -> str:
        if len(set(values)) == 1:
            return ""
        groups: dict[int, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        held = sorted(groups.items(), key=lambda item: -len(item[1]))
        told = ", ".join(
            f"{_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'} {value & (1 << 64) - 1:016x}"
            for value, ranks in held
        )
        return (
            f"{name}: {told}; all was equal after {self._last_good}, so a value has drifted in "
            f"between: by a kernel, by an all-reduce, by a buffer that was written too early, or "
            f"because an all-reduce is missing"
        )

    def _own_errors(self, layer: int, column: Column, values: Sequence[int]) -> str:
        """Return what is wrong with a part that is cut over the ranks."""
        part = column.part
        where = column.name if part == LOGITS else f"layer {layer}, {column.name}"
        for a, b in self._slices.copies[part]:
            if values[a] != values[b]:
                return (
                    f"{where}: ranks {a} and {b} hold different bits, but the shard map gives "
                    f"them the same slice: {self._slices.text(part, a)}"
                )
        alike = self.alike.get((0 if part == LOGITS else layer, part), set())
        for a, b in self._slices.others[part]:
            if values[a] == values[b] != FLAT and (a, b) not in alike:
                return (
                    f"{where}: ranks {a} and {b} hold the same bits, but the shard map gives them "
                    f"different slices: {self._slices.text(part, a)} and "
                    f"{self._slices.text(part, b)}"
                )
        return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
