"""Questions about where things lie: weights on ranks, tokens in blocks, blocks in memory."""

from __future__ import annotations

from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.shards import even_shard, head_shard
from nanorunner.workers.weight_plan import weight_plan
from nanorunner.workshop.question import Answer, Question, Setting

TOKEN, TABLE = 299, (5, 10)
GIB = 1 << 30


def most_ranks_without_copies(setting: Setting) -> Question:
    """Ask for the largest tp at which no KV head is copied."""
    model = setting.model
    shards = {
        tp: [head_shard(model.num_heads, model.num_kv_heads, tp, rank) for rank in range(tp)]
        for tp in range(1, model.num_heads + 1)
    }
    answer = max(
        tp
        for tp, ranks in shards.items()
        if all(shard.kv_heads.size and not shard.is_kv_copy for shard in ranks)
    )
    return Question(
        text="What is the largest tp at which every rank has KV heads of its own, none of them a "
        "copy?",
        answer=answer,
        hint="Whole KV heads are dealt out while there are enough for all ranks.",
        why=f"the model has {model.num_kv_heads} KV heads; with more ranks some share one "
        f"(copies), or hold zeros",
        slips={
            model.num_heads: "Those are query heads: the most ranks that work at all. Several "
            "query heads read one KV head; how many of those are there?"
        },
    )


def slot(setting: Setting) -> Question:
    """Ask for a token's slot."""
    logical, offset = divmod(TOKEN, BLOCK_SIZE)
    block = TABLE[logical]
    answer = block * BLOCK_SIZE + offset
    return Question(
        text=f"A sequence has the block table {list(TABLE)}, blocks of {BLOCK_SIZE} tokens. In "
        f"which slot lie K and V of token {TOKEN}?",
        answer=answer,
        hint=f"logical block = token // {BLOCK_SIZE}; the table gives the physical one; slot = "
        f"physical block * {BLOCK_SIZE} + offset.",
        why=f"{TOKEN} // {BLOCK_SIZE} = {logical}, table[{logical}] = {block}, {TOKEN} % "
        f"{BLOCK_SIZE} = {offset}, {block} * {BLOCK_SIZE} + {offset} = {answer}",
        slips={
            TOKEN: "That is its place in the sequence. Which physical block does the table say?"
        },
    )


def block_bytes(setting: Setting) -> Question:
    """Ask for the bytes of a KV block on each rank."""
    # here: it needs torch, which takes seconds; the code exercises need not wait for it
    from nanorunner.workers import kv_cache

    model = setting.model
    local = head_shard(model.num_heads, model.num_kv_heads, setting.tp, 0).local_kv_heads

    def size(num_heads: int) -> int:
        return kv_cache.block_bytes(model.num_layers, num_heads, model.head_dim, setting.item_bytes)

    answer = size(local)
    slips: dict[Answer, str] = {
        answer // 2: "K and V, both.",
        answer // model.num_layers: "Every layer has its own K and V.",
        size(model.num_heads): "Those are all query heads; K and V have KV heads.",
        size(model.num_kv_heads): f"That is the whole model's; a rank at tp {setting.tp} has a "
        f"share of the KV heads.",
    }
    return Question(
        text=f"How many bytes does one KV block of {BLOCK_SIZE} tokens take on each rank, all "
        f"layers together, in {setting.dtype}?",
        answer=answer,
        hint="2 (K and V) * layers * tokens * local KV heads * head_dim * bytes of a number.",
        why=f"2 * {model.num_layers} layers * {BLOCK_SIZE} tokens * {local} KV head(s) of this "
        f"rank * {model.head_dim} * {setting.item_bytes} bytes = {answer:,}",
        slips=slips,
    )


