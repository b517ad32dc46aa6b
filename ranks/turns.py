"""Turns of sessions as they come, are stopped, end, and are followed by the next (docs/sessions.md has the rules).

What sessions hold meanwhile is for `ranks.sessions`.
"""

from collections.abc import Callable
from typing import NamedTuple

from bus.messages import AppendInput, Sampling, StopTurn, TurnEnded, TurnReason
from bus.wire import unpack_ints
from ranks.batch import NONE
from ranks.checks import Checks
from ranks.grammars import Matcher
from ranks.members import Members
from ranks.request import Request, Session, Turn
from ranks.scheduler import Ended, Refused, RefusedTurn
from ranks.sessions import Sessions
from ranks.tickets import Tickets


class News(NamedTuple):
    """What became of turns: those that ended, with the frontends that are to be told, and sessions that did so too."""

    ended: list[tuple[int, TurnEnded]]
    closed: list[Ended]
    refused: list[RefusedTurn]


class Turns:
    """Leads sessions from turn to turn, and notes who is to hear of it."""

    def __init__(
        self,
        sessions: Sessions,
        members: Members,
        checks: Checks,
        tickets: Tickets,
        drafts: dict[int, list[int]],
        compiled_now: Callable[[Sampling], Matcher | None],
        unsettle: Callable[[], None],
    ) -> None:
        """`compiled_now` gives a turn's grammar where it is not to be waited for; the others are as in `Members`."""
        self._sessions = sessions
        self._members = members
        self._checks = checks
        self._tickets = tickets
        self._drafts = drafts
        self._compiled_now = compiled_now
        self._unsettle = unsettle
        self._news = News([], [], [])

    def append(self, frontend: int, turn: AppendInput, now: float) -> list[Ended]:
        """See `ranks.scheduler.Scheduler`."""
        request, session = self._session(frontend, turn.handle)
        if session.closing:
            raise Refused("the session is closed; it takes no more input")
        if turn.close:
            if self._sessions.waits_for_input(request):
                return self._members.finish([request], "closed")
            session.closing = True
            return []
        sampling = turn.sampling or session.opened_with
        self._checks.check_turn(
            turn, sampling, request.num_prompt + sum(queued.tokens.size for queued in session.turns)
        )
        tokens = unpack_ints(turn.prompt_token_ids)
        entry = Turn(turn.sequence, tokens, sampling, turn.mm_features, now, self._compiled_now(sampling))
        if entry.matcher is None and tokens.size:
            entry.ticket = self._tickets.draw(request, sampling)
        if not self._sessions.waits_for_input(request):
            session.turns.append(entry)
            self._sessions.num_queued += 1
        else:
            self._begin(request, entry)
        return []

    def stop(self, frontend: int, stop: StopTurn) -> None:
        """See `ranks.scheduler.Scheduler.stop_turn`."""
        request, _ = self._session(frontend, stop.handle)
        if stop.turn < request.turn:
            raise Refused(f"turn {stop.turn} has ended; turn {request.turn} is the one that may be stopped")
        if stop.turn > request.turn or self._sessions.waits_for_input(request):
            raise Refused(f"turn {stop.turn} has not begun; turn {request.turn} is the one that may be stopped")
        if stop.n < 0:
            raise Refused(f"n is {stop.n}; it must be 0 or more")
        self.end(request, "interrupted", keep=stop.n)

    def end(
        self, request: Request, reason: TurnReason, stop_reason: int | None = None, keep: int | None = None
    ) -> None:
        """Let a session's turn end, with the first `keep` tokens of its output, and begin what comes next."""
        if request.row != NONE:
            self._unsettle()
            self._drafts.pop(request.row, None)
        self._news.ended.append((request.frontend, self._sessions.end_turn(request, reason, stop_reason, keep)))
        self._members.constrained.pop(request.number, None)
        self._go_on(request)

    def refuse_taken(self, request: Request, sentence: str) -> None:
        """Refuse the turn that a session is in, of which nothing was computed, and go on without it."""
        session = request.session
        assert session is not None
        assert session.taken is not None
        self._refuse(request, session.taken, sentence)
        self._sessions.give_back(request)
        self._go_on(request)

    def compiled(self, request: Request, ticket: int, matcher: Matcher, sentence: str) -> None:
        """What a session was to go on with later has its grammar, unless it is gone, or is refused with a sentence."""
        session = request.session
        turn = next((turn for turn in session.turns if turn.ticket == ticket), None) if session is not None else None
        if session is None or turn is None:
            return
        turn.matcher, turn.ticket = matcher, 0
        if sentence:
            session.turns.remove(turn)
            self._sessions.num_queued -= 1
            self._refuse(request, turn, sentence)

    def take_ended(self) -> tuple[list[tuple[int, TurnEnded]], list[Ended]]:
        """The turns that ended since they were last taken, and the sessions that did with them."""
        ended, closed, refused = self._news
        self._news = News([], [], refused)
        return ended, closed

    def take_news(self) -> News:
        """All that became of turns since it was last taken; not what `take_ended` has given."""
        news, self._news = self._news, News([], [], [])
        return news

    @property
    def has_news(self) -> bool:
        """Whether turns have ended or were refused."""
        return bool(self._news.ended or self._news.refused)

    def _session(self, frontend: int, handle: int) -> tuple[Request, Session]:
        request = self._members.get(frontend, handle)
        if request is None:
            raise Refused("the session is not known: it has ended, or was never opened")
        if request.session is None:
            raise Refused(f"request {request.request_id} is no session; open it with resumable to append to it")
        return request, request.session

    def _refuse(self, request: Request, turn: Turn, sentence: str) -> None:
        """A session's turn is not taken; who sent it is to hear why."""
        self._news.refused.append(RefusedTurn(request.frontend, request.handle, turn.sequence, sentence))

    def _begin(self, request: Request, turn: Turn) -> None:
        """Let a session that waits for input go on."""
        self._sessions.take(request, turn)
        if turn.matcher is not None:
            self._members.constrained[request.number] = request

    def _go_on(self, request: Request) -> None:
        """Let a session that waits for input take the next there is room for, or end if it was closed."""
        session = request.session
        assert session is not None
        while session.turns:
            turn = session.turns.popleft()
            self._sessions.num_queued -= 1
            try:
                self._checks.check_room(request.num_prompt, turn.tokens.size)
            except Refused as refused:
                self._refuse(request, turn, str(refused))
            else:
                self._begin(request, turn)
                return
        if session.closing:
            self._news.closed.extend(self._members.finish([request], "closed"))
