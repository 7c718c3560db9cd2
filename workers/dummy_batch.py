"""How the tokens of a dummy batch (warm-up, profiling, capture) are dealt out to its requests."""

from __future__ import annotations


def split_tokens(num_reqs: int, num_tokens: int) -> list[int]:
    """Return each request's tokens: equal shares, and what is left over one each to the last ones.

    Given to one request, the remainder could carry it past the model's length, and so past the end
    of its block table. Raises ValueError when there is not a token for each.
    """
    if not 1 <= num_reqs <= num_tokens:
        raise ValueError(f"{num_tokens} tokens for {num_reqs} requests: each needs at least 1")
    share, left_over = divmod(num_tokens, num_reqs)
    return [share] * (num_reqs - left_over) + [share + 1] * left_over
