"""A session as its client sees it: inputs, the turns they become, and what it takes for none to get lost.

No socket and no waiting here: messages come in, messages to send go out.
"""

from collections import deque

from bus.messages import (
    Abort,
    Append,
    Delta,
    EndTurn,
    Error,
    Finished,
    Generate,
    Message,
    SessionResumed,
    TurnFinished,
)
from bus.wire import unpack_ints
from frontend.pieces import EngineError, Piece


class TurnStream:
    """A turn: the input it begins with, and what has come of its output.

    `text` and `token_ids` are all of it, `inbox` what was not read yet. `finished` is its end; `error` is set instead
    if there is no such turn, or no more.
    """

    def __init__(self, asked: Generate | Append) -> None:
        self.asked = asked
        self.text = ""
        self.token_ids: list[int] = []
        self.inbox: deque[Piece] = deque()
        self.finished: TurnFinished | None = None
        self.error: EngineError | None = None
        self.stop_at: int | None = None
        self._known_text = self._known_tokens = 0

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.finished is not None or self.error is not None

    def begin_again(self) -> None:
        """Its output comes once more, from the first token on."""
        self._known_text = max(self._known_text, len(self.text))
        self._known_tokens = max(self._known_tokens, len(self.token_ids))
        self.text, self.token_ids = "", []

    def take(self, request_id: str, tokens: list[int], text: str, delta: Delta | None) -> None:
        """Take a piece of its output; what was known already is not put into the inbox again."""
        text_before = max(len(self.text), self._known_text)
        tokens_before = max(len(self.token_ids), self._known_tokens)
        self.text += text
        self.token_ids += tokens
        new_text, new_tokens = self.text[text_before:], self.token_ids[tokens_before:]
        if new_text or new_tokens:
            whole = delta if len(new_tokens) == len(tokens) else None
            self.inbox.append(Piece(request_id=request_id, index=0, text=new_text, token_ids=new_tokens, delta=whole))


class SessionStream:
    """A session. What its methods return is to be sent, in that order.

    `turns` are those that have not ended, `last` is the number of the last that has. `finished` is the session's end,
    `error` why there is none. While `attached` is false it is not known what the frontend has: nothing is sent before
    its SessionResumed.
    """

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.turns = deque([TurnStream(request)])
        self.last = 0
        self.finished: Finished | None = None
        self.error: EngineError | None = None
        self.attached = True
        self._started = False
        self._closing = self._aborting = False
        self._repeating = 0
        """The turn whose output is coming again; 0 if none is."""

    @property
    def over(self) -> bool:
        """Whether the session has ended, one way or the other."""
        return self.finished is not None or self.error is not None

    # What its user wants

    def append(self, asked: Append) -> tuple[TurnStream, list[Message]]:
        """A turn for an input.

        Raises:
            EngineError: the session has ended, or is being closed.
        """
        if self.error is not None:
            raise self.error
        if self.finished is not None or self._closing or self._aborting:
            raise EngineError("closed", f"session {self.request.request_id} is closed; it takes no more input")
        turn = TurnStream(asked)
        self.turns.append(turn)
        return turn, self._now(asked)

    def stop(self, turn: TurnStream, n: int | None) -> list[Message]:
        """Stop a turn, and keep `n` tokens of it, or what has come. Nothing if it has ended, or not begun.

        Raises:
            ValueError: `n` is negative.
        """
        if n is not None and n < 0:
            raise ValueError(f"n {n} is not allowed; it must be 0 or more")
        if turn.over or not self.turns or self.turns[0] is not turn:
            return []
        turn.stop_at = len(turn.token_ids) if n is None else n
        return self._now(*self._stop())

    def close(self) -> list[Message]:
        """Take no more input; the turns there are go on to their ends."""
        if self.over or self._closing:
            return []
        self._closing = True
        return self._now(self._close())

    def abort(self) -> list[Message]:
        """End it now."""
        if self.over:
            return []
        self._aborting = True
        return self._now(self._abort())

    # What the frontend says

    def tokens(self, tokens: list[int], text: str = "", delta: Delta | None = None) -> None:
        """Take output of the turn that runs."""
        self._started = True
        if 0 < self._repeating <= self.last:
            return  # of a turn whose end is known
        if self.turns:
            self.turns[0].take(self.request.request_id, tokens, text, delta)

    def message(self, message: Delta | TurnFinished | Finished | SessionResumed | Error) -> list[Message]:
        """Take what concerns this session."""
        self._started = self._started or not isinstance(message, Error)
        match message:
            case Delta():
                self.tokens(unpack_ints(message.token_ids).tolist(), message.text, message)
            case TurnFinished():
                self._turn_finished(message)
            case Finished():
                self._finish(message)
            case SessionResumed():
                return self._resumed(message)
            case Error():
                return self._refused(message)
        return []

    def lost(self) -> None:
        """The frontend cannot be reached."""
        self.attached = False

    def found(self, same: bool) -> list[Message]:
        """A frontend is there; `same` if it is the one that there was before, in the same start of it."""
        if same:
            # It tells of the sessions it has; of one that it has not, it says so when it is asked for a turn 0.
            return [EndTurn(request_id=self.request.request_id, turn=0, n=0)]
        if self._started:
            self.fail(EngineError("frontend_lost", "the frontend was lost, and the session with it; open it again"))
            return []
        return self._open()

    def fail(self, error: EngineError) -> None:
        """End the session, and all its turns, by an error."""
        self.error = error
        self._fail_turns(error)

    def _turn_finished(self, message: TurnFinished) -> None:
        if self._repeating:
            self._repeating = message.turn + 1
        if message.turn > self.last and self.turns:
            self.last = message.turn
            self.turns.popleft().finished = message

    def _finish(self, message: Finished) -> None:
        self.finished = message
        why = message.message or f"the session has ended ({message.reason})"
        self._fail_turns(EngineError("failed" if message.reason == "error" else message.reason, why))

    def _fail_turns(self, error: EngineError) -> None:
        for turn in self.turns:
            turn.error = error
        self.turns.clear()

    def _refused(self, error: Error) -> list[Message]:
        failure = EngineError(error.code, error.message)
        if error.code == "unknown_request":
            if not self._started and not self.attached:
                return self._open()
            self.fail(failure)
        elif error.turn == 1:
            self.fail(failure)
        elif 0 < error.turn - self.last <= len(self.turns):
            turn = self.turns[error.turn - self.last - 1]
            self.turns.remove(turn)
            turn.error = failure
        return []

    def _resumed(self, message: SessionResumed) -> list[Message]:
        self.attached = True
        self._repeating = message.turn
        if self.turns:
            self.turns[0].begin_again()
        missing = [turn.asked for turn in list(self.turns)[max(message.inputs - self.last, 0) :]]
        return [*missing, *self._rest()]

    def _open(self) -> list[Message]:
        self.attached = True
        return [*(turn.asked for turn in self.turns), *self._rest()]

    # What is sent

    def _now(self, *messages: Message) -> list[Message]:
        return list(messages) if self.attached else []

    def _rest(self) -> list[Message]:
        """What was asked beside inputs, and may not have been heard."""
        rest = self._stop()
        if self._closing:
            rest.append(self._close())
        if self._aborting:
            rest.append(self._abort())
        return rest

    def _stop(self) -> list[Message]:
        if not self.turns or self.turns[0].stop_at is None:
            return []
        return [EndTurn(request_id=self.request.request_id, turn=self.last + 1, n=self.turns[0].stop_at)]

    def _close(self) -> Append:
        return Append(request_id=self.request.request_id, resumable=False)

    def _abort(self) -> Abort:
        return Abort(request_id=self.request.request_id)
