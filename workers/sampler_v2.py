"""From a step's logits to its token ids, on every rank, without looking at the device.

    local logits [n, local_vocab], one row a request that samples
        plain rows         temperature, greedy: drawn from the shard as it is
        the other rows     edits (float32) -> min-p -> top-k, top-p -> drawn from the shard
    keys [n] int64, the best (score, id) of this rank's shard
    all-reduce MAX over the ranks -> the same ids everywhere

Ranks exchange 8 bytes a row. Only rows with top-k or top-p (and log-probabilities) have their
logits gathered: every rank then finds the same cut by the same integers, and draws from its own
shard above it. A row's id depends on its own logits, settings, seed and position, never on its
neighbours: which launches it takes part in changes, but not one bit of its scores does.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.lm_head_sample import lm_head_sample
from nanorunner.kernels.logit_edits import add_bias, ban_bad_words, ban_stop_ids, select_rows
from nanorunner.kernels.logprobs import Logprobs, chunk_rows, logprobs
from nanorunner.kernels.min_p import min_p_floor
from nanorunner.kernels.penalties import DraftTokens, apply_penalties
from nanorunner.kernels.sample_keys import sample_keys
from nanorunner.kernels.token_counts import count_sampled
from nanorunner.kernels.token_keys import KEEP_ALL, SKIP_ROW, key_ids
from nanorunner.kernels.top_k_top_p_triton import top_k_top_p_cut
from nanorunner.workers.full_sampling import DRAW, EDITS, Need
from nanorunner.workers.sampling_state import Int32, Int64, SamplingState

Mask = npt.NDArray[np.bool_]
FEW_LOGPROBS = 64  # rows that want at most so many are handled together, wider ones alone


class SamplerGroup(Protocol):
    """What the sampler asks of the ranks; at tp 1 both calls return their argument."""

    tp: int

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks, element by element; x may be overwritten."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return every rank's x, in rank order, one behind the other along dim."""


class Selection(NamedTuple):
    """Some places of a batch, on both sides."""

    key: bytes  # what it was made from
    places: Int64  # [m]
    device_places: torch.Tensor  # [m] int32
    # [n] int64, as a cut: the places drop out of the launch that draws all the others
    skip: torch.Tensor


class LogprobGroup(NamedTuple):
    """Log-probabilities of some rows of a step, on the device."""

    places: Int64  # [m] in the batch
    num_top: Int32  # [m] how many of the best each of them wants
    logprobs: Logprobs  # m rows, as wide as the widest wants


