"""The other processes of an executor on several hosts, as the core of the first knows them.

They run every step together, so they live and die together: when one is lost or fails, all end by an error and are
started again, and the ranks find an executor that knows nothing.
"""

import msgspec

from bus import messages
from bus.core import Effect, Peer, Send, Stop
from bus.log import get_logger
from bus.messages import EndOfSteps, Failed, Message, PlaceAdapter, ReadAdapter, Ready
from executor.step import MergedStep
from executor.telling import Teller

log = get_logger()

READY_S = 900.0
"""How long after executor 0 the others may be ready: they load the same weights and compile the same programs."""

STEP_S = 120.0
"""How long a step may run. One that waits for a device which does not take part would never end."""


END_S = 5.0
"""How long the others may take to end in an orderly way."""


class Broken(msgspec.Struct, frozen=True):
    """Effect: the process is to end by an error, since the executor's processes cannot go on together."""

    reason: str


def broken(reason: str) -> list[Effect]:
    """End this process by an error."""
    return [Broken(reason), Stop(reason)]


class Group:
    """Executors 1, 2, …: whether all are ready, and what they are told."""

    def __init__(self, followers: int, programs: str) -> None:
        """`followers` may be none; `programs` stands for what executor 0 runs, see `bus.messages.Ready`."""
        self._programs = programs
        self._peers: list[Peer | None] = [None] * followers
        self._ready = [False] * followers
        self._teller = Teller()
        self._begun: float | None = None
        self._oldest: int | None = None
        self._oldest_since = 0.0
        self._ending = ""
        self._ending_since: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether steps can run."""
        return all(self._ready) and not self._ending

    def welcome(self, peer: Peer) -> list[Effect]:
        """A follower has said Hello."""
        if not 1 <= peer.index <= len(self._peers):
            return broken(f"{peer} is no follower")
        self._peers[peer.index - 1] = peer
        return []

    def lose(self, peer: Peer, reason: str) -> list[Effect]:
        """A follower is lost, and with it what it held of the model's state; or it has ended as it was told."""
        if not self._ending:
            return broken(f"{peer} is lost: {reason}")
        self._peers[peer.index - 1] = None
        return [] if any(self._peers) else [Stop(self._ending)]

    def receive(self, peer: Peer, message: Message) -> list[Effect]:
        """What a follower has to say."""
        match message:
            case Ready(programs=programs) if programs != self._programs:
                return broken(f"{peer} runs other programs: its configuration, its model or its devices are not ours")
            case Ready():
                self._ready[peer.index - 1] = True
                if self.is_complete:
                    log.info("all executors are ready", executors=1 + len(self._peers))
            case Failed(reason=reason):
                return broken(f"{peer} has failed: {reason}")
        return []

    def tell(self, number: int, step: MergedStep) -> list[Effect]:
        """Tell all of the next step."""
        if not self._peers:
            return []
        return self._send(self._teller.tell(number, step))

    def tell_all(self, message: ReadAdapter | PlaceAdapter) -> list[Effect]:
        """Tell all of an adapter, after the steps that they were told of so far."""
        return self._send(message)

    def end(self, reason: str) -> list[Effect]:
        """End all in an orderly way, this process last: JAX aborts whoever is left when the first is gone."""
        self._ending = reason
        return self._send(EndOfSteps()) or [Stop(reason)]

    def check(self, now: float, oldest: int | None) -> list[Effect]:
        """Give up on what takes too long; `oldest` is the number of the step that is to be done next."""
        if not self._peers:
            return []
        if self._ending:
            self._ending_since = now if self._ending_since is None else self._ending_since
            return [Stop(self._ending)] if now - self._ending_since > END_S else []
        if self._begun is None:
            self._begun = now
        if not self.is_complete and now - self._begun > READY_S:
            missing = ", ".join(f"executor/{place}" for place, ready in enumerate(self._ready, 1) if not ready)
            return broken(f"not ready within {READY_S:g} s: {missing}")
        if oldest != self._oldest:
            self._oldest, self._oldest_since = oldest, now
        elif oldest is not None and now - self._oldest_since > STEP_S:
            return broken(f"step {oldest} has not ended within {STEP_S:g} s")
        return []

    def _send(self, message: messages.MergedStep | EndOfSteps | ReadAdapter | PlaceAdapter) -> list[Effect]:
        return [Send(peer, message) for peer in self._peers if peer is not None]
