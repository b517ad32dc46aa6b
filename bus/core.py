"""What a process's core is: a state machine that gets every event in one total order and answers with effects.

A core owns no socket, clock, thread or device; it reads no clock, draws no random number and iterates over no set, so
that the same events always give the same effects. The shell (`bus.shell`) feeds it and performs what it answers.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from bus.messages import Message, Role


class Peer(msgspec.Struct, frozen=True):
    """One start of another process, or of a client, on one of this process's buses."""

    bus: str
    role: Role
    index: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"


class PeerUp(NamedTuple):
    """A peer has said Hello (or Welcome): it may be sent messages from now on, those of its `minor` version."""

    peer: Peer
    minor: int = 0


class PeerDown(NamedTuple):
    """A peer is lost: it ended, fell silent, was replaced by a newer start of itself, or reads too slowly."""

    peer: Peer
    reason: str


class Received(NamedTuple):
    """A valid message of a peer that is up."""

    peer: Peer
    message: Message


class Posted(NamedTuple):
    """Something this process's own threads have to tell: a call over a seam, a finished step, a compiled grammar."""

    value: Any


class Drained(NamedTuple):
    """No frame and no posted event is left for now. `now` is monotonic time in seconds."""

    now: float


class Tick(NamedTuple):
    """About ten times a second. `now` is monotonic time in seconds, `wall` seconds since the epoch.

    `bus_counters` are the totals that the buses of this process have counted (see `bus.counters`).
    """

    now: float
    wall: float
    bus_counters: dict[str, float]


Event = PeerUp | PeerDown | Received | Posted | Drained | Tick


class Send(NamedTuple):
    """Effect: give a message to a peer. A peer that went down meanwhile is skipped; its `PeerDown` is under way."""

    peer: Peer
    message: Message


class WakeAt(NamedTuple):
    """Effect: give a `Drained` at this monotonic time, even if nothing else happens. A later call replaces it."""

    at: float


class Stop(NamedTuple):
    """Effect: end this process in an orderly way."""

    reason: str


Effect = Any
"""`Send`, `WakeAt`, `Stop`, or something the process's own shell performs."""


class Core(Protocol):
    """A process's state machine."""

    def handle(self, event: Event) -> Iterable[Effect]:
        """Take the next event; return what is to be done, in order."""
        ...
