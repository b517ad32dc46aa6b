"""Who is there: handshake, incarnations, liveness. Pure: frames and time go in, events and frames to send come out.

A `Listener` is the binding (ROUTER) side of a bus, a `Dialer` the connecting (DEALER) side. Either turns the frames of
its socket into events for the core, and drops what is not from and for the present incarnations.
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bus.buses import SCHEMA, Bus
from bus.core import Event, Peer, PeerDown, PeerUp, Received
from bus.counters import Counters
from bus.log import get_logger
from bus.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Role,
    Welcome,
)
from bus.wire import ENVELOPE, Codec, Frame, InvalidFrame, error_for, routing_id

log = get_logger()


class Identity(msgspec.Struct, frozen=True):
    """What this process tells its peers about itself in Hello and Welcome."""

    role: Role
    index: int
    incarnation: int


_LINK_MESSAGES = frozenset((Hello, Welcome, Heartbeat, Goodbye, Error))
"""What a link looks at itself. `Error` among them for ``no_hello``."""


class Timing(NamedTuple):
    """Heartbeat settings, in seconds."""

    interval: float
    timeout: float


@dataclass(slots=True)
class _Link:
    """A peer that is up. `theirs` and `ours` are the envelopes of frames from it and to it."""

    peer: Peer
    routing_id: bytes
    attempt: int
    last_received: float
    last_sent: float
    theirs: bytes
    ours: bytes


class _Side:
    """What both sides of a bus share: decoding with counts, and the frames waiting to be sent."""

    def __init__(self, bus: Bus, me: Identity, codec: Codec, counters: Counters, timing: Timing) -> None:
        self.bus = bus
        self._me = me
        self._codec = codec
        self._counters = counters
        self._timing = timing
        # Counted here first: names are looked up ten times a second, not for every frame.
        self._received_frames = self._received_bytes = self._sent_frames = self._sent_bytes = 0

    def _link_to(self, peer: Peer, routing_id: bytes, attempt: int, now: float) -> _Link:
        theirs = ENVELOPE.pack(peer.incarnation, self._me.incarnation)
        ours = ENVELOPE.pack(self._me.incarnation, peer.incarnation)
        return _Link(peer, routing_id, attempt, now, now, theirs, ours)

    def _take(self, link: _Link, envelope: bytes, body: bytes, now: float) -> list[Event] | None:
        """The event in a message of a peer that is up; None if it is not an ordinary one, and has to be looked at."""
        if envelope != link.theirs:
            return None
        try:
            message = self._codec.read(body)
        except InvalidFrame:
            return None
        if type(message) in _LINK_MESSAGES:
            return None
        self._received_frames += 1
        self._received_bytes += ENVELOPE.size + len(body)
        link.last_received = now
        return [Received(link.peer, message)]

    def _decode(self, parts: list[bytes]) -> Frame:
        self._received_frames += 1
        self._received_bytes += sum(map(len, parts))
        return self._codec.decode(parts)

    def _encode(self, addressee: int, message: Message) -> list[bytes]:
        parts = self._codec.encode(self._me.incarnation, addressee, message)
        self._sent_frames += 1
        self._sent_bytes += sum(map(len, parts))
        return parts

    def _encode_to(self, link: _Link, message: Message, now: float) -> bytes:
        """The body of a message to a peer that is up; its envelope is the link's."""
        link.last_sent = now
        body = self._codec.write(message)
        self._sent_frames += 1
        self._sent_bytes += ENVELOPE.size + len(body)
        return body

    def _count_traffic(self) -> None:
        name = self.bus.name
        self._counters.add(f"bus_received_frames/{name}", self._received_frames)
        self._counters.add(f"bus_received_bytes/{name}", self._received_bytes)
        self._counters.add(f"bus_sent_frames/{name}", self._sent_frames)
        self._counters.add(f"bus_sent_bytes/{name}", self._sent_bytes)
        self._received_frames = self._received_bytes = self._sent_frames = self._sent_bytes = 0

    def _reject(self, reason: str, sender: str, sentence: str) -> None:
        self._counters.add(f"bus_rejected_frames/{self.bus.name}/{reason}")
        log.warning("frame rejected", bus=self.bus.name, sender=sender, reason=reason, detail=sentence)

    def _introduction(self, kind: type[Hello] | type[Welcome], attempt: int) -> Hello | Welcome:
        return kind(
            role=self._me.role,
            index=self._me.index,
            incarnation=self._me.incarnation,
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            attempt=attempt,
            schema=SCHEMA,
        )

    def _is_current(self, frame: Frame, peer: Peer) -> bool:
        if frame.sender == peer.incarnation and frame.addressee == self._me.incarnation:
            return True
        self._reject("stale", str(peer), "the frame is from or for an earlier start")
        return False


