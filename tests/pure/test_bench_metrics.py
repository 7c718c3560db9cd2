"""Each figure is what its definition says, for any times that requests may have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorunner.bench.metrics import (
    METRICS,
    RequestRecord,
    definitions,
    parse_slo,
    pass_metrics,
)
from nanorunner.bench.result import summarise

GAPS_S = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=8)


@st.composite
def a_request(draw: st.DrawFn) -> RequestRecord:
    """A request whose ids came after random gaps, or one that failed half-way."""
    arrival_s = draw(st.floats(0.0, 5.0))
    times_s, time_s = [], arrival_s
    for gap_s in draw(GAPS_S):
        time_s += gap_s
        times_s.append(time_s)
    return RequestRecord(
        input_tokens=draw(st.integers(1, 50)),
        arrival_s=arrival_s,
        handover_s=arrival_s,
        token_times_s=times_s,
        token_ids=[7] * len(times_s),
        finish_reason=draw(st.sampled_from(["length", "length", "stop", "error: no room", None])),
    )


def nearest_two(samples: Sequence[float], share: float) -> float:
    """The percentile by its definition: between the two nearest samples, in proportion."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def gaps(record: RequestRecord) -> list[float]:
    """The waits between arrivals of ids; those that came together are one arrival."""
    arrivals = sorted(set(record.token_times_s))
    return [b - a for a, b in itertools.pairwise(arrivals)]


def same(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@given(st.lists(a_request(), max_size=6))
def test_every_figure_is_what_its_definition_says(records: list[RequestRecord]) -> None:
    values, samples = pass_metrics(records, 2.0, tp=2, slo_ms={"e2e": 1e9})
    done = [r for r in records if r.finish_reason in ("length", "stop")]
    assert set(values) == set(samples) <= set(METRICS)
    assert values["requests_per_s"] == values["goodput_requests_per_s"] == len(done) / 2
    assert values["output_tokens_per_s"] == sum(len(r.token_ids) for r in done) / 2
    assert values["output_tokens_per_s_per_rank"] == values["output_tokens_per_s"] / 2
    assert values["total_tokens_per_s"] == same(
        values["input_tokens_per_s"] + values["output_tokens_per_s"]
    )
    long = [r for r in done if len(r.token_ids) > 1]
    pools = {
        "ttft": [r.token_times_s[0] - r.arrival_s for r in done],
        "e2e": [r.token_times_s[-1] - r.arrival_s for r in done],
        "tpot": [(r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_ids) - 1) for r in long],
        "itl": [gap for r in done for gap in gaps(r)],
    }
    for name, pool in pools.items():
        if not pool:
            assert f"{name}_ms_p50" not in values
            continue
        for share, statistic in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
            assert values[f"{name}_ms_{statistic}"] == same(1000 * nearest_two(pool, share))
            assert samples[f"{name}_ms_{statistic}"] == len(pool)
        assert values[f"{name}_ms_mean"] == same(1000 * sum(pool) / len(pool))


def test_ids_that_come_together_are_one_arrival_and_as_many_tokens() -> None:
    """Ten ids in five steps of two, 10 ms apart, as with drafts that come true."""
    times_s = [0.01 * step for step in range(1, 6) for _ in range(2)]
    record = RequestRecord(
        input_tokens=1,
        arrival_s=0.0,
        handover_s=0.0,
        token_times_s=times_s,
        token_ids=[7] * 10,
        finish_reason="length",
    )
    values, samples = pass_metrics([record], 1.0, tp=1, slo_ms={})
    assert samples["itl_ms_p50"] == 4
    assert values["itl_ms_p50"] == same(10.0)
    assert values["itl_ms_mean"] == same(10.0)
    assert values["tpot_ms_mean"] == same(40 / 9)


@given(st.lists(a_request(), max_size=6), st.floats(1.0, 5000.0), st.floats(1.0, 5000.0))
def test_goodput_counts_who_met_every_limit_and_never_grows_with_another_one(
    records: list[RequestRecord], ttft: float, itl: float
) -> None:
    def goodput(**slo_ms: float) -> float:
        return pass_metrics(records, 1.0, tp=1, slo_ms=slo_ms)[0]["goodput_requests_per_s"]

    done = [r for r in records if r.finish_reason in ("length", "stop")]
    by_ttft = [r for r in done if 1000 * (r.token_times_s[0] - r.arrival_s) <= ttft]
    both = [r for r in by_ttft if all(1000 * gap <= itl for gap in gaps(r))]
    assert goodput(ttft=ttft) == len(by_ttft)
    assert goodput(ttft=ttft, itl=itl) == len(both) <= goodput(itl=itl)


def test_without_limits_there_is_no_goodput_and_without_requests_no_latency() -> None:
    values, _ = pass_metrics([], 1.0, tp=1, slo_ms={})
    assert "goodput_requests_per_s" not in values
    assert not [name for name in values if "_ms_" in name]
    assert values["requests_per_s"] == 0


def test_limits_are_read_by_name() -> None:
    assert parse_slo("ttft=200, itl=50.5") == {"ttft": 200.0, "itl": 50.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpto=1", "did you mean tpot"),
        ("ttft=1,ttft=2", "given twice"),
        ("ttft=-1", "write milliseconds above 0"),
        ("ttft", "write milliseconds above 0"),
        ("ttft=nan", "write milliseconds above 0"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_slo(text)


def test_every_metric_is_defined_with_its_unit_in_its_name() -> None:
    text = definitions()
    suffixes = {"ms": "_ms_", "tokens/s": "tokens_per_s", "requests/s": "requests_per_s"}
    suffixes |= {"s": "_s", "cores": "cores", "%": "percent", "GiB": "gib"}
    for name, metric in METRICS.items():
        assert suffixes[metric.unit] in name
        assert f"{name}, {metric.unit}: {metric.definition}" in text


def test_repeats_are_summed_up_by_median_and_spread_with_the_fewest_samples() -> None:
    repeats = [{"duration_s": 3.0}, {"duration_s": 1.0, "cpu_cores": 2.0}, {"duration_s": 2.0}]
    samples = [{"duration_s": 1}, {"duration_s": 1, "cpu_cores": 4}, {"duration_s": 1}]
    summary = summarise(repeats, samples)
    assert list(summary) == ["duration_s", "cpu_cores"]
    assert summary["duration_s"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "unit": "s",
        "samples": 1,
        "repeats": 3,
    }
    assert (summary["cpu_cores"]["samples"], summary["cpu_cores"]["repeats"]) == (4, 1)
