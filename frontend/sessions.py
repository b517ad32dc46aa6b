"""Sessions: requests whose input keeps coming. Who may say what when, and what must not get lost on the way.

A session's inputs go to its rank in the order its client gave them; those that are text are tokenised first, on the
HTTP side. Output as text, and that of WebSocket connections, goes over the seam too (`frontend.session_text`).
"""

from collections import deque
from collections.abc import Callable

from bus.core import Effect, Peer, Send
from bus.counters import Counters
from bus.messages import (
    EMPTY,
    Abort,
    Append,
    EndTurn,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Ints,
    Message,
    RequestEnded,
    Sampling,
    SessionResumed,
    TokenDeltas,
    TurnEnded,
    TurnFinished,
)
from bus.wire import pack_ints, unpack_ints
from frontend.ledger import Entry
from frontend.params import BadRequest, ModelLimits, check_features, check_tokens, session_sampling
from frontend.requests import News, Requests
from frontend.routing import Unroutable
from frontend.seam import BeginTurn, Deliver, Delivery, InputRendered, RenderInput, SessionOutput, ToConnection
from frontend.session import Client, Input, Session, Told

CONNECTIONS = "http"
"""The bus that WebSocket connections are said to be on, as peers. They do not come back."""


class Sessions:
    """The sessions of this frontend's clients. `News` is what a step gave, for effects to be put in their order."""

    def __init__(
        self, requests: Requests, counters: Counters, limits: ModelLimits, draw_seed: Callable[[], int], idle_s: float
    ) -> None:
        """`limits` may be replaced; `idle_s` is how long a session waits for a client that was lost."""
        self.limits = limits
        self._requests = requests
        self._counters = counters
        self._draw_seed = draw_seed
        self._idle_s = idle_s
        self._by_client: dict[Client, dict[str, Session]] = {}
        self._by_number: dict[int, Session] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def waiting(self) -> int:
        """How many of them wait for input, on their ranks."""
        return sum(session.waits and session.entry is not None for session in self._by_number.values())

    def find(self, peer: Peer, request_id: str) -> Session | None:
        """A client's session of this name."""
        return self._by_client.get((peer.bus, peer.index), {}).get(request_id)

    # What clients ask

    def open(self, peer: Peer, request: Generate, adapter: str, wall: float) -> list[Effect]:
        """Open a session, with its first turn; `wall` is its arrival time, in seconds since the epoch.

        `adapter` is the identity of the adapter that it names, or empty.

        Raises:
            BadRequest: it cannot be; the text says why.
            Unroutable: no rank takes it.
        """
        sampling = self._sampling(request.params)
        self._made += 1
        session = Session(
            number=self._made,
            client=(peer.bus, peer.index),
            request=request,
            sampling=sampling,
            peer=peer,
            over_seam=request.text_output or peer.bus == CONNECTIONS,
            arrival_time=wall,
            adapter=adapter,
        )
        one, effects = self._input(session, request)
        self._by_client.setdefault(session.client, {})[session.request_id] = session
        self._by_number[session.number] = session
        session.unsent.append(one)
        try:
            return [*effects, *self._send_inputs(session)]
        except Unroutable:
            self._forget(session)
            raise

    def append(self, peer: Peer, append: Append) -> list[Effect]:
        """Take an input of a session, or its close; refusals are among the effects."""
        session = self.find(peer, append.request_id)
        if session is None:
            return [self._unknown(peer, append.request_id)]
        turn = session.last_input() + 1
        if session.over:  # its client will hear so soon
            return self._refuse(session, "invalid", f"session {append.request_id} has ended", turn)
        if session.closing:
            return self._refuse(session, "invalid", f"session {append.request_id} is being closed", turn)
        if not append.resumable:
            session.closing = True
            session.unsent.append(self._new_input(session, EMPTY, close=True))
            return self._send_inputs(session)
        try:
            one, effects = self._input(session, append)
            if append.params is not None:
                one.sampling = self._sampling(append.params)
        except BadRequest as error:
            return self._refuse(session, "invalid", str(error), turn)
        session.unsent.append(one)
        return [*effects, *self._send_inputs(session)]

    def end_turn(self, peer: Peer, end: EndTurn) -> list[Effect]:
        """Have a turn stopped; one that has ended meanwhile is left as it is."""
        session = self.find(peer, end.request_id)
        if session is None:
            return [self._unknown(peer, end.request_id)]
        if session.over:
            return []
        if end.n < 0:
            return self._refuse(session, "invalid", f"n {end.n} is not allowed; it must be 0 or more")
        running = session.turn if session.running is not None else None
        if end.turn < 1 or end.turn > session.turn:
            runs = "no turn runs" if running is None else f"turn {running} runs"
            return self._refuse(session, "invalid", f"turn {end.turn} has not begun; {runs}")
        if end.turn != running or session.entry is None:
            self._counters.add("late_end_turns")
            return []
        return [self._requests.stop_turn(session.entry, end.turn, end.n)]

    def abort(self, peer: Peer, abort: Abort) -> list[Effect]:
        """End a session; the rank confirms it."""
        session = self.find(peer, abort.request_id)
        if session is None:
            return [self._unknown(peer, abort.request_id)]
        if session.over:
            return []
        if session.entry is not None:
            return self._requests.abort([session.entry], wanted=True)
        self._forget(session)
        return [to_client(peer, Finished(request_id=session.request_id, reason="abort"))]

    # Clients that come and go

    def client_up(self, peer: Peer) -> list[Effect]:
        """Give a client its sessions back, and tell it again what it may have missed."""
        sessions = self._by_client.get((peer.bus, peer.index), {})
        return [effect for session in list(sessions.values()) for effect in self._resume(session, peer)]

    def client_down(self, peer: Peer, now: float) -> list[Effect]:
        """Keep a lost client's sessions for it. What a connection has opened ends with it."""
        effects: list[Effect] = []
        for session in list(self._by_client.get((peer.bus, peer.index), {}).values()):
            if peer.bus == CONNECTIONS:
                effects += self._drop(session)
            elif peer in (session.peer, session.returning):
                session.peer = session.returning = None
                session.gone_since = now
                if session.entry is not None and not session.over_seam:
                    session.entry.on_its_own()
                    session.entry.wanted = False
        return effects

    def expire(self, now: float) -> list[Effect]:
        """End the sessions whose clients were lost too long ago."""
        effects: list[Effect] = []
        for session in list(self._by_number.values()):
            if session.peer is None and session.returning is None and now - session.gone_since > self._idle_s:
                self._counters.add("sessions_expired")
                effects += self._drop(session)
        return effects

    # What the HTTP side answers

    def rendered(self, answer: InputRendered) -> list[Effect]:
        """An input's text has become tokens, or cannot."""
        session = self._by_number.get(answer.session)
        one = next((one for one in session.unsent if one.number == answer.input), None) if session else None
        if session is None or one is None:
            return []  # the session has ended meanwhile
        code, sentence = answer.code, answer.message
        if not code:
            one.tokens = memoryview(bytes(one.prefix) + bytes(answer.token_ids))
            try:
                self._check_length(session, 0)
                return self._send_inputs(session)
            except BadRequest as error:
                code, sentence = "invalid", str(error)
            except Unroutable as error:
                code, sentence = "unavailable", str(error)
        return self._refuse_input(session, one, code, sentence)

    def output(self, output: SessionOutput) -> list[Effect]:
        """Send on what the HTTP side has made text of."""
        session = self._by_number.get(output.session)
        if session is None:
            return []
        message = output.message
        effects: list[Effect] = []
        if isinstance(message, SessionResumed) and session.returning is not None:
            session.peer, session.returning = session.returning, None
            effects = self._missed_errors(session)
        if session.peer is None:
            return []  # it is kept for when the client is back
        if isinstance(message, TurnFinished | Finished):
            self._sent(session, message)
        return [Send(session.peer, message), *effects]

    # What ranks tell

    def turn_ended(self, entry: Entry, ended: TurnEnded, news: News) -> list[Effect]:
        """A turn has ended, and all its tokens are in `entry`. The effects come after those of `news`."""
        session = entry.session
        assert session is not None
        running = session.running
        if running is None or ended.turn != session.turn:
            self._counters.add("invalid_outputs")
            return []
        start, output = session.tail(), memoryview(bytes(entry.output))
        session.context += running.tokens or EMPTY
        finished = TurnFinished(
            request_id=session.request_id,
            turn=ended.turn,
            reason=ended.reason,
            stop_reason=ended.stop_reason,
            prompt_tokens=len(session.context) // 4,
            output_tokens=output.nbytes // 4,
            kept_tokens=ended.kept_tokens,
            context_tokens=ended.context_tokens,
            cached_tokens=entry.cached_tokens,
        )
        kept = output[: 4 * ended.kept_tokens]
        session.context += kept
        session.cut = output[kept.nbytes :] if ended.reason == "length" else EMPTY
        session.output_tokens += output.nbytes // 4
        session.cached_tokens += entry.cached_tokens
        entry.clear_output()
        entry.cached_tokens = 0
        session.running = None
        self._counters.add(f"turns_ended/{ended.reason}")
        effects = self._tell(session, finished, Told(finished, output, start), entry, news)
        return [*effects, *self._begin_next(session)]

    def ended(self, entry: Entry, ended: RequestEnded, news: News) -> list[Effect]:
        """A session has ended. The effects come after those of `news`."""
        session = entry.session
        assert session is not None
        output = memoryview(bytes(entry.output))
        finished = Finished(
            request_id=session.request_id,
            reason=ended.reason,
            stop_reason=ended.stop_reason,
            message=ended.message,
            prompt_tokens=len(session.context) // 4 + (session.running.length if session.running else 0),
            output_tokens=session.output_tokens + output.nbytes // 4,
            cached_tokens=session.cached_tokens + entry.cached_tokens,
        )
        start = session.tail()
        session.over, session.entry = True, None
        session.unsent.clear()
        session.appended.clear()
        return self._tell(session, finished, Told(finished, output, start), entry, news)

    def refused(self, entry: Entry, error: Error) -> list[Effect]:
        """A rank refuses an input, or to stop a turn that has ended."""
        session = entry.session
        assert session is not None
        one = next((one for one in session.inputs() if one.sequence == error.sequence and not one.close), None)
        if one is None:
            self._counters.add("late_end_turns")
            return []
        return self._refuse_input(session, one, error.code, error.message)

    # Inputs

    def _input(self, session: Session, asked: Generate | Append) -> tuple[Input, list[Effect]]:
        """An input, and what has to be done for it to have tokens."""
        given = [one for one in (asked.text, asked.messages, asked.prompt_token_ids) if one is not None]
        if len(given) > 1:
            raise BadRequest("give the input as one of text, messages and prompt_token_ids")
        if asked.text is not None or asked.messages is not None:
            if asked.mm_features:
                raise BadRequest("mm_features need prompt_token_ids: their offsets count tokens")
            one = self._new_input(session, None)
            if asked.messages is not None and session.waits:
                one.prefix = session.cut
            opening = isinstance(asked, Generate)
            return one, [RenderInput(session.number, one.number, asked.text, asked.messages, opening)]
        tokens = asked.prompt_token_ids or []
        array = check_tokens(unpack_ints(tokens) if isinstance(tokens, memoryview) else tokens, self.limits)
        check_features(asked.mm_features, array.size)
        self._check_length(session, array.size)
        one = self._new_input(session, pack_ints(array))
        one.features = asked.mm_features
        return one, []

    def _new_input(self, session: Session, tokens: Ints | None, close: bool = False) -> Input:
        session.inputs_made += 1
        return Input(session.inputs_made, tokens, close=close)

    def _check_length(self, session: Session, more: int) -> None:
        """Refuse tokens that leave no room for output, as far as that is known before the turns that run and wait."""
        limit = self.limits.max_model_len
        length = session.length() + more
        if length >= limit:
            raise BadRequest(
                f"with this input the session has {length} tokens or more; with max_model_len {limit} it may have "
                f"{limit - 1}"
            )

    def _sampling(self, params: GenerateParams) -> Sampling:
        return session_sampling(params, self.limits, self._draw_seed() if params.seed is None else params.seed)

    def _send_inputs(self, session: Session) -> list[Effect]:
        """Give the rank the inputs that have their tokens, as far as none is before them that has not.

        Raises:
            Unroutable: no rank takes the session.
        """
        effects: list[Effect] = []
        while session.unsent and session.unsent[0].tokens is not None:
            one = session.unsent[0]
            if session.entry is None:
                effects.append(self._requests.open_session(session, one))
                session.turn, session.running = 1, one
            else:
                effects.append(self._requests.append(session.entry, one))
                session.appended.append(one)
            session.unsent.popleft()
            effects += self._begin(session) if session.running is one else self._begin_next(session)
        return effects

    def _begin_next(self, session: Session) -> list[Effect]:
        """Go on with the next input that the rank has."""
        if session.running is not None or not session.appended or session.appended[0].close:
            return []
        session.running = session.appended.popleft()
        session.turn += 1
        return self._begin(session)

    def _begin(self, session: Session) -> list[Effect]:
        return [_begin_turn(session, session.turn, session.tail())] if session.over_seam else []

    def _refuse_input(self, session: Session, one: Input, code: str, sentence: str) -> list[Effect]:
        """Take an input out, and tell the client. Without its first one there is no session."""
        turn = session.turn_of(one)
        effects = self._refuse(session, code, sentence, turn)
        if session.running is one:
            session.running = None
            session.turn -= 1
        else:
            (session.unsent if one in session.unsent else session.appended).remove(one)
        if session.entry is None:
            self._forget(session)
            return effects
        return [*effects, *self._begin_next(session), *self._send_inputs(session)]

    # What clients are told

    def _tell(
        self, session: Session, message: TurnFinished | Finished, told: Told, entry: Entry, news: News
    ) -> list[Effect]:
        """Tell of the end of a turn, or of the session, and keep it as long as the client may miss it."""
        session.told.append(told)
        if session.over_seam:
            news.tell(entry, message)
            if session.client[0] == CONNECTIONS:
                self._sent(session, message)
            return []  # others are sent it when it comes back as a SessionOutput
        if session.peer is None:
            return []
        self._sent(session, message)
        return [Send(session.peer, message)]

    def _sent(self, session: Session, message: TurnFinished | Finished) -> None:
        session.sent(message)
        if isinstance(message, Finished):
            self._forget(session)

    def _refuse(self, session: Session, code: str, sentence: str, turn: int = 0) -> list[Effect]:
        self._counters.add(f"inputs_refused/{code}")
        error = Error(code=code, message=sentence, request_id=session.request_id, turn=turn)
        if session.peer is None:
            session.told.append(Told(error))
            return []
        return [to_client(session.peer, error)]

    def _unknown(self, peer: Peer, request_id: str) -> Effect:
        sentence = f"request_id {request_id} is not an open session of yours"
        return to_client(peer, Error(code="unknown_request", message=sentence, request_id=request_id))

    def _resume(self, session: Session, peer: Peer) -> list[Effect]:
        """Tell a client that is back of a session, from the first token on that it may not have."""
        if session.over_seam and (session.entry is not None or session.over):
            session.returning = peer
            return _deliver_again(session)
        session.peer = peer
        effects: list[Effect] = [Send(peer, session.resumed())]
        for told in session.told:
            effects += [*_tokens(session, told.tokens), Send(peer, told.message)]
        if session.over:
            self._forget(session)
        elif session.entry is not None:
            self._requests.ledger.give(session.entry, peer)
            session.entry.wanted = True
            effects += _tokens(session, memoryview(bytes(session.entry.output)))
        ends = [told for told in session.told if isinstance(told.message, TurnFinished)]
        session.told = deque(ends[-1:])
        return effects

    def _missed_errors(self, session: Session) -> list[Effect]:
        """Send the refusals that came while the client was away; what else it missed comes from the HTTP side."""
        errors = [told.message for told in session.told if isinstance(told.message, Error)]
        session.told = deque(told for told in session.told if not isinstance(told.message, Error))
        return [Send(session.peer, error) for error in errors if session.peer is not None]

    # Endings

    def _drop(self, session: Session) -> list[Effect]:
        """End a session that nobody waits for any more."""
        self._forget(session)
        if session.entry is None:
            return []
        # The HTTP side has to hear of its end, too.
        return self._requests.abort([session.entry], wanted=session.over_seam)

    def _forget(self, session: Session) -> None:
        if self._by_number.pop(session.number, None) is None:
            return
        own = self._by_client[session.client]
        del own[session.request_id]
        if not own:
            del self._by_client[session.client]


