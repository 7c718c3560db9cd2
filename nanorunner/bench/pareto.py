"""Which points nothing beats in both latency and throughput, and which latency they have."""

from __future__ import annotations

from collections.abc import Sequence

from nanorunner.bench.records import Record

TPOT = "tpot_ms_p50"

Point = tuple[float, float]


def front(points: Sequence[Point]) -> list[Point]:
    """Return the (latency, throughput) points that no other one beats, by latency.

    A point is beaten by one that is no worse in both and better in one of them.
    """
    best: list[Point] = []
    for latency, rate in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or rate > best[-1][1]:
            best.append((latency, rate))
    return best


def latency_of(records: Sequence[Record]) -> tuple[str, dict[int, float]]:
    """Return what the latency is called, and each record's own in ms, by id(record).

    TPOT where it was measured; else, for the older files, a batch's duration over the tokens of
    one of its requests, which holds the prefill too.
    """
    measured = {id(r): r.metrics[TPOT].median for r in records if TPOT in r.metrics}
    if len(measured) >= 2:
        return "ms per output token, TPOT P50", measured
    whole = {
        id(record): record.metrics["duration_s"].median * 1000 / record.shape.output_len
        for record in records
        if record.shape is not None and "duration_s" in record.metrics
    }
    return "ms per output token, prefill included", whole
