"""A timeline in the trace event format that Perfetto and Chrome's tracing page open.

Each process of the engine is a process there. Its threads are lanes: what its core handled (``core``), for the
executor ``dispatch`` and ``device``, for a frontend ``detokenise``, and for a rank its steps, piece by piece, in as
many lanes as were in flight at once. Arrows lead along a step from schedule to update. Requests are a process of
their own with a lane each.
"""

from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from bus.trace.coverage import Piece, Pieces
from bus.trace.timeline import Process, Span, Step, StepKey, Timeline

Event = dict[str, Any]

CORE, FIRST_STEP_LANE = 1, 10
OWN_LANES = {"executor": ((2, "dispatch"), (3, "device")), "frontend": ((2, "detokenise"),), "rank": ()}
SORTED = {"frontend": 0, "rank": 1, "executor": 2}
IDLE = frozenset({"drained", "tick"})


def write(timeline: Timeline, file: TextIO) -> int:
    """Write a timeline as one JSON object; returns the number of events."""
    encoder = msgspec.json.Encoder()
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for event in events(timeline):
        file.write((",\n" if count else "") + encoder.encode(event).decode())
        count += 1
    file.write("\n]}\n")
    return count


def events(timeline: Timeline) -> Iterator[Event]:
    """All events: names of processes and lanes first, then what happened, in order of time."""
    maker = _Maker(timeline)
    yield from maker.names()
    yield from sorted(maker.happenings(), key=lambda event: (event["ts"], -event.get("dur", 0.0)))


