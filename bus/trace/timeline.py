"""From the journals of a run to spans of time: what each process did when, and the way of each step through them.

Times are seconds on one clock: the monotonic one where all processes ran on one machine, else the wall clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bus.core import Peer
from bus.journal.blocks import Damaged
from bus.journal.reader import Journal
from bus.journal.records import EffectRecord, Header, Turn

SAME_CLOCK_S = 1.0
"""Processes whose wall and monotonic clocks are this equally far apart ran on one machine, since it was started."""


class Process(NamedTuple):
    """One start of a process."""

    role: str
    number: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}/{self.number}"


class Span(NamedTuple):
    """Something that began and ended."""

    begin: float
    end: float


class StepKey(NamedTuple):
    """A step as its rank counts it."""

    rank: Process
    number: int


@dataclass(slots=True)
class Merged:
    """A step of the device. `full_until` is when the last step before it that left no room was finished."""

    executor: Process
    number: int
    merge: Span
    parts: list[StepKey]
    waited_for: list[int]
    full_until: float = float("-inf")
    full_of: int = 0
    dispatch: Span | None = None
    device: Span | None = None
    split: Span | None = None


@dataclass(slots=True)
class Step:
    """A rank's step. Spans of the rank, the executor and the frontends, as far as their journals tell of them.

    One that stood was said ahead of time: it begins, with `schedule` and `held`, when it is merged.
    """

    key: StepKey
    rows: int
    schedule: Span
    stood: bool = False
    held: Span | None = None
    merged: Merged | None = None
    update: Span | None = None
    outputs: list[tuple[Process, Span]] = field(default_factory=list)
    detokenise: list[tuple[Process, Span]] = field(default_factory=list)


class Happening(NamedTuple):
    """An event that a process handled, and what it was."""

    span: Span
    name: str
    about: str


class Moment(NamedTuple):
    """A change in a request's life. `kind` is arrived, entered or resumed (a row); `step` where it is of one."""

    at: float
    kind: str
    step: StepKey | None


@dataclass(slots=True)
class Timeline:
    """All of a run. `turns` has what each process handled, idle events too, in order."""

    turns: dict[Process, list[Happening]] = field(default_factory=dict)
    steps: dict[StepKey, Step] = field(default_factory=dict)
    merged: list[Merged] = field(default_factory=list)
    requests: dict[str, list[Moment]] = field(default_factory=dict)
    """For each request that was asked for, what happened to it, in order of time."""
    members: dict[StepKey, list[str]] = field(default_factory=dict)
    """Of the requests that were asked for, those that ran in a step."""
    damage: list[tuple[str, Damaged]] = field(default_factory=list)


class _Setup(msgspec.Struct):
    row: int
    request_id: str


class _Added(msgspec.Struct):
    request_id: str


class _Frame(msgspec.Struct):
    """Of any message, what is looked at here. Arrays are int32."""

    type: str
    step: int | None = None
    rows: bytes = b""
    again: bool = False
    handles: bytes = b""
    new: list[_Setup] = []
    resumed: list[_Setup] = []
    requests: list[_Added] = []
    request_id: str = ""
    first_step: int = 0
    num_steps: int = 0
    next_step: int | None = None


class _Run(msgspec.Struct):
    number: int
    parts: list[tuple[int, int]] = []
    waited_for: list[int] = []


class _Done(msgspec.Struct):
    number: int
    device_s: float
    dispatch_at: float = 0.0
    dispatch_s: float = 0.0
    done_at: float = 0.0


class _Detokenised(msgspec.Struct):
    rank: int
    step: int
    begun: float
    seconds: float


_FRAME = msgspec.msgpack.Decoder(_Frame)
_BODY = msgspec.msgpack.Decoder(memoryview)
_RUN = msgspec.msgpack.Decoder(_Run)
_DONE = msgspec.msgpack.Decoder(_Done)
_DETOKENISED = msgspec.msgpack.Decoder(_Detokenised)


def read(
    journals: Iterable[Journal], requests: Iterable[str] = (), since: float = 0.0, until: float = 1e18
) -> Timeline:
    """The timeline of a run, with what happened to `requests`. Only events in [since, until) (wall clock) are read.

    Raises:
        JournalError: a journal has no header.
    """
    timeline = Timeline(requests={name: [] for name in requests})
    given = [(journal, journal.header()) for journal in journals]
    apart = [header.wall - header.monotonic for _, header in given]
    shift = max(apart) - min(apart) > SAME_CLOCK_S if apart else False
    order = {"rank": 0, "executor": 1, "frontend": 2}  # each finds the steps that those before it have begun
    for journal, header in sorted(given, key=lambda one: order[one[1].role]):
        process = Process(header.role, header.index, header.incarnation)
        turns = _turns(journal, timeline, since, until)
        read_one = {"rank": _Rank, "executor": _Executor, "frontend": _Frontend}[header.role]
        reader = read_one(timeline, process, header, header.wall - header.monotonic if shift else 0.0)
        told = timeline.turns[process] = []
        for turn in turns:
            begin = turn.at + reader.shift
            span = Span(begin, begin + turn.took)
            told.append(Happening(span, *reader.take(turn, span)))
    for moments in timeline.requests.values():
        moments.sort()
    return timeline


