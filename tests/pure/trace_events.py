"""The rules of the trace-event format, as far as the timeline's trace.json relies on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

# What an event of a phase has beside "ph", "name", "pid" and "tid"
FIELDS = {
    "M": {"args"},
    "X": {"cat", "ts", "dur", "args"},
    "i": {"cat", "ts", "s", "args"},
    "s": {"cat", "ts", "id"},
    "f": {"cat", "ts", "id", "bp"},
}
Event = dict[str, Any]


def check_format(text: str) -> list[Event]:
    """Return the events of a trace file, which keeps every rule of the format that we rely on."""
    whole = json.loads(text)
    assert set(whole) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = whole["traceEvents"]
    for event in events:
        assert set(event) == {"ph", "name", "pid", "tid"} | FIELDS[event["ph"]]
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        assert isinstance(event["name"], str)
        for key in ("ts", "dur"):
            assert event.get(key, 0) >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} == named
    assert {pid for pid, _ in named} == processes
    for thread in named:
        check_thread([e for e in spans if (e["pid"], e["tid"]) == thread])
    check_flows(events, spans)
    return events


def ns(us: float) -> int:
    """Return whole nanoseconds: a microsecond has three digits behind its point."""
    assert abs(us * 1000 - round(us * 1000)) < 1e-3
    return round(us * 1000)


def check_thread(spans: Iterable[Event]) -> None:
    """The spans of a thread are one after the other, or one in the other."""
    ends: list[int] = []
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        begin = ns(event["ts"])
        end = begin + ns(event["dur"])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)


def check_flows(events: list[Event], spans: list[Event]) -> None:
    """Each arrow has one begin and one end, in this order, both strictly inside a span."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e for e in events if e["ph"] == "f"}
    assert Counter(e["ph"] for e in events if "id" in e) == {
        "s": len(starts),
        "f": len(finishes),
    }
    assert starts.keys() == finishes.keys()
    assert {event["bp"] for event in finishes.values()} == {"e"}
    by_thread: dict[tuple[int, int], list[Event]] = {}
    for span in spans:
        by_thread.setdefault((span["pid"], span["tid"]), []).append(span)
    for number, start in starts.items():
        finish = finishes[number]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            assert any(
                ns(span["ts"]) < ns(end["ts"]) < ns(span["ts"]) + ns(span["dur"])
                for span in by_thread[end["pid"], end["tid"]]
            )