class Listener(_Side):
    """The binding side of a bus, with many peers."""

    def __init__(
        self, bus: Bus, me: Identity, codec: Codec, counters: Counters, timing: Timing, limits: dict[Role, int]
    ) -> None:
        """`limits` has the number of indices of each role that has one (ranks: 0 … limit - 1)."""
        super().__init__(bus, me, codec, counters, timing)
        self._limits = limits
        self._by_routing_id: dict[bytes, _Link] = {}
        self._by_name: dict[tuple[Role, int], _Link] = {}
        self.outbox: list[list[bytes]] = []
        """Frames to send, each with the routing id first. The shell empties it."""

    def receive(self, parts: list[bytes], now: float) -> list[Event]:
        """Take what the ROUTER socket gave; return the events in it."""
        sender, *rest = parts
        link = self._by_routing_id.get(sender)
        if link is not None and len(rest) == 2:
            events = self._take(link, rest[0], rest[1], now)
            if events is not None:
                return events
        try:
            frame = self._decode(rest)
        except InvalidFrame as invalid:
            self._reject(invalid.reason, sender.decode(errors="replace"), str(invalid))
            self._answer(sender, link.peer.incarnation if link is not None else 0, error_for(invalid))
            return []
        if isinstance(frame.message, Hello):
            return self._hello(sender, frame.message, now)
        if link is None:
            self._reject("no_hello", sender.decode(errors="replace"), "the sender has not said Hello")
            if not isinstance(frame.message, Error | Goodbye):
                self._answer(
                    sender, frame.sender, Error(code="no_hello", message="say Hello first, and wait for Welcome")
                )
            return []
        if not self._is_current(frame, link.peer):
            return []
        link.last_received = now
        if isinstance(frame.message, Heartbeat):
            return []
        if isinstance(frame.message, Goodbye):
            return self.lose(link.peer, frame.message.reason or "it ended")
        return [Received(link.peer, frame.message)]

    def encode(self, peer: Peer, message: Message, now: float) -> list[bytes] | None:
        """The frames for `peer`, or None if it is not up."""
        link = self._by_name.get((peer.role, peer.index))
        if link is None or link.peer != peer:
            return None
        return [link.routing_id, link.ours, self._encode_to(link, message, now)]

    def tick(self, now: float) -> list[Event]:
        """Send heartbeats and give up on peers that are silent. Clients may be silent: the transport watches them."""
        self._count_traffic()
        events: list[Event] = []
        for link in list(self._by_name.values()):
            if link.peer.role != "client" and now - link.last_received > self._timing.timeout:
                events += self.lose(link.peer, f"it was silent for {self._timing.timeout:g} s")
            elif now - link.last_sent >= self._timing.interval:
                link.last_sent = now
                self._answer(link.routing_id, link.peer.incarnation, Heartbeat())
        return events

    def lose(self, peer: Peer, reason: str) -> list[Event]:
        """Forget a peer; nothing if it is not up."""
        link = self._by_name.get((peer.role, peer.index))
        if link is None or link.peer != peer:
            return []
        del self._by_name[peer.role, peer.index]
        del self._by_routing_id[link.routing_id]
        return [PeerDown(peer, reason)]

    def peer_of(self, sender: bytes) -> Peer | None:
        """The peer that is up with this routing id."""
        link = self._by_routing_id.get(sender)
        return link.peer if link else None

    def peers(self) -> list[Peer]:
        """All that are up."""
        return [link.peer for link in self._by_name.values()]

    def _hello(self, sender: bytes, hello: Hello, now: float) -> list[Event]:
        refusal = self._refusal(hello)
        if refusal:
            self._reject(refusal.code, sender.decode(errors="replace"), refusal.message)
            self._answer(sender, max(hello.incarnation, 0), refusal)
            return []
        peer = Peer(self.bus.name, hello.role, hello.index, hello.incarnation)
        events: list[Event] = []
        present = self._by_name.get((hello.role, hello.index))
        if present is None or present.peer != peer or present.attempt != hello.attempt:
            if present is not None:
                events += self.lose(present.peer, "it has begun again")
            link = self._link_to(peer, sender, hello.attempt, now)
            self._by_name[peer.role, peer.index] = self._by_routing_id[sender] = link
            events.append(PeerUp(peer, hello.minor))
            log.info("peer up", bus=self.bus.name, peer=str(peer), peer_incarnation=peer.incarnation)
            if hello.schema and hello.schema != SCHEMA:
                log.info("peer has other message definitions", peer=str(peer), theirs=hello.schema, ours=SCHEMA)
        self._answer(sender, hello.incarnation, self._introduction(Welcome, hello.attempt))
        return events

    def _refusal(self, hello: Hello) -> Error | None:
        if hello.major != PROTOCOL_MAJOR:
            return Error(code="protocol", message=f"protocol {hello.major} is not spoken here; {PROTOCOL_MAJOR} is")
        if hello.role not in self.bus.connects:
            return Error(
                code="role",
                message=f"{hello.role} does not connect to the {self.bus.name} bus; "
                f"{' and '.join(self.bus.connects)} may",
            )
        limit = self._limits.get(hello.role)
        if not 0 <= hello.index < (limit or 2**63):
            return Error(
                code="index", message=f"{hello.role} index {hello.index} must be from 0 to {(limit or 2**63) - 1}"
            )
        if not 0 < hello.incarnation < 2**63:
            return Error(code="incarnation", message="the incarnation must be from 1 to 2^63 - 1")
        present = self._by_name.get((hello.role, hello.index))
        if present and present.peer.incarnation > hello.incarnation:
            return Error(code="stale_hello", message=f"a newer start of {hello.role}/{hello.index} is connected")
        return None

    def _answer(self, sender: bytes, addressee: int, message: Message | None) -> None:
        if message is not None:
            self.outbox.append([sender, *self._encode(addressee, message)])