def to_client(peer: Peer, message: Message) -> Effect:
    """The effect that tells a client something, wherever it is connected."""
    return ToConnection(peer.index, message) if peer.bus == CONNECTIONS else Send(peer, message)


def _tokens(session: Session, tokens: Ints) -> list[Effect]:
    """The effect that sends tokens of a turn again."""
    if session.peer is None or not tokens.nbytes:
        return []
    counts = pack_ints([tokens.nbytes // 4])
    return [Send(session.peer, TokenDeltas(request_ids=[session.request_id], tokens=tokens, counts=counts))]


def _begin_turn(session: Session, turn: int, context: Ints) -> BeginTurn:
    bus, index = session.client
    return BeginTurn(
        session=session.number,
        turn=turn,
        delivery=session.delivery,
        connection=index if bus == CONNECTIONS else None,
        request_id=session.request_id,
        text_output=session.request.text_output,
        token_ids=context,
    )


def _deliver_again(session: Session) -> list[Effect]:
    """Have the HTTP side make text once more of what the client may have missed."""

    def deliver(tokens: Ints, *messages: TurnFinished | Finished | SessionResumed) -> Deliver:
        return Deliver(0, [Delivery(session.delivery, tokens, messages=messages)])

    resumed = session.resumed()
    effects: list[Effect] = [_begin_turn(session, resumed.turn, EMPTY), deliver(EMPTY, resumed)]
    for told in session.told:
        if not isinstance(told.message, Error):
            turn = told.message.turn if isinstance(told.message, TurnFinished) else session.turn
            effects += [_begin_turn(session, turn, told.context), deliver(told.tokens, told.message)]
    if session.running is not None and session.entry is not None:
        effects += [
            _begin_turn(session, session.turn, session.tail()),
            deliver(memoryview(bytes(session.entry.output))),
        ]
    return effects