def _turns(journal: Journal, timeline: Timeline, since: float, until: float) -> Iterator[Turn]:
    for record in journal.records():
        if isinstance(record, Damaged):
            timeline.damage.append((journal.name, record))
        elif since <= record.turn.wall < until and record.turn.kind != "state":
            yield record.turn


def _frame(data: msgspec.Raw) -> _Frame:
    return _FRAME.decode(_BODY.decode(data))


def _process(peer: Peer) -> Process:
    return Process(peer.role, peer.index, peer.incarnation)


class _Reader:
    """Takes the turns of one process. Its name for a turn is that of the phase of a step where it is one."""

    def __init__(self, timeline: Timeline, process: Process, header: Header, shift: float) -> None:
        self.shift = shift
        self._timeline = timeline
        self._process = process
        self._header = header

    def take(self, turn: Turn, span: Span) -> tuple[str, str]:
        """Find what there is to know in a turn; return its name, and what it is about."""
        names, about = [], []
        for effect in turn.effects:
            name = self._effect(effect, span)
            if name:
                names.append(name[0])
                about.append(name[1])
        event = self._event(turn, span)
        if names and turn.kind in ("drained", "tick"):
            return names[0], ", ".join(about)
        return event

    def _event(self, turn: Turn, span: Span) -> tuple[str, str]:
        if turn.kind == "received":
            assert isinstance(turn.subject, Peer)
            return self._received(_process(turn.subject), _frame(turn.data), span)
        if turn.kind == "posted":
            assert isinstance(turn.subject, str)
            return self._posted(turn.subject, turn.data, span)
        if isinstance(turn.subject, Peer):
            return f"peer {turn.kind}", str(turn.subject)
        return turn.kind, ""

    def _effect(self, effect: EffectRecord, span: Span) -> tuple[str, str] | None:
        return None

    def _received(self, peer: Process, frame: _Frame, span: Span) -> tuple[str, str]:
        return frame.type, f"from {peer}"

    def _posted(self, kind: str, data: msgspec.Raw, span: Span) -> tuple[str, str]:
        return kind, ""