class Dialer(_Side):
    """The connecting side of a bus, with one peer."""

    def __init__(
        self, bus: Bus, me: Identity, codec: Codec, counters: Counters, timing: Timing, index: int | None
    ) -> None:
        """`index` is that of the process that is dialled; None is whichever answers."""
        super().__init__(bus, me, codec, counters, timing)
        self._index = index
        self._link: _Link | None = None
        self._attempt = 0
        self._last_hello = float("-inf")
        self.outbox: list[list[bytes]] = []
        """Frames to send. The shell empties it."""

    @property
    def routing_id(self) -> bytes:
        """What to set as the socket's identity."""
        return routing_id(self._me.role, self._me.index, self._me.incarnation)

    def receive(self, parts: list[bytes], now: float) -> list[Event]:
        """Take what the DEALER socket gave; return the events in it."""
        if self._link is not None and len(parts) == 2:
            events = self._take(self._link, parts[0], parts[1], now)
            if events is not None:
                return events
        try:
            frame = self._decode(parts)
        except InvalidFrame as invalid:
            self._reject(invalid.reason, self.bus.binds, str(invalid))
            answer = error_for(invalid)
            if self._link and answer:
                self.outbox.append(self._encode(self._link.peer.incarnation, answer))
            return []
        if isinstance(frame.message, Welcome):
            return self._welcome(frame.message, now)
        if self._link is None:
            if isinstance(frame.message, Error) and frame.message.code != "no_hello":
                log.error("hello refused", bus=self.bus.name, code=frame.message.code, detail=frame.message.message)
            return []
        if isinstance(frame.message, Error) and frame.message.code == "no_hello":
            return self.lose(self._link.peer, "it has restarted")
        if not self._is_current(frame, self._link.peer):
            return []
        self._link.last_received = now
        if isinstance(frame.message, Heartbeat):
            return []
        if isinstance(frame.message, Goodbye):
            return self.lose(self._link.peer, frame.message.reason or "it ended")
        return [Received(self._link.peer, frame.message)]

    def encode(self, peer: Peer, message: Message, now: float) -> list[bytes] | None:
        """The frames for `peer`, or None if it is not up."""
        if self._link is None or self._link.peer != peer:
            return None
        return [self._link.ours, self._encode_to(self._link, message, now)]

    def tick(self, now: float) -> list[Event]:
        """Say Hello until welcome; then send heartbeats, and give up on a peer that is silent."""
        self._count_traffic()
        if self._link is None:
            if now - self._last_hello >= self._timing.interval:
                self._say_hello(now)
            return []
        if now - self._link.last_received > self._timing.timeout:
            return self.lose(self._link.peer, f"it was silent for {self._timing.timeout:g} s")
        if now - self._link.last_sent >= self._timing.interval:
            self._link.last_sent = now
            self.outbox.append(self._encode(self._link.peer.incarnation, Heartbeat()))
        return []

    def lose(self, peer: Peer, reason: str) -> list[Event]:
        """Forget the peer; nothing if it is not up."""
        if self._link is None or self._link.peer != peer:
            return []
        self._link = None
        self._attempt += 1
        self._last_hello = float("-inf")
        return [PeerDown(peer, reason)]

    def peers(self) -> list[Peer]:
        """The peer, if it is up."""
        return [self._link.peer] if self._link else []

    def _say_hello(self, now: float) -> None:
        self._last_hello = now
        self.outbox.append(self._encode(0, self._introduction(Hello, self._attempt)))

    def _welcome(self, welcome: Welcome, now: float) -> list[Event]:
        peer = Peer(self.bus.name, welcome.role, welcome.index, welcome.incarnation)
        expected = (self.bus.binds, welcome.index if self._index is None else self._index, PROTOCOL_MAJOR)
        if (welcome.role, welcome.index, welcome.major) != expected:
            self._reject("welcome", str(peer), "role, index and protocol must be {}, {} and {}".format(*expected))
            return []
        if welcome.attempt != self._attempt:
            self._reject("stale", str(peer), "the Welcome answers an earlier Hello")
            return []
        if self._link is not None:
            return []  # the answer to a repeated Hello
        self._link = self._link_to(peer, b"", self._attempt, now)
        log.info("peer up", bus=self.bus.name, peer=str(peer), peer_incarnation=peer.incarnation)
        return [PeerUp(peer, welcome.minor)]
