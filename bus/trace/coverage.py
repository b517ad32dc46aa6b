"""What a step's time was spent on, piece by piece, and how much of it is accounted for.

A step begins when its rank begins to schedule it and ends when the last process has dealt with what came of it. Its
way leads from one process's work to the next one's. What lies between counts as waiting where it is known for what:
a step at the device, ranks whose schedules were to be merged with it, or a process or thread that was at other work
just then. The rest (a frame on its way, a thread being woken, a processor that was busy elsewhere) does not count.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bus.trace.timeline import Merged, Process, Span, Step, Timeline

Lane = tuple[Process, str]
"""A thread of a process: ``core``, and the executor's ``dispatch``."""


class Piece(NamedTuple):
    """A stretch of a step's time. `phase` is what it counts as, `what` says more; not `known` is time unaccounted for.

    Waiting has the phase ``wait``, and `what` then names whom or what for.
    """

    span: Span
    phase: str
    what: str
    known: bool = True


class Coverage(NamedTuple):
    """Of some steps: their number, and seconds; `known` of the `total` are accounted for. `phases` adds up to total."""

    steps: int
    total: float
    known: float
    phases: dict[str, float]

    @property
    def percent(self) -> float:
        """How much is accounted for; 100 if there is no step."""
        return 100 * self.known / self.total if self.total else 100.0


class Pieces:
    """Takes steps to pieces."""

    def __init__(self, timeline: Timeline) -> None:
        self._busy: dict[Lane, tuple[list[float], list[Span]]] = {}
        for process, turns in timeline.turns.items():
            self._add((process, "core"), [turn.span for turn in turns])
        dispatches: dict[Lane, list[Span]] = defaultdict(list)
        for merged in timeline.merged:
            if merged.dispatch is not None:
                dispatches[merged.executor, "dispatch"].append(merged.dispatch)
        for step in timeline.steps.values():
            for frontend, span in step.detokenise:
                dispatches[frontend, "detokenise"].append(span)
        for lane, spans in dispatches.items():
            self._add(lane, sorted(spans))
        self._previous = {
            (after.executor, after.number): before
            for before, after in zip(timeline.merged, timeline.merged[1:], strict=False)
            if before.executor == after.executor
        }

    def _add(self, lane: Lane, spans: list[Span]) -> None:
        self._busy[lane] = ([span.begin for span in spans], spans)

    def of(self, step: Step) -> list[Piece]:
        """The pieces of a step that went all the way, without gaps, in order; an empty list for others."""
        merged = step.merged
        if merged is None or step.held is None or step.update is None:
            return []
        if merged.split is None or merged.device is None or merged.dispatch is None:
            return []
        rank, executor = step.key.rank, merged.executor
        pieces = [Piece(step.schedule, "schedule", f"{step.rows} rows")]
        self._between(pieces, step.held.begin, (executor, "core"))
        _then(pieces, Piece(step.held, "hold", ""))
        pieces += self._held(pieces[-1].span.end, merged)
        _then(pieces, Piece(merged.merge, "merge", f"of {len(merged.parts)} ranks"))
        self._between(pieces, merged.dispatch.begin, (executor, "dispatch"))
        _then(pieces, Piece(merged.dispatch, "dispatch", ""))
        before = self._previous.get((executor, merged.number))
        gap = Span(pieces[-1].span.end, merged.device.begin)
        if before is not None:  # the device takes one step after the other
            _then(pieces, Piece(gap, "wait", f"step {before.number} at the device"))
        else:
            _then(pieces, Piece(gap, "on its way", "to the device", known=False))
        _then(pieces, Piece(merged.device, "device", ""))
        self._between(pieces, merged.split.begin, (executor, "core"))
        _then(pieces, Piece(merged.split, "split", ""))
        self._between(pieces, step.update.begin, (rank, "core"))
        _then(pieces, Piece(step.update, "update", ""))
        for frontend, outputs in step.outputs:
            self._between(pieces, outputs.begin, (frontend, "core"))
            _then(pieces, Piece(outputs, "outputs", str(frontend)))
        for frontend, span in step.detokenise:
            self._between(pieces, span.begin, (frontend, "detokenise"))
            _then(pieces, Piece(span, "detokenise", str(frontend)))
        return pieces

    def _held(self, begin: float, merged: Merged) -> Iterator[Piece]:
        """From when the executor has a schedule until it is merged."""
        end = merged.merge.begin
        found: list[Piece] = []
        last = Piece(Span(begin, begin), "hold", "")
        if merged.full_until > begin:
            until = min(merged.full_until, end)
            last = Piece(Span(begin, until), "wait", f"step {merged.full_of} at the device")
            found.append(last)
        if merged.waited_for and last.span.end < end:
            names = ", ".join(f"rank/{rank}" for rank in merged.waited_for)
            found.append(Piece(Span(last.span.end, end), "wait", names))
        elif last.span.end < end:
            found += self._explained(Span(last.span.end, end), (merged.executor, "core"))
        return iter(found)

    def _between(self, pieces: list[Piece], end: float, lane: Lane) -> None:
        begin = pieces[-1].span.end
        if begin < end:
            pieces += self._explained(Span(begin, end), lane)

    def _explained(self, gap: Span, lane: Lane) -> Iterator[Piece]:
        """A gap before what `lane` does next: waiting for it where it was at other work, unknown where it was not."""
        process, thread = lane
        name = str(process) if thread == "core" else f"{process}, {thread}"
        position = gap.begin
        for busy in self._overlapping(lane, gap):
            if busy.begin > position:
                yield Piece(Span(position, busy.begin), "on its way", f"to {name}", known=False)
            until = min(busy.end, gap.end)
            yield Piece(Span(max(busy.begin, position), until), "wait", name)
            position = until
        if position < gap.end:
            yield Piece(Span(position, gap.end), "on its way", f"to {name}", known=False)

    def _overlapping(self, lane: Lane, gap: Span) -> Iterator[Span]:
        begins, spans = self._busy.get(lane, ([], []))
        position = max(bisect_right(begins, gap.begin) - 1, 0)
        while position < len(spans) and spans[position].begin < gap.end:
            if spans[position].end > gap.begin:
                yield spans[position]
            position += 1


def coverage(steps: Iterable[Sequence[Piece]]) -> Coverage:
    """What all these steps come to; those that have no pieces are left out."""
    count, total, known = 0, 0.0, 0.0
    phases: dict[str, float] = defaultdict(float)
    for pieces in steps:
        if not pieces:
            continue
        count += 1
        for piece in pieces:
            seconds = piece.span.end - piece.span.begin
            total += seconds
            known += seconds if piece.known else 0.0
            phases[piece.phase] += seconds
    return Coverage(count, total, known, dict(phases))


def _then(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece; what of it is past already (work is done while a frame travels) belongs to the pieces before."""
    begin = max(piece.span.begin, pieces[-1].span.end)
    if begin < piece.span.end:
        pieces.append(piece._replace(span=Span(begin, piece.span.end)))
