"""The other side of a process under test: real sockets, run by a shell in a thread, with a core that a test drives."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from bus.config import Config
from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Received, Send, Tick
from bus.links import Identity
from bus.messages import (
    AnyCommand,
    CommandRequest,
    Error,
    KvPool,
    Message,
    PartialSchedule,
    Recall,
    Reply,
    Role,
    StandingSchedule,
)
from bus.shell import Shell, new_incarnation
from tests.ranks.toy import ToyExecutor

DEADLINE_S = 20.0


class Nudge:
    """An effect that does nothing."""


class _Recorder:
    """A core that keeps what comes and does what it is told to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.began = 0
        """How many messages came before the peer that came last."""
        self.peers: dict[int, Peer] = {}
        self.lost: list[str] = []
        self.changed = threading.Condition()

    def handle(self, event: Event) -> Iterable[Effect]:
        if isinstance(event, Drained | Tick):
            return []
        with self.changed:
            effects = self._take(event)
            self.changed.notify_all()
        return effects

    def _take(self, event: Event) -> list[Effect]:
        if isinstance(event, PeerUp):
            self.peers[event.peer.index] = event.peer
            self.began = len(self.messages)
        elif isinstance(event, PeerDown):
            del self.peers[event.peer.index]
            self.lost.append(event.reason)
        elif isinstance(event, Received):
            self.messages.append(event.message)
        else:
            return [event.value]
        return []


class _ExecutorCore(_Recorder):
    """Gives rank 0 its pool and answers its schedules with a toy model, while it is not held."""

    def __init__(self, config: Config, pool: KvPool) -> None:
        super().__init__()
        self.pool = pool
        self.toy = ToyExecutor(pool, config.max_num_seqs, config.max_num_batched_tokens)
        self.held = False

    def _take(self, event: Event) -> list[Effect]:
        effects = super()._take(event)
        if isinstance(event, PeerUp):
            return [Send(event.peer, self.pool)]
        if isinstance(event, Received):
            effects += self._schedule(event.peer, event.message)
        if not self.held and self.peers:
            while self.toy.results:
                effects.append(Send(self.peers[0], self.toy.take()))
        return effects

    def _schedule(self, peer: Peer, message: Message) -> list[Effect]:
        match message:
            case PartialSchedule():
                self.toy.run(message)
            case StandingSchedule():
                self.toy.stand(message)
            case Recall():
                return [Send(peer, self.toy.recall(message))]
        return []


class _Side:
    """A shell with its thread."""

    def __init__(self, role: Role, index: int, config: Config, core: _Recorder, bus: str, endpoint: str) -> None:
        self.core = core
        self.shell = Shell(Identity(role, index, new_incarnation()), config, core, lambda effect: None)
        self.shell.bind(bus, endpoint)
        self._thread = threading.Thread(target=self.shell.run, name=f"{role}-{index}")
        self._thread.start()

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Until `condition` gives something; the test fails after the deadline."""
        with self.core.changed:
            value = self.core.changed.wait_for(condition, DEADLINE_S)
            assert value, f"not in time: {what}; last messages: {self.core.messages[-5:]}"
            return value

    def close(self) -> None:
        self.shell.stop("the test is over")
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ToyExecutorSide(_Side):
    """The executor's place, with a toy model."""

    core: _ExecutorCore

    def __init__(self, config: Config, pool: KvPool) -> None:
        super().__init__("executor", 0, config, _ExecutorCore(config, pool), "step", config.step_endpoint())

    def hold(self, held: bool) -> None:
        """Keep results back, or give those that were kept back."""
        with self.core.changed:
            self.core.held = held
        self.shell.post(Nudge())


class FrontendSide(_Side):
    """A frontend's place towards one rank."""

    def __init__(self, index: int, config: Config, rank: int = 0) -> None:
        super().__init__("frontend", index, config, _Recorder(), "command", config.command_endpoint(index))
        self._rank = rank
        self._last_command = 0

    def send(self, message: Message) -> None:
        peer = self.wait(lambda: self.core.peers.get(self._rank), f"rank {self._rank} says Hello")
        self.shell.post(Send(peer, message))

    def received(self, kind: type[Any]) -> list[Any]:
        """All messages of a kind so far."""
        with self.core.changed:
            return [message for message in self.core.messages if isinstance(message, kind)]

    def ask(self, body: AnyCommand, deadline_s: float | None = None) -> int:
        """Send a command; returns its id."""
        self._last_command += 1
        self.send(CommandRequest(command_id=self._last_command, body=body, deadline_s=deadline_s))
        return self._last_command

    def answer(self, command_id: int) -> Reply | Error:
        """The answer to a command, when it has come."""

        def found() -> Reply | Error | None:
            for message in self.core.messages:
                if isinstance(message, Reply | Error) and message.command_id == command_id:
                    return message
            return None

        return self.wait(found, f"the answer to command {command_id}")  # type: ignore[no-any-return]

    def value(self, body: AnyCommand) -> Any:
        """What a command gives; the test fails if it is an error."""
        answer = self.answer(self.ask(body))
        assert isinstance(answer, Reply), answer
        return answer.value