class _Rank(_Reader):
    def __init__(self, timeline: Timeline, process: Process, header: Header, shift: float) -> None:
        super().__init__(timeline, process, header, shift)
        self._rows: dict[int, str] = {}
        self._last = b""
        """The rows of the last schedule, which may run again."""
        self._newest = -1
        """The last step that stood."""

    def _effect(self, effect: EffectRecord, span: Span) -> tuple[str, str] | None:
        if not isinstance(effect.subject, Peer) or effect.subject.role != "executor":
            return None
        frame = _frame(effect.data)
        if frame.type == "StandingSchedule":
            return self._let_stand(frame, span)
        if frame.type != "PartialSchedule" or frame.step is None:
            return None
        key = StepKey(self._process, frame.step)
        self._last = self._last if frame.again else frame.rows
        self._timeline.steps[key] = Step(key, len(self._last) // 4, span)
        if self._timeline.requests:
            self._follow(key, frame, span)
        return "schedule", f"step {frame.step}"

    def _let_stand(self, frame: _Frame, span: Span) -> tuple[str, str]:
        self._newest = frame.first_step + frame.num_steps - 1
        for number in range(frame.first_step, self._newest + 1):
            key = StepKey(self._process, number)
            self._timeline.steps[key] = Step(key, len(self._last) // 4, span, stood=True)
            if self._timeline.requests:
                self._follow(key, frame, span)
        return "schedule", f"steps {frame.first_step} to {self._newest}"

    def _received(self, peer: Process, frame: _Frame, span: Span) -> tuple[str, str]:
        if frame.next_step is not None:  # what stood from there on is void
            for number in range(frame.next_step, self._newest + 1):
                self._timeline.steps.pop(StepKey(self._process, number), None)
        if frame.type == "StepResult" and frame.step is not None:
            step = self._timeline.steps.get(StepKey(self._process, frame.step))
            if step is not None:
                step.update = span
            return "update", f"step {frame.step}"
        if frame.type == "AddRequest":
            self._moment(frame.request_id, Moment(span.begin, "arrived", None))
        for request in frame.requests:
            self._moment(request.request_id, Moment(span.begin, "arrived", None))
        return frame.type, f"from {peer}"

    def _follow(self, key: StepKey, frame: _Frame, span: Span) -> None:
        for kind, setups in (("entered", frame.new), ("resumed", frame.resumed)):
            for setup in setups:
                self._rows[setup.row] = setup.request_id
                self._moment(setup.request_id, Moment(span.begin, kind, key))
        rows = memoryview(self._last).cast("i")
        members = [name for row in rows if (name := self._asked_for(self._rows.get(row, ""))) is not None]
        if members:
            self._timeline.members[key] = members

    def _moment(self, request_id: str, moment: Moment) -> None:
        name = self._asked_for(request_id)
        if name is not None:
            self._timeline.requests[name].append(moment)

    def _asked_for(self, request_id: str) -> str | None:
        """The name under which a request was asked for: its own, or what the HTTP side made its id of."""
        for name in self._timeline.requests:
            if request_id == name or request_id.startswith((f"{name}/", f"{name}-")):
                return name
        return None


class _Executor(_Reader):
    def __init__(self, timeline: Timeline, process: Process, header: Header, shift: float) -> None:
        super().__init__(timeline, process, header, shift)
        self._depth = int(header.config.get("async_depth", 1))
        self._ranks: dict[int, Process] = {}
        self._steps: dict[int, Merged] = {}
        self._at_device: deque[int] = deque()
        self._full = (float("-inf"), 0)
        """When a step last made room at the device that had none, and its number."""

    def _received(self, peer: Process, frame: _Frame, span: Span) -> tuple[str, str]:
        if frame.type == "PartialSchedule" and frame.step is not None:
            self._ranks[peer.number] = peer
            step = self._timeline.steps.get(StepKey(peer, frame.step))
            if step is not None:
                step.held = span
            return "hold", f"step {frame.step} of {peer}"
        if frame.type == "StandingSchedule":
            self._ranks[peer.number] = peer
        return super()._received(peer, frame, span)

    def _effect(self, effect: EffectRecord, span: Span) -> tuple[str, str] | None:
        if effect.subject != "RunStep":
            return None
        run = _RUN.decode(effect.data)
        parts = [StepKey(self._ranks[rank], step) for rank, step in run.parts if rank in self._ranks]
        merged = Merged(self._process, run.number, span, parts, run.waited_for, *self._full)
        self._steps[run.number] = merged
        self._at_device.append(run.number)
        self._timeline.merged.append(merged)
        for key in parts:
            if (step := self._timeline.steps.get(key)) is not None:
                step.merged = merged
                if step.stood:
                    step.schedule = step.held = Span(span.begin, span.begin)
        return "merge", f"step {run.number}"

    def _posted(self, kind: str, data: msgspec.Raw, span: Span) -> tuple[str, str]:
        if kind != "StepDone":
            return super()._posted(kind, data, span)
        done = _DONE.decode(data)
        if len(self._at_device) >= self._depth:
            self._full = span.end, done.number
        if self._at_device:
            self._at_device.popleft()
        merged = self._steps.pop(done.number, None)
        if merged is not None:
            merged.split = span
            if done.done_at:
                end = done.done_at + self.shift
                begin = done.dispatch_at + self.shift
                merged.device = Span(end - done.device_s, end)
                merged.dispatch = Span(begin, begin + done.dispatch_s)
        return "split", f"step {done.number}"


class _Frontend(_Reader):
    def __init__(self, timeline: Timeline, process: Process, header: Header, shift: float) -> None:
        super().__init__(timeline, process, header, shift)
        self._ranks: dict[int, Process] = {}

    def _received(self, peer: Process, frame: _Frame, span: Span) -> tuple[str, str]:
        if frame.type == "Outputs" and frame.handles:
            self._ranks[peer.number] = peer
            step = self._timeline.steps.get(StepKey(peer, frame.step or 0))
            if step is not None:
                step.outputs.append((self._process, span))
            return "outputs", f"step {frame.step or 0} of {peer}"
        return super()._received(peer, frame, span)

    def _posted(self, kind: str, data: msgspec.Raw, span: Span) -> tuple[str, str]:
        if kind == "Detokenised":
            told = _DETOKENISED.decode(data)
            rank = self._ranks.get(told.rank)
            step = self._timeline.steps.get(StepKey(rank, told.step)) if rank is not None else None
            if step is not None:
                begin = told.begun + self.shift
                step.detokenise.append((self._process, Span(begin, begin + told.seconds)))
        return super()._posted(kind, data, span)
