"""Questions about a step: frames, all-reduces, bytes that travel, the least time it can take."""

from __future__ import annotations

import math

from nanorunner.workers.messages import METHODS_WITH_REPLY
from nanorunner.workers.shards import even_shard
from nanorunner.workers.weight_plan import weight_plan
from nanorunner.workshop.question import Answer, Question, Setting
from nanorunner.workshop.shard_map import all_reduce_numbers

STAGES = ("load_model", "profile", "allocate_kv", "capture")  # build.py makes these calls first
LAST = "close"
NEW_TOKENS = 8
TERABYTES_PER_S = 4.8  # of the GPU in the question
BANDWIDTH = TERABYTES_PER_S * 1e12
NUM_SEQUENCES, MAX_NUM_SEQS = 13, 16
KEY_BYTES = 8  # runner v2: a row's best (score, id) as one int64


def frames(setting: Setting) -> Question:
    """Ask how many frames a short run puts on the wire."""
    assert {*STAGES, LAST} <= METHODS_WITH_REPLY, "the stages are calls of the wire"
    started = len(STAGES)
    answer = started + NEW_TOKENS + 1 if setting.tp > 1 else 0
    return Question(
        text=f"An engine starts, completes one short prompt with {NEW_TOKENS} new tokens "
        f"(max_tokens {NEW_TOKENS}, no end-of-text), and closes. How many frames did rank 0 write?",
        answer=answer,
        hint=f"A frame for each stage before the first step, one for each step, one for the end. "
        f"(The prompt's own step samples the first token.) At tp {setting.tp}, is there a wire?",
        why=f"{started} stages ({', '.join(STAGES)}), {NEW_TOKENS} steps, 1 close"
        if answer
        else "at tp 1 there is no other rank, and so no wire",
        slips={
            NEW_TOKENS: "Those are the steps. What comes before the first and after the last?",
            started + NEW_TOKENS: "And how do the ranks hear that it is over?",
            started + NEW_TOKENS + 2: "The step that computes the prompt samples a token already, "
            "and only an answer that an end-of-text ends costs one step more.",
        }
        if answer
        else {},
    )


def all_reduces(setting: Setting) -> Question:
    """Ask how many all-reduces a decode step has."""
    model = setting.model
    num_hidden = len(all_reduce_numbers(model, setting.tp))
    sampler = int(setting.runner == "v2" and setting.tp > 1)
    answer = num_hidden + sampler
    per_layer = 2 * model.num_layers
    by_runner = (
        "one more, of one key a sequence, in which the ranks agree on the sampled id"
        if sampler
        else "and no more: rank 0 samples alone, from logits that it gathers"
    )
    return Question(
        text=f"How many all-reduces are in one decode step of runner {setting.runner}?",
        answer=answer,
        hint="Where is a result only a part of a sum? Count those places in a layer, and look at "
        "the embedding and at the sampler (v2).",
        why=f"1 after the embedding, 2 in each of {model.num_layers} layers (o, down), {by_runner}"
        if answer
        else "at tp 1 a rank has the whole sum",
        slips={
            per_layer: "And the embedding? Each rank knows only its own ids.",
            model.num_layers: "Two projections of a layer are row-parallel: which?",
        }
        if answer
        else {},
    )


def ring_bytes(setting: Setting) -> Question:
    """Ask for the bytes that a ring all-reduce makes each rank send in a step."""
    model, tp = setting.model, setting.tp
    message = model.hidden_size * setting.item_bytes
    count = len(all_reduce_numbers(model, tp))
    answer = 2 * (tp - 1) / tp * message * count
    return Question(
        text=f"In a decode step of one sequence, how many bytes does each rank send for the "
        f"all-reduces of hidden states, if each is a ring all-reduce ({setting.dtype})?",
        answer=answer,
        hint="A ring all-reduce sends 2 (p - 1) / p of the message: once round to add up, once "
        "round to hand out.",
        why=f"{count} all-reduces * 2 * {tp - 1}/{tp} * {model.hidden_size} * "
        f"{setting.item_bytes} bytes = {answer:,.0f}",
        slips={
            count * message: "Each rank does not send the message once: 2 (p - 1) / p of it.",
            2 * (tp - 1) * message * count: "A rank's pieces are 1/p of the message each.",
        },
        tolerance=0.001,
    )


