"""Commands under way: asked of ranks, answered once, within a deadline."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bus.core import Effect, Peer, Send
from bus.folds import FoldError, fold
from bus.messages import AnyCommand, CommandRequest, Error, LoadAdapter, Reply, UnloadAdapter
from frontend.seam import CommandResult

EXECUTOR = -1
"""Stands for the executor among the ranks that are asked."""

FOR_EXECUTOR = LoadAdapter | UnloadAdapter
"""Commands that the executor answers."""

_GRACE_S = 1.0
"""How much longer than its deadline the executor's answer is waited for: it has its own word for what is late."""

Asker = tuple[Peer | None, int]
"""Who asked (None: the HTTP side) and the id it gave."""


@dataclass(slots=True)
class _Pending:
    asker: Asker
    body: AnyCommand
    asked: list[int]
    deadline: float
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    code: str = ""
    """Of the executor's refusal."""

    def is_complete(self) -> bool:
        return len(self.answers) + len(self.failures) + len(self.lost) == len(self.asked)


class Commands:
    """Owns the commands that are not answered yet."""

    def __init__(self, default_deadline_s: float) -> None:
        self._default_deadline_s = default_deadline_s
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1

    def ask(
        self,
        asker: Asker,
        body: AnyCommand,
        deadline_s: float | None,
        only: list[int] | None,
        ranks: Mapping[int, Peer],
        now: float,
    ) -> list[Effect]:
        """Send a command to the ranks that are up, or to those of `only`; its answer comes later, or at once."""
        if refusal := self._unanswered(asker):
            return refusal
        unknown = sorted(set(only or ()) - set(ranks))
        if unknown:
            return [answer(asker, error=f"ranks {unknown} are not up; ranks that are: {sorted(ranks)}")]
        if not ranks:
            return [answer(asker, error="no rank is up; try again when the engine is ready")]
        asked = sorted(ranks) if only is None else sorted(set(only))
        command_id = self._begin(asker, body, asked, now + self._seconds(deadline_s))
        return [Send(ranks[rank], CommandRequest(command_id=command_id, body=body)) for rank in asked]

    def ask_executor(
        self, asker: Asker, body: FOR_EXECUTOR, deadline_s: float | None, executor: Peer | None, now: float
    ) -> list[Effect]:
        """Send a command to the executor; its answer comes later, or at once."""
        if refusal := self._unanswered(asker):
            return refusal
        if executor is None:
            return [answer(asker, error="no executor is up; try again when the engine is ready")]
        seconds = self._seconds(deadline_s)
        command_id = self._begin(asker, body, [EXECUTOR], now + seconds + _GRACE_S)
        return [Send(executor, CommandRequest(command_id=command_id, body=body, deadline_s=seconds))]

    def _unanswered(self, asker: Asker) -> list[Effect]:
        """A refusal, if the asker's command before with this id is unanswered."""
        if not any(pending.asker == asker for pending in self._pending.values()):
            return []
        return [answer(asker, error=f"command {asker[1]} is still unanswered; choose another command_id")]

    def _seconds(self, deadline_s: float | None) -> float:
        return self._default_deadline_s if deadline_s is None else max(deadline_s, 0.0)

    def _begin(self, asker: Asker, body: AnyCommand, asked: list[int], deadline: float) -> int:
        """Wait for answers to a command; its number."""
        command_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[command_id] = _Pending(asker, body, asked, deadline)
        return command_id

    def replied(self, rank: int, reply: Reply) -> list[Effect]:
        """Take a rank's answer; one that comes after the deadline is dropped."""
        pending = self._pending.get(reply.command_id)
        if pending is None or rank not in pending.asked:
            return []
        pending.answers[rank] = reply.value
        return self._finish_if_complete(reply.command_id)

    def failed(self, rank: int, error: Error) -> list[Effect]:
        """Take a rank's refusal of a command."""
        pending = self._pending.get(error.command_id)
        if pending is None or rank not in pending.asked:
            return []
        pending.failures[rank] = error.message
        if rank == EXECUTOR:
            pending.code = error.code
        return self._finish_if_complete(error.command_id)

    def rank_lost(self, rank: int) -> list[Effect]:
        """Stop waiting for a rank that is gone."""
        effects: list[Effect] = []
        for command_id, pending in list(self._pending.items()):
            if rank in pending.asked and rank not in pending.answers and rank not in pending.failures:
                pending.lost.append(rank)
                effects += self._finish_if_complete(command_id)
        return effects

    def asker_lost(self, peer: Peer) -> None:
        """Forget what a client that is gone has asked."""
        self._pending = {key: pending for key, pending in self._pending.items() if pending.asker[0] != peer}

    def expire(self, now: float) -> list[Effect]:
        """Answer what has reached its deadline with what there is."""
        late = [command_id for command_id, pending in self._pending.items() if now >= pending.deadline]
        return [effect for command_id in late for effect in self._finish(command_id)]

    def _finish_if_complete(self, command_id: int) -> list[Effect]:
        return self._finish(command_id) if self._pending[command_id].is_complete() else []

    def _finish(self, command_id: int) -> list[Effect]:
        pending = self._pending.pop(command_id)
        if pending.asked == [EXECUTOR] and not pending.answers:
            why = "was lost before it answered" if pending.lost else "did not answer in time"
            sentence = pending.failures.get(EXECUTOR, f"the executor {why}")
            return [answer(pending.asker, error=sentence, code=pending.code)]
        if pending.failures:
            sentences = [f"rank {rank}: {sentence}" for rank, sentence in sorted(pending.failures.items())]
            return [answer(pending.asker, error="; ".join(sentences))]
        missing = [rank for rank in pending.asked if rank not in pending.answers]
        if not pending.answers:
            return [answer(pending.asker, error=f"no rank answered in time; asked were {pending.asked}")]
        try:
            value = fold(type(pending.body), sorted(pending.answers.items()))
        except FoldError as error:
            return [answer(pending.asker, error=str(error))]
        return [answer(pending.asker, value=value, missing=missing)]


def answer(
    asker: Asker, value: Any = None, missing: list[int] | None = None, error: str = "", code: str = ""
) -> Effect:
    """The effect that answers a command, whoever asked."""
    peer, command_id = asker
    if peer is None:
        return CommandResult(command_id, value, missing or [], error, code)
    if error:
        return Send(peer, Error(code="command_failed", message=error, command_id=command_id))
    return Send(peer, Reply(command_id=command_id, value=value, missing=missing or []))
