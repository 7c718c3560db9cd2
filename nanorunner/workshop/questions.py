"""Every question by its number. Answers are computed when they are needed, and kept nowhere."""

from __future__ import annotations

from collections.abc import Callable

from nanorunner.workshop import questions_shape as shape
from nanorunner.workshop import questions_step as step
from nanorunner.workshop import questions_wire as wire
from nanorunner.workshop.question import Question, Setting

QUESTIONS: dict[int, Callable[[Setting], Question]] = {
    1: step.frames,
    2: shape.most_ranks_without_copies,
    3: shape.slot,
    4: shape.block_bytes,
    5: shape.blocks_in_a_gib,
    6: shape.qkv_shape,
    7: shape.o_shape,
    8: step.all_reduces,
    9: step.ring_bytes,
    10: step.logits_bytes,
    11: step.least_time,
    12: step.padded_rows,
    13: step.ranks_that_sample,
    14: shape.padded_vocabulary,
    15: shape.zero_kv_heads,
    16: wire.when_to_overwrite,
    17: wire.event_after_a_kill,
}
# Their answers are found by trying, which a list of questions should not wait for.
TEXTS_OF_TRIALS = {16: wire.ACK_TEXT, 17: wire.EVENT_TEXT}


def text_of(number: int, setting: Setting) -> str:
    """Return what a question asks."""
    return TEXTS_OF_TRIALS.get(number) or QUESTIONS[number](setting).text
