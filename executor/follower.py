"""The executor's processes on other hosts than the first: they run the steps that it tells them, and read nothing."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick
from bus.log import get_logger
from bus.messages import (
    AdapterRead,
    EndOfSteps,
    Error,
    Failed,
    MergedStep,
    Message,
    PlaceAdapter,
    ReadAdapter,
    Ready,
)
from executor import step
from executor.core import DeviceFailed, RunStep, StepDone
from executor.group import READY_S, broken
from executor.step import SampledStep
from executor.telling import Listener

log = get_logger()


class FollowerCore:
    """Runs what executor 0 says, in its order, and ends when it is gone."""

    def __init__(self, programs: str, max_num_seqs: int) -> None:
        """`programs` stands for what this process runs, see `bus.messages.Ready`."""
        self._programs = programs
        self._listener = Listener(max_num_seqs)
        self._leader: Peer | None = None
        self._begun: float | None = None

    def handle(self, event: Event) -> Iterable[Effect]:
        """See `bus.core.Core`."""
        match event:
            case Received(_, message):
                return self._receive(message)
            case Drained() | Posted(StepDone()):
                return []
            case Tick(now):
                return self._check(now)
            case PeerUp(peer):
                self._leader = peer
                return [Send(peer, Ready(programs=self._programs))]
            case PeerDown(peer, reason):
                return broken(f"{peer} is lost: {reason}")
            case Posted(AdapterRead() as read):
                return [Send(self._leader, read)] if self._leader else []
            case Posted(DeviceFailed(reason)):
                told = [Send(self._leader, Failed(reason=reason))] if self._leader else []
                return [*told, Stop(f"the device failed: {reason}")]
        raise TypeError(f"not an event of a follower: {event!r}")

    def _receive(self, message: Message) -> list[Effect]:
        match message:
            case MergedStep():
                try:
                    return [RunStep(message.number, self._listener.hear(message))]
                except (ValueError, IndexError) as error:
                    return broken(f"what was told of step {message.number} cannot be run: {error}")
            case ReadAdapter() | PlaceAdapter():
                return [message]
            case EndOfSteps():
                return [Stop("the executor was told to shut down")]
            case Error():
                log.warning("executor 0 refused a message", code=message.code, detail=message.message)
        return []

    def _check(self, now: float) -> list[Effect]:
        if self._begun is None:
            self._begun = now
        if self._leader is None and now - self._begun > READY_S:
            return broken(f"executor/0 was not there within {READY_S:g} s")
        return []


class Waiting(Protocol):
    """A runner that can wait for a step without reading what it drew."""

    def dispatch(self, step: step.MergedStep) -> Any: ...

    def wait(self, handle: Any) -> None: ...


class Unread:
    """A runner of which nobody reads results: they are executor 0's to read."""

    def __init__(self, runner: Waiting) -> None:
        self._runner = runner

    def dispatch(self, step: step.MergedStep) -> Any:
        return self._runner.dispatch(step)

    def collect(self, handle: Any) -> SampledStep:
        self._runner.wait(handle)
        return _NOTHING


_NOTHING = SampledStep(np.empty(0, np.int32))