class SamplerV2:
    """Samples for one rank.

    state: the sampling table. token_ids [R, max_model_len], prompt_len, prefill_len [R], all int32:
    the state table, which the runner owns. group: the ranks. total_len [R] int32, with speculation:
    drafts lie in the token table behind it, and count as output for the places after them.
    """

    def __init__(
        self,
        state: SamplingState,
        token_ids: torch.Tensor,
        prompt_len: torch.Tensor,
        prefill_len: torch.Tensor,
        group: SamplerGroup,
        total_len: torch.Tensor | None = None,
    ) -> None:
        self.state = state
        self._token_ids = token_ids
        self._prompt_len = prompt_len
        self._prefill_len = prefill_len
        self._group = group
        self._total_len = total_len
        # [R] float32 on the device, never written: as a temperature it asks for the best token
        self._greedy = torch.zeros_like(state.column("temperature"))
        # A steady batch asks the same step after step: the last selections stay on the device.
        self._selections: dict[str, Selection] = {}

    def sample_plain(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return ids [n] int64 by temperature and seed alone; can be captured in a CUDA graph.

        logits [n, local_vocab]; idx_mapping [n] int: rows of the state table, -1 (id 0) for nobody;
        positions [n] int64: where each row's input token stands.
        """
        keys = self._keys(logits, idx_mapping, positions)
        return key_ids(self._group.all_reduce_max(keys))

    def sample_head(
        self,
        hidden: torch.Tensor,
        lm_head: torch.Tensor,
        num_ids: int,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return sample_plain's ids of the logits hidden @ lm_head.T, which are never written.

        hidden [n, hidden]; lm_head [local_vocab, hidden], of which num_ids rows are tokens. For
        what kernels/lm_head_sample.py serves.
        """
        state = self.state
        keys = lm_head_sample(
            hidden,
            lm_head,
            idx_mapping,
            positions,
            state.column("temperature"),
            state.column("seed"),
            state.vocab_offset,
            num_ids,
        )
        return key_ids(self._group.all_reduce_max(keys))

    def sample(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        rows: Int64,
        needs: Int32,
    ) -> torch.Tensor:
        """Return ids [n] int64, the same on every rank; arguments as sample_plain.

        rows [n]: idx_mapping as the CPU knows it. needs [n]: SamplingState.needs(rows). logits are
        not changed.
        """
        needs = needs & np.int32(DRAW)
        if not needs.any():
            return self.sample_plain(logits, idx_mapping, positions)
        chosen = self._select("draw", needs != 0)
        is_all = len(chosen.places) == len(needs)
        row_index, row_positions = idx_mapping, positions
        if not is_all:
            row_index = idx_mapping.index_select(0, chosen.device_places)
            row_positions = positions.index_select(0, chosen.device_places)
        needs = needs[chosen.places]

        if (needs & np.int32(EDITS)).any():
            edited = self._edited(logits, chosen, row_index, row_positions, rows, needs)
        else:
            edited = logits if is_all else logits.index_select(0, chosen.device_places)
        cut = self._cut(edited, row_index, row_positions, needs)
        keys = self._keys(edited, row_index, row_positions, cut)
        if not is_all:
            others = self._keys(logits, idx_mapping, positions, chosen.skip)
            keys = others.index_copy_(0, chosen.device_places.long(), keys)
        return key_ids(self._group.all_reduce_max(keys))

    def count_sampled(
        self, ids: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor, needs: Int32
    ) -> None:
        """Count a step's ids [n] for the penalties of later steps; no launch without penalties."""
        if (needs & np.int32(Need.PENALTIES)).any():
            count_sampled(
                ids,
                idx_mapping,
                positions,
                self.state.column("slot"),
                self._prefill_len,
                self.state.output_counts,
                self.state.vocab_offset,
            )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, rows: Int64) -> list[LogprobGroup]:
        """Return the log-probabilities of ids [n] and of the best tokens, where rows ask for them.

        logits [n, local_vocab] as the model gave them. Every rank must take part, and gets all.
        """
        num_top = self.state.num_logprobs(rows)
        step = chunk_rows(logits.shape[1] * self._group.tp, logits.element_size())
        groups: list[LogprobGroup] = []
        for is_member in _logprob_groups(num_top, rows):
            chosen = self._select(f"logprobs {len(groups)}", is_member)
            width = int(num_top[is_member].max())
            parts = []
            for start in range(0, len(chosen.places), step):
                part = chosen.device_places[start : start + step]
                whole = self._group.all_gather(logits.index_select(0, part), dim=-1)
                parts.append(logprobs(whole, ids.index_select(0, part), width))
            joined = Logprobs(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
            groups.append(LogprobGroup(chosen.places, num_top[is_member], joined))
        return groups

    def _keys(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        cut: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the best keys [n] of this rank's shard, drawn with each row's own settings."""
        column = self.state.column
        heat, seed = column("temperature"), column("seed")
        return sample_keys(logits, idx_mapping, positions, heat, seed, self.state.vocab_offset, cut)

    def _edited(
        self,
        logits: torch.Tensor,
        chosen: Selection,
        row_index: torch.Tensor,
        positions: torch.Tensor,
        rows: Int64,
        needs: Int32,
    ) -> torch.Tensor:
        """Return the chosen rows of logits as float32 [m, local_vocab], edited."""
        state, column = self.state, self.state.column
        offset = state.vocab_offset
        edited = select_rows(
            logits,
            chosen.device_places,
            row_index,
            column("allowed_ids"),
            column("num_allowed"),
            _any(needs, Need.ALLOWED_IDS),
            offset,
        )
        if _any(needs, Need.BIAS):
            biases = column("bias_ids"), column("bias_values"), column("num_biases")
            add_bias(edited, row_index, *biases, offset)
        if _any(needs, Need.STOP_IDS):
            stops = column("stop_from"), column("stop_ids"), column("num_stop_ids")
            ban_stop_ids(edited, row_index, positions, *stops, offset)
        if _any(needs, Need.PENALTIES):
            strengths = column("repetition"), column("presence"), column("frequency")
            pool = state.prompt_bits, state.output_counts
            drafts = None
            if self._total_len is not None:
                drafts = DraftTokens(self._token_ids, self._total_len, positions, offset)
            apply_penalties(edited, row_index, column("slot"), *strengths, *pool, drafts)
        if _any(needs, Need.BAD_WORDS):
            words = column("words"), column("word_ends"), column("num_words")
            history = self._token_ids, self._prompt_len
            most = state.max_words(rows[chosen.places])
            ban_bad_words(edited, row_index, positions, *history, *words, most, offset)
        return edited

    def _cut(
        self,
        logits: torch.Tensor,
        row_index: torch.Tensor,
        positions: torch.Tensor,
        needs: Int32,
    ) -> torch.Tensor | None:
        """Return the keys [m] that the rows' filters cut at, None when no row has a filter."""
        column = self.state.column
        floor = None
        if _any(needs, Need.MIN_P):
            offset = self.state.vocab_offset
            best = sample_keys(logits, row_index, positions, self._greedy, column("seed"), offset)
            best = self._group.all_reduce_max(best)
            heat = column("temperature").index_select(0, row_index)
            floor = min_p_floor(best, heat, column("min_p").index_select(0, row_index))
        is_filtered = needs & np.int32(Need.TOP_K_TOP_P) != 0
        if not is_filtered.any():
            return floor

        is_all = bool(is_filtered.all())
        chosen = None if is_all else self._select("filter", is_filtered)
        part, part_index, part_floor = logits, row_index, floor
        if chosen is not None:
            part = logits.index_select(0, chosen.device_places)
            part_index = row_index.index_select(0, chosen.device_places)
            if floor is not None:
                part_floor = floor.index_select(0, chosen.device_places)
        names = ("temperature", "top_k", "top_p")
        heat, top_k, top_p = (column(name).index_select(0, part_index) for name in names)
        whole = self._group.all_gather(part, dim=-1)
        found = top_k_top_p_cut(whole, heat, top_k, top_p, part_floor)
        if chosen is None:
            return found
        cut = torch.full_like(positions, KEEP_ALL) if floor is None else floor
        return cut.index_copy_(0, chosen.device_places.long(), found)

    def _select(self, name: str, is_chosen: Mask) -> Selection:
        """Return the places [n] chosen, uploaded anew only when they are not the last ones."""
        key = is_chosen.tobytes()
        selection = self._selections.get(name)
        if selection is None or selection.key != key:
            places = np.flatnonzero(is_chosen)
            skip = np.where(is_chosen, SKIP_ROW, KEEP_ALL)
            upload = self.state.upload
            selection = Selection(key, places, upload(places.astype(np.int32)), upload(skip))
            self._selections[name] = selection
        return selection


def _any(needs: Int32, need: Need) -> bool:
    """Return whether any row has this need."""
    return bool((needs & np.int32(need)).any())


def _logprob_groups(num_top: Int32, rows: Int64) -> list[Mask]:
    """Return the groups of places that are as wide as each other, as masks [n].

    A row that asks for the whole vocabulary must not make its neighbours' results as wide. All
    places of a row (workers/places.py) are in one group.
    """
    is_narrow = (num_top >= 0) & (num_top <= FEW_LOGPROBS)
    groups = [is_narrow] if is_narrow.any() else []
    wide = dict.fromkeys(rows[num_top > FEW_LOGPROBS].tolist())
    return groups + [rows == row for row in wide]