class _Maker:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        order = sorted(timeline.turns, key=lambda process: (SORTED[process.role], *process))
        self._pids = {process: number for number, process in enumerate(order, 1)}
        self._requests_pid = len(order) + 1
        self._origin = min((turns[0].span.begin for turns in timeline.turns.values() if turns), default=0.0)
        pieces = Pieces(timeline)
        self._pieces = {key: found for key, step in timeline.steps.items() if (found := pieces.of(step))}
        self._lanes, self._lane_counts = self._assign_lanes()

    def _assign_lanes(self) -> tuple[dict[StepKey, int], dict[Process, int]]:
        """The lane of each step, so that none overlaps another; and each rank's number of lanes."""
        lanes: dict[StepKey, int] = {}
        free_at: dict[Process, list[float]] = {}
        for key, pieces in sorted(self._pieces.items(), key=lambda item: item[1][0].span.begin):
            ends = free_at.setdefault(key.rank, [])
            begin, end = pieces[0].span.begin, pieces[-1].span.end
            lane = next((lane for lane, free in enumerate(ends) if free <= begin), len(ends))
            ends[lane : lane + 1] = [end]
            lanes[key] = lane
        return lanes, {process: len(ends) for process, ends in free_at.items()}

    def names(self) -> Iterator[Event]:
        for process, pid in self._pids.items():
            yield from _named(pid, f"{process}, incarnation {process.incarnation}")
            lanes = [(CORE, "core"), *OWN_LANES[process.role]]
            lanes += [(FIRST_STEP_LANE + n, f"steps {n + 1}") for n in range(self._lane_counts.get(process, 0))]
            for tid, name in lanes:
                yield from _named(pid, name, tid)
        if self._timeline.requests:
            yield from _named(self._requests_pid, "requests")
            for tid, name in enumerate(self._timeline.requests, 1):
                yield from _named(self._requests_pid, name, tid)

    def happenings(self) -> Iterator[Event]:
        for process, turns in self._timeline.turns.items():
            for turn in turns:
                if turn.name not in IDLE:
                    yield self._slice(process, CORE, turn.span, turn.name, "core", {"about": turn.about})
        for merged in self._timeline.merged:
            about = {"step": merged.number}
            if merged.dispatch is not None and merged.device is not None:
                yield self._slice(merged.executor, 2, merged.dispatch, "dispatch", "device", about)
                yield self._slice(merged.executor, 3, merged.device, "device", "device", about)
        for flow, (key, step) in enumerate(self._timeline.steps.items(), 1):
            for frontend, span in step.detokenise:
                yield self._slice(frontend, 2, span, "detokenise", "detokenise", {"step": str(key.number)})
            pieces = self._pieces.get(key)
            if pieces:
                yield from self._step(step, pieces)
                yield from self._arrows(flow, step)
        yield from self._request_lanes()

    def _step(self, step: Step, pieces: list[Piece]) -> Iterator[Event]:
        rank, lane = step.key.rank, FIRST_STEP_LANE + self._lanes[step.key]
        whole = Span(pieces[0].span.begin, pieces[-1].span.end)
        assert step.merged is not None
        about = {"rows": step.rows, "merged step": step.merged.number}
        yield self._slice(rank, lane, whole, f"step {step.key.number}", "step", about)
        for piece in pieces:
            name = f"wait for {piece.what}" if piece.phase == "wait" else piece.phase
            yield self._slice(rank, lane, piece.span, name, "step", {"what": piece.what, "accounted for": piece.known})

    def _arrows(self, flow: int, step: Step) -> Iterator[Event]:
        """From the rank's schedule over merge, device and split to its update, and on to the frontends.

        A step that stood begins with its merge.
        """
        merged = step.merged
        assert merged is not None
        assert merged.device is not None
        assert merged.split is not None
        assert step.update is not None
        places = [
            *([] if step.stood else [(step.key.rank, CORE, step.schedule)]),
            (merged.executor, CORE, merged.merge),
            (merged.executor, 3, merged.device),
            (merged.executor, CORE, merged.split),
            (step.key.rank, CORE, step.update),
            *((frontend, CORE, span) for frontend, span in step.outputs),
        ]
        name, at = f"step {step.key.number} of {step.key.rank}", 0.0
        for place, (process, tid, span) in enumerate(places):
            phase = "s" if place == 0 else "f" if place == len(places) - 1 else "t"
            at = max(at, self._us(span.begin))
            event = {"ph": phase, "id": flow, "name": name, "cat": "flow", "pid": self._pids[process], "tid": tid}
            yield event | {"ts": at} | ({"bp": "e"} if phase == "f" else {})

    def _request_lanes(self) -> Iterator[Event]:
        for tid, (name, moments) in enumerate(self._timeline.requests.items(), 1):
            kinds = {moment.step: moment.kind for moment in moments if moment.step is not None}
            arrived = [moment.at for moment in moments if moment.kind == "arrived"]
            position = arrived[0] if arrived else None
            ran = [key for key in self._pieces if name in self._timeline.members.get(key, ())]
            for key in sorted(ran, key=lambda key: self._ends(key).begin):
                span = self._ends(key)
                begin = span.begin if position is None else max(span.begin, position)
                if position is not None and position < span.begin:
                    why = {"entered": "waiting", "resumed": "preempted"}.get(kinds.get(key, ""), "not scheduled")
                    yield self._request(tid, Span(position, span.begin), why, {})
                if begin < span.end:
                    about = {"step": key.number, "rank": key.rank.number}
                    yield self._request(tid, Span(begin, span.end), f"step {key.number} of {key.rank}", about)
                    position = span.end

    def _ends(self, key: StepKey) -> Span:
        """From the rank's schedule to its update."""
        step = self._timeline.steps[key]
        assert step.update is not None
        return Span(step.schedule.begin, step.update.end)

    def _request(self, tid: int, span: Span, name: str, about: dict[str, Any]) -> Event:
        return self._event(self._requests_pid, tid, span, name, "request", about)

    def _slice(self, process: Process, tid: int, span: Span, name: str, category: str, about: dict[str, Any]) -> Event:
        return self._event(self._pids[process], tid, span, name, category, about)

    def _event(self, pid: int, tid: int, span: Span, name: str, category: str, about: dict[str, Any]) -> Event:
        begin = self._us(span.begin)
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": begin,
            "dur": max(round(self._us(span.end) - begin, 3), 0.0),
            "args": about,
        }

    def _us(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 3)


def _named(pid: int, name: str, tid: int = 0) -> Iterator[Event]:
    kind = "thread" if tid else "process"
    event = {"ph": "M", "pid": pid, "tid": tid, "ts": 0.0, "cat": "__metadata"}
    yield event | {"name": f"{kind}_name", "args": {"name": name}}
    yield event | {"name": f"{kind}_sort_index", "args": {"sort_index": tid or pid}}