def logits_bytes(setting: Setting) -> Question:
    """Ask for the bytes that a rank gives for the choice of one token."""
    model = setting.model
    local = even_shard(model.vocab_size, setting.tp, 0).local_size * setting.item_bytes
    answer = 0 if setting.tp == 1 else local if setting.runner == "v1" else KEY_BYTES
    whole = model.vocab_size * setting.item_bytes
    slips: dict[Answer, str] = {whole: "That is the whole vocabulary's row; a rank has a shard."}
    if setting.runner == "v2":
        slips[local] = "Runner v2 gathers no logits: what is the least that must be compared?"
    return Question(
        text=f"One greedy token is chosen with runner {setting.runner}. How many bytes does each "
        f"other rank put in for that, beside the hidden states?",
        answer=answer,
        hint="v1: rank 0 gathers each rank's logits. v2: each rank's best token is one int64 key.",
        why={
            "v1": f"{local // setting.item_bytes:,} ids of its shard * {setting.item_bytes} bytes",
            "v2": f"one int64: its best score and id, and an all-reduce takes the maximum "
            f"(v1 would send {local:,} bytes)",
        }[setting.runner]
        if answer
        else "at tp 1 there is no other rank",
        slips=slips,
    )


def least_time(setting: Setting) -> Question:
    """Ask for the lower bound of a decode step in milliseconds."""
    model = setting.model
    sizes = {p.name: math.prod(p.shape) for p in weight_plan(model, setting.tp, 0)}
    if not model.tie_word_embeddings:
        del sizes["embed"]  # of the table, a step reads the rows of its tokens only
    num_bytes = sum(sizes.values()) * setting.item_bytes
    answer = num_bytes / BANDWIDTH * 1e3
    slips: dict[Answer, str] = {}
    if setting.tp > 1:
        slips[answer * setting.tp] = "Each rank reads its own share, all at the same time."
    slips[answer / 1e3] = "In milliseconds."
    return Question(
        text=f"A decode step must read every weight of a rank once. How many milliseconds is that "
        f"at least, on GPUs that read {TERABYTES_PER_S} TB/s each ({setting.dtype})? Leave the KV "
        f"cache out.",
        answer=answer,
        hint="bytes of weights on a rank / bytes a second; `nanorunner shards` prints the bytes.",
        why=f"{num_bytes:,} bytes / {TERABYTES_PER_S}e12 bytes/s = {answer:.4f} ms",
        slips=slips,
        tolerance=0.02,
    )


def padded_rows(setting: Setting) -> Question:
    """Ask how many rows of a replayed graph are padding."""
    # here: it needs torch, which takes seconds; the code exercises need not wait for it
    from nanorunner.workers.cuda_graphs import capture_sizes

    sizes = capture_sizes(MAX_NUM_SEQS)
    size = min(size for size in sizes if size >= NUM_SEQUENCES)
    return Question(
        text=f"CUDA graphs were captured for {sizes} sequences. {NUM_SEQUENCES} sequences decode. "
        f"How many rows of the step are computed in vain?",
        answer=size - NUM_SEQUENCES,
        hint="The smallest graph that holds them all is replayed.",
        why=f"the graph of {size} is replayed, {size} - {NUM_SEQUENCES} rows are padding",
        slips={0: "A graph's shapes are fixed at capture; is there one of exactly this size?"},
    )


def ranks_that_sample(setting: Setting) -> Question:
    """Ask which ranks need the temperatures."""
    everyone = frozenset(range(setting.tp))
    answer = everyone if setting.runner == "v2" else frozenset({0})
    slips: dict[Answer, str] = {
        everyone: "Runner v1 gathers the logits: who has them all?",
        frozenset({0}): "In runner v2 each rank draws from its own shard of the vocabulary.",
    }
    return Question(
        text=f"Which ranks need the sequences' temperatures with runner {setting.runner}?",
        answer=answer,
        hint="Whoever samples does.",
        why="every rank draws from its own shard, and the best draw wins"
        if setting.runner == "v2"
        else "rank 0 alone has all logits and samples; the others run the model",
        slips=slips,
    )