def blocks_in_a_gib(setting: Setting) -> Question:
    """Ask how many whole blocks fit in 1 GiB."""
    one = block_bytes(setting).answer
    assert isinstance(one, int)
    answer = GIB // one
    return Question(
        text="How many KV blocks fit in 1 GiB of KV cache on each rank?",
        answer=answer,
        hint=f"1 GiB is {GIB:,} bytes; only whole blocks count.",
        why=f"{GIB:,} // {one:,} = {answer}; they hold {answer * BLOCK_SIZE:,} tokens, though "
        f"{GIB * BLOCK_SIZE // one:,} would fit without blocks",
        slips={answer + 1: "Rounded up: the last one would not fit."},
    )


def qkv_shape(setting: Setting) -> Question:
    """Ask for the local shape of the fused qkv weight."""
    model = setting.model
    shard = head_shard(model.num_heads, model.num_kv_heads, setting.tp, 0)
    answer = _local_shape(setting, "layers.0.qkv")
    return Question(
        text="What is the shape [rows, columns] of a rank's fused qkv weight?",
        answer=answer,
        hint="Its rows are its query heads, then its K heads, then its V heads, head_dim rows "
        "each; its columns are the hidden size.",
        why=f"({shard.local_heads} + 2 * {shard.local_kv_heads}) * {model.head_dim} rows, "
        f"hidden {model.hidden_size} columns: column-parallel cuts the rows (dim 0)",
        slips={
            (answer[1], answer[0]): "PyTorch keeps a weight as [out, in].",
            (shard.local_heads * model.head_dim, model.hidden_size): "And K and V?",
        },
    )


def o_shape(setting: Setting) -> Question:
    """Ask for the local shape of the output projection."""
    model = setting.model
    answer = _local_shape(setting, "layers.0.o")
    width = model.num_heads * model.head_dim
    slips: dict[Answer, str] = {
        (model.hidden_size // setting.tp, width): "That cuts the rows. A row-parallel layer takes "
        "the part of the input that this rank has made: which dimension is that?",
        (answer[1], answer[0]): "PyTorch keeps a weight as [out, in].",
    }
    return Question(
        text="What is the shape [rows, columns] of a rank's o (output projection) weight?",
        answer=answer,
        hint="Row-parallel: every row (output), and the columns (inputs) of this rank's heads.",
        why=f"hidden {model.hidden_size} rows, {answer[1]} columns for this rank's query heads; "
        f"each rank's output is a partial sum, so an all-reduce follows",
        slips=slips,
    )


def padded_vocabulary(setting: Setting) -> Question:
    """Ask how many ids the ranks hold together."""
    size = setting.model.vocab_size
    local = even_shard(size, setting.tp, 0).local_size
    return Question(
        text=f"Every rank holds equally many vocabulary ids. How many do the ranks hold together, "
        f"padding included? (the model has {size:,})",
        answer=local * setting.tp,
        hint="Each rank's share is rounded up; padded ids have logits of minus infinity.",
        why=f"{setting.tp} * {local:,}, so {local * setting.tp - size} of them are padding",
        slips={size: "Does that divide by tp?"},
    )


def zero_kv_heads(setting: Setting) -> Question:
    """Ask how many KV heads of zeros there are."""
    model, tp = setting.model, setting.tp
    shards = [head_shard(model.num_heads, model.num_kv_heads, tp, rank) for rank in range(tp)]
    held = sum(shard.local_kv_heads for shard in shards)
    real = sum(shard.kv_heads.size for shard in shards)
    copies = sum(shard.kv_heads.size for shard in shards if shard.is_kv_copy)
    return Question(
        text=f"All ranks have the same shapes. How many of their KV heads, all ranks together, "
        f"are zeros? (the model has {model.num_kv_heads})",
        answer=held - real,
        hint=f"A rank has {shards[0].local_kv_heads} KV head(s). How many are that in all, and how "
        f"many of them are the model's, or copies of those?",
        why=f"{tp} * {shards[0].local_kv_heads} = {held} heads, {real - copies} of the model's, "
        f"{copies} copies, {held - real} of zeros: {held - real}/{held} of the KV cache in vain",
        slips={},
    )


def _local_shape(setting: Setting, name: str) -> tuple[int, ...]:
    plan = weight_plan(setting.model, setting.tp, 0)
    return next(parameter.shape for parameter in plan if parameter.name == name)
