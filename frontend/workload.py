"""What requests a frontend's journal has, when they came, and how fast they were answered; and sending them again."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from bus.buses import BUSES
from bus.core import Effect, Event, Peer, PeerDown, PeerUp, Received, Send, Stop, WakeAt
from bus.journal.blocks import Damaged
from bus.journal.reader import Journal
from bus.journal.records import EffectRecord, Turn
from bus.messages import (
    Abort,
    Append,
    Delta,
    Embed,
    Embedding,
    EndTurn,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Message,
    Sampling,
    TokenDeltas,
    TurnFinished,
)
from bus.wire import unpack_ints
from frontend.seam import AbortCall, AddCall, Deliver, TextRendered

Request = Generate | Embed | Append | EndTurn | Abort


class Arrival(NamedTuple):
    """A message of a client. `at` is in seconds from the first one; its request id is unique in the workload."""

    at: float
    message: Request


class Latencies:
    """Times of requests as seen at one place, in seconds.

    `first` has the times from asking (a request, or a session's next turn) to the first token, `between` those from
    one arrival of tokens of a sequence to the next, `total` those to the end, of requests that ended by themselves.
    """

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []
        self.total: list[float] = []
        self.asked_for = 0
        self.tokens = 0
        self.ends: Counter[str] = Counter()
        """Ends by their reason; failures by their code."""
        self._asked: dict[Hashable, float] = {}
        self._children: dict[Hashable, int] = {}
        self._answered: set[Hashable] = set()
        self._last: dict[tuple[Hashable, int], float] = {}

    @property
    def unanswered(self) -> int:
        """Requests that have not ended."""
        return len(self._children)

    def asked(self, key: Hashable, at: float, children: int | None = None) -> None:
        """A request comes with as many `children`, or, without, a session's next turn."""
        if children is not None:
            self._children[key] = children
            self.asked_for += 1
        self._asked[key] = at
        self._answered.discard(key)
        for index in range(self._children.get(key, 0)):
            self._last.pop((key, index), None)

    def got(self, key: Hashable, index: int, at: float, count: int) -> None:
        """`count` tokens of child `index` have come."""
        if key not in self._children or not count:
            return
        self.tokens += count
        if key not in self._answered:
            self._answered.add(key)
            self.first.append(at - self._asked[key])
        last = self._last.get((key, index))
        if last is not None:
            self.between.append(at - last)
        self._last[key, index] = at

    def ended(self, key: Hashable, at: float, reason: str, *, turn: bool = False, whole: bool = False) -> None:
        """A child has ended, or only a `turn` of a session, or the `whole` request."""
        if key not in self._children:
            return
        if not turn:
            self._children[key] -= 1
            if self._children[key] > 0 and not whole:
                return
            del self._children[key]
            self.ends[reason] += 1
        if reason in ("stop", "length"):
            self.total.append(at - self._asked[key])

    def heard(
        self, message: Message, at: float, key_of: Callable[[str], Hashable] = lambda request_id: request_id
    ) -> None:
        """Take a message to a client."""
        if isinstance(message, TokenDeltas):
            count = len(message.request_ids)
            counts = unpack_ints(message.counts).tolist() if message.counts.nbytes else [1] * count
            indices = unpack_ints(message.indices).tolist() if message.indices.nbytes else [0] * count
            for request_id, index, tokens in zip(message.request_ids, indices, counts, strict=True):
                self.got(key_of(request_id), index, at, tokens)
            for finished in message.finished:
                self.heard(finished, at, key_of)
        elif isinstance(message, Delta):
            self.got(key_of(message.request_id), message.index, at, message.token_ids.nbytes // 4)
        elif isinstance(message, Embedding):
            self.ended(key_of(message.request_id), at, "stop")
        elif isinstance(message, Finished):
            self.ended(key_of(message.request_id), at, message.reason)
        elif isinstance(message, TurnFinished):
            self.ended(key_of(message.request_id), at, message.reason, turn=True)
        elif isinstance(message, Error) and message.request_id and not message.turn:  # a session goes on without one
            self.ended(key_of(message.request_id), at, message.code, whole=True)


class Workload(NamedTuple):
    """All requests of one or more frontends, in the order in which they came, and how they were answered."""

    arrivals: list[Arrival]
    recorded: Latencies
    damage: list[tuple[str, Damaged]]


def read(journals: Iterable[Journal]) -> Workload:
    """The workload of frontends' journals: what crossed their cores, so all tokenised, and without detokenising.

    Raises:
        JournalError: a journal has no header.
    """
    found = _Reading()
    for number, journal in enumerate(journals):
        apart = (header := journal.header()).wall - header.monotonic
        for record in journal.records():
            if isinstance(record, Damaged):
                found.damage.append((journal.name, record))
            elif record.turn.kind != "state":
                found.turn(number, record.turn, record.turn.at + apart)
    arrivals = sorted(found.arrivals, key=lambda arrival: arrival.at)
    begun = arrivals[0].at if arrivals else 0.0
    return Workload([one._replace(at=one.at - begun) for one in arrivals], found.recorded, found.damage)


_SENT = msgspec.msgpack.Decoder(BUSES["client"].down)
_CAME = msgspec.msgpack.Decoder(BUSES["client"].up)
_BODY = msgspec.msgpack.Decoder(bytes)
_CALLS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (AddCall, AbortCall, TextRendered)
}
_DELIVER = msgspec.msgpack.Decoder(Deliver)


class _Reading:
    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.recorded = Latencies()
        self.damage: list[tuple[str, Damaged]] = []
        self._names: dict[tuple[Any, ...], str] = {}

    def turn(self, frontend: int, turn: Turn, at: float) -> None:
        """An event of a frontend's core, and what it answered."""
        if turn.kind == "received" and isinstance(turn.subject, Peer) and turn.subject.bus == "client":
            if not any(effect.subject == "RenderText" for effect in turn.effects):  # tokenised, it comes as a call
                self._message((frontend, turn.subject), _CAME.decode(_BODY.decode(turn.data)), at)
        elif turn.subject in _CALLS:
            self._call(frontend, _CALLS[str(turn.subject)].decode(turn.data), at)
        for effect in turn.effects:
            self._effect(frontend, effect, at + turn.took)

    def _message(self, sender: tuple[int, Peer], message: Message, at: float) -> None:
        if isinstance(message, Generate | Embed):
            name = self._names[(*sender, message.request_id)] = f"{len(self._names)}"
            self.recorded.asked(name, at, message.num_sequences)
        elif isinstance(message, Append | EndTurn | Abort):
            known = self._names.get((*sender, message.request_id))
            if known is None:
                return
            name = known
            if isinstance(message, Append) and message.resumable:
                self.recorded.asked(name, at)
        else:
            return
        self.arrivals.append(Arrival(at, msgspec.structs.replace(message, request_id=name)))

    def _call(self, frontend: int, call: AddCall | AbortCall | TextRendered, at: float) -> None:
        if isinstance(call, TextRendered):
            self._message((frontend, call.peer), call.request, at)
            return
        if isinstance(call, AbortCall):
            names = [self._names.get((frontend, None, request_id)) for request_id in call.request_ids]
            self.arrivals += [Arrival(at, Abort(request_id=name)) for name in names if name is not None]
            return
        name = self._names[frontend, None, call.request_id] = f"{len(self._names)}"
        self.recorded.asked(name, at, 1)
        common: dict[str, Any] = {
            "request_id": name,
            "prompt_token_ids": call.prompt_token_ids,
            "priority": call.priority,
            "cache_salt": call.cache_salt,
            "rank": call.rank,
            "adapter": call.adapter,
        }
        if (pooling := call.sampling.pooling) is not None:
            request: Request = Embed(**common, pooling=pooling.kind, normalize=pooling.normalize)
        else:
            request = Generate(**common, params=params_of(call.sampling), text_output=False)
        self.arrivals.append(Arrival(at, request))

    def _effect(self, frontend: int, effect: EffectRecord, at: float) -> None:
        if isinstance(effect.subject, Peer):
            if effect.subject.bus == "client":
                sender = (frontend, effect.subject)
                message = _SENT.decode(_BODY.decode(effect.data))
                self.recorded.heard(message, at, lambda request_id: self._names.get((*sender, request_id)))
        elif effect.subject == "Deliver":
            for delivery in _DELIVER.decode(effect.data).outputs:
                name = self._names.get((frontend, None, delivery.request_id))
                self.recorded.got(name, 0, at, delivery.token_ids.nbytes // 4)
                if delivery.ended is not None:
                    self.recorded.ended(name, at, delivery.ended.code or delivery.ended.reason)


def params_of(sampling: Sampling) -> GenerateParams:
    """What a client writes to get this sampling; forbidden sequences of tokens (from `bad_words`) are left out."""
    own = {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name in _PARAMETERS}
    return GenerateParams(**own, ignore_eos=sampling.eos_token_id is None)


_PARAMETERS = frozenset(GenerateParams.__struct_fields__) & frozenset(Sampling.__struct_fields__)


class LoadCore:
    """A client's state machine (see `bus.core.Core`) that sends a workload at its times, and listens.

    It ends when all requests have ended, when no frontend is there for `connect_s`, or when nothing was heard for
    `patience_s` after the last request was sent.
    """

    def __init__(
        self, arrivals: list[Arrival], speed: float, clock: Callable[[], float], connect_s: float, patience_s: float
    ) -> None:
        """`speed` 2 is twice as fast as it was; `clock` gives monotonic seconds."""
        self.latencies = Latencies()
        self.behind_s = 0.0
        """The longest that a message was sent after its time."""
        self.begun: float | None = None
        self.last_heard = 0.0
        self._arrivals = [arrival._replace(at=arrival.at / speed) for arrival in arrivals]
        self._sent = 0
        self._clock = clock
        self._connect_until = clock() + connect_s
        self._patience_s = patience_s
        self._peer: Peer | None = None

    def handle(self, event: Event) -> Iterable[Effect]:
        """Take the next event; return what is to be done, in order."""
        now = self._clock()
        if isinstance(event, PeerUp):
            self._peer = event.peer
            self.begun = self.last_heard = now
        elif isinstance(event, PeerDown):
            return [Stop(f"the frontend was lost: {event.reason}")]
        elif isinstance(event, Received):
            self.last_heard = now
            self.latencies.heard(event.message, now)
        elif self.begun is not None:
            return list(self._due(now - self.begun, now))
        elif now > self._connect_until:
            return [Stop("no frontend answers")]
        return []

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return self.last_heard - self.begun if self.begun is not None else 0.0

    def _due(self, since: float, now: float) -> Iterator[Effect]:
        assert self._peer is not None
        while self._sent < len(self._arrivals) and self._arrivals[self._sent].at <= since:
            at, message = self._arrivals[self._sent]
            self._sent += 1
            self.behind_s = max(self.behind_s, since - at)
            self.last_heard = now
            if isinstance(message, Generate | Embed):
                self.latencies.asked(message.request_id, now, message.num_sequences)
            elif isinstance(message, Append) and message.resumable:
                self.latencies.asked(message.request_id, now)
            yield Send(self._peer, message)
        if self._sent < len(self._arrivals):
            assert self.begun is not None
            yield WakeAt(self.begun + self._arrivals[self._sent].at)
        elif not self.latencies.unanswered:
            yield Stop("all requests have ended")
        elif now - self.last_heard > self._patience_s:
            yield Stop(f"nothing was heard for {self._patience_s:g} s")
