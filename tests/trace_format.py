"""What Perfetto and Chrome ask of a trace in the trace event format (JSON), as far as this project's traces use it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

COMMON = {"ph": str, "name": str, "pid": int, "tid": int, "ts": float}
BY_PHASE = {"X": {"dur": float, "cat": str}, "M": {"args": dict}, "s": {"id": int}, "t": {"id": int}, "f": {"id": int}}
ROUNDING = 0.002
"""Times are written with three digits after the point, in µs."""


def check(path: Path) -> list[Event]:
    """The events of a trace file; fails where the format is broken."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert event["ph"] in BY_PHASE, event
        for key, kind in (COMMON | BY_PHASE[event["ph"]]).items():
            assert isinstance(event[key], kind), (key, event)
        assert event["ts"] >= 0
        assert event.get("dur", 0.0) >= 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    _check_names(events)
    _check_nesting(events)
    _check_flows(events)
    return events


def slices(events: list[Event], lane: str = "") -> list[Event]:
    """All slices, or those in lanes (threads) with this name."""
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [event for event in events if event["ph"] == "X" and lane in ("", names[event["pid"], event["tid"]])]


def _check_names(events: list[Event]) -> None:
    """Every process and thread that something happens in has a name, and one only."""
    named = [
        (event["pid"], event["tid"] if event["name"] == "thread_name" else None)
        for event in events
        if event["name"] in ("process_name", "thread_name")
    ]
    assert len(set(named)) == len(named)
    for event in events:
        if event["ph"] != "M":
            assert {(event["pid"], None), (event["pid"], event["tid"])} <= set(named), event


def _check_nesting(events: list[Event]) -> None:
    """On one thread, slices lie beside or within each other."""
    open_until: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            ends = open_until[event["pid"], event["tid"]]
            while ends and ends[-1] <= event["ts"] + ROUNDING:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + ROUNDING, f"overlaps what is open until {ends[-1]}: {event}"
            ends.append(end)


def _check_flows(events: list[Event]) -> None:
    """Each arrow begins once, ends once, moves forward in time, and is in a slice at every place."""
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    on_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            on_thread[event["pid"], event["tid"]].append(event)
    for places in flows.values():
        phases = "".join(event["ph"] for event in places)
        assert phases == "s" + "t" * (len(places) - 2) + "f", phases
        assert len({event["name"] for event in places}) == 1
        for event in places:
            assert any(
                one["ts"] - ROUNDING <= event["ts"] <= one["ts"] + one["dur"] + ROUNDING
                for one in on_thread[event["pid"], event["tid"]]
            ), event
