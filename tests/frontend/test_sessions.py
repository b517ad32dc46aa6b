"""Sessions in the frontend's core: every state, and every corner that a client can reach."""

from typing import Any

import pytest

from bus import messages as m
from bus.core import Peer, PeerDown, PeerUp, Posted, Received
from bus.journal.state import capture, restore
from bus.wire import pack_ints, unpack_ints
from frontend.seam import (
    BeginTurn,
    ConnectionClosed,
    Deliver,
    Delivery,
    InputRendered,
    RenderInput,
    SessionCall,
    SessionOutput,
    ToConnection,
)
from tests.frontend.driving import CLIENT, OTHER, RANKS, Engine, ended, outputs

BACK = Peer("client", "client", CLIENT.index, CLIENT.incarnation + 1)
IDLE_S = 300.0
ABORT = m.Abort(request_id="s")
CLOSE = m.Append(request_id="s", resumable=False)
GREEDY = m.GenerateParams(temperature=0.0, max_tokens=9)


class Session(Engine):
    """A session named s of CLIENT, as client and rank see it."""

    def __init__(self, prompt: Any = (5, 6), **fields: Any) -> None:
        super().__init__()
        self.start()
        self.ask(**{"request_id": "s", "prompt_token_ids": list(prompt), "resumable": True} | fields)
        self.rank = 0
        self.handle = 0
        if not fields.get("text"):
            self.rank, self.add = self.added()
            self.handle = self.add.handle

    def append(self, *tokens: int, peer: Peer = CLIENT, **fields: Any) -> Any:
        """What is sent because of an append."""
        values = {"request_id": "s", "prompt_token_ids": list(tokens)} | fields
        self.feed(Received(peer, m.Append(**values)))
        return self.take()

    def say(self, message: Any, peer: Peer = CLIENT) -> list[Any]:
        self.feed(Received(peer, message))
        return self.take()

    def step(self, *tokens: int, turns: Any = (), gone: Any = (), cached: int | None = None) -> None:
        """The session gets tokens on its rank."""
        started = [] if cached is None else [m.RequestStarted(handle=self.handle, cached_tokens=cached)]
        message = m.Outputs(
            handles=pack_ints([self.handle] if tokens else []),
            counts=pack_ints([len(tokens)] if tokens else []),
            tokens=pack_ints(list(tokens)),
            started=started,
            turns=list(turns),
            ended=list(gone),
        )
        self.feed(Received(RANKS[self.rank], message))

    def end(self, number: int, kept: int, context: int, reason: Any = "stop", **fields: Any) -> m.TurnEnded:
        return m.TurnEnded(
            handle=self.handle, turn=number, reason=reason, kept_tokens=kept, context_tokens=context, **fields
        )

    def number_of_sessions(self) -> float:
        self.tick(0.5)
        return float(self.up[-1].counters["sessions"])

    def counter(self, name: str) -> float:
        self.tick(0.5)
        return float(self.up[-1].counters.get(name, 0))


def tokens(messages: list[Any]) -> list[int]:
    return [token for one in messages if isinstance(one, m.TokenDeltas) for token in unpack_ints(one.tokens).tolist()]


def only(messages: list[Any]) -> Any:
    (message,) = messages
    return message


def test_a_session_goes_from_turn_to_turn_and_is_closed() -> None:
    session = Session(params=GREEDY)
    assert session.add.resumable
    assert session.add.sampling.temperature == 0.0
    session.step(11, 12, turns=[session.end(1, 1, 3, stop_reason=12)], cached=0)
    delta, finished = session.take(CLIENT)
    assert tokens([delta]) == [11, 12]
    assert finished == m.TurnFinished(
        request_id="s",
        turn=1,
        reason="stop",
        stop_reason=12,
        prompt_tokens=2,
        output_tokens=2,
        kept_tokens=1,
        context_tokens=3,
    )
    appended = only(session.append(7, 8))
    assert (appended.handle, appended.sampling, appended.close) == (session.handle, None, False)
    assert appended.sequence > session.add.sequence
    assert unpack_ints(appended.prompt_token_ids).tolist() == [7, 8]
    session.step(13, turns=[session.end(2, 0, 5)], cached=3)
    finished = session.take(CLIENT)[-1]
    assert (finished.turn, finished.prompt_tokens, finished.kept_tokens, finished.cached_tokens) == (2, 5, 0, 3)
    close = only(session.say(CLOSE))
    assert close.close
    session.step(gone=[ended(session.handle, "closed")])
    last = only(session.take(CLIENT))
    assert (last.reason, last.prompt_tokens, last.output_tokens, last.cached_tokens) == ("closed", 5, 3, 3)
    assert session.number_of_sessions() == 0
    assert session.append(1)[0].code == "unknown_request"


def test_appends_while_a_turn_runs_are_its_ranks_to_queue() -> None:
    session = Session()
    sent = [only(session.append(token)) for token in (7, 8)]
    assert [unpack_ints(one.prompt_token_ids).tolist() for one in sent] == [[7], [8]]
    for turn, context in ((1, 2), (2, 3), (3, 4)):
        session.step(20 + turn, turns=[session.end(turn, 0, context)])
    ends = [one for one in session.take(CLIENT) if isinstance(one, m.TurnFinished)]
    assert [(one.turn, one.prompt_tokens) for one in ends] == [(1, 2), (2, 3), (3, 4)]


def test_an_end_and_the_next_tokens_come_in_order_within_one_step() -> None:
    session = Session()
    session.append(7)
    session.say(CLOSE)
    session.step(
        21, turns=[session.end(1, 0, 2), session.end(2, 0, 3, "empty")], gone=[ended(session.handle, "closed")]
    )
    names = [type(one).__name__ for one in session.take(CLIENT)]
    assert names == ["TokenDeltas", "TurnFinished", "TurnFinished", "Finished"]


@pytest.mark.parametrize("fields", [{"prompt_token_ids": []}, {"prompt_token_ids": None}])
def test_it_may_be_opened_empty(fields: Any) -> None:
    session = Session(**fields)
    assert not session.add.prompt_token_ids.nbytes
    session.step(turns=[session.end(1, 0, 0, "empty")])
    assert only(session.take(CLIENT)).reason == "empty"
    assert unpack_ints(only(session.append(4)).prompt_token_ids).tolist() == [4]


def test_zero_tokens_are_an_input_like_others() -> None:
    session = Session()
    session.step(3, turns=[session.end(1, 0, 2)])
    session.take()
    assert not only(session.append()).prompt_token_ids.nbytes
    session.step(turns=[session.end(2, 0, 2, "empty")])
    finished = only(session.take(CLIENT))
    assert (finished.turn, finished.reason, finished.output_tokens) == (2, "empty", 0)


def test_parameters_replace_the_old_ones_whole_and_left_out_are_the_ranks_to_know() -> None:
    session = Session(params=m.GenerateParams(temperature=0.5, top_k=3, seed=5))
    assert (session.add.sampling.seed, session.add.sampling.max_tokens) == (5, 64)
    assert only(session.append(1)).sampling is None
    first, second = (only(session.append(1, params=m.GenerateParams(min_p=0.1))).sampling for _ in range(2))
    assert (first.temperature, first.top_k, first.min_p) == (1.0, 0, 0.1)
    assert first.seed != second.seed
    assert only(session.append(1, params=m.GenerateParams(seed=8))).sampling.seed == 8


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 2}, "n 2 is not allowed in a session; it must be 1"),
        ({"stop": ["x"]}, "stop strings are not allowed in a session; use stop_token_ids"),
        ({"include_stop_str_in_output": True}, "stop strings"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"max_tokens": 65}, "max_tokens 65 is more than max_model_len 64"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"seed": -1}, "seed"),
    ],
)
def test_parameters_that_are_not_allowed_refuse_the_input_and_not_the_session(params: Any, words: str) -> None:
    session = Session()
    error = only(session.append(1, params=m.GenerateParams(**params)))
    assert words in error.message
    assert (error.code, error.request_id, error.turn) == ("invalid", "s", 2)
    assert isinstance(only(session.append(1)), m.AppendInput)
    engine = Engine().start()
    engine.ask(resumable=True, params=m.GenerateParams(**params))
    error = only(engine.take())
    assert words in error.message
    assert error.turn == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": [100]}, "token id 100 is not in the vocabulary"),
        ({"prompt_token_ids": [-1]}, "token id -1"),
        ({"prompt_token_ids": [1] * 62}, "has 64 tokens or more; with max_model_len 64 it may have 63"),
        ({"text": "a"}, "one of text, messages and prompt_token_ids"),
        (
            {"text": "a", "prompt_token_ids": None, "mm_features": [m.MultimodalFeature(hash="h", offset=0, length=1)]},
            "need",
        ),
        (
            {"mm_features": [m.MultimodalFeature(hash="h", offset=1, length=1)]},
            "the feature 'h' with 1 tokens from offset 1",
        ),
        ({"mm_features": [m.MultimodalFeature(hash="h", offset=-1, length=1)]}, "offset -1"),
        ({"mm_features": [m.MultimodalFeature(hash="h", offset=0, length=0)]}, "0 tokens"),
    ],
)
def test_an_input_that_cannot_be_taken_is_refused_with_a_sentence(fields: Any, words: str) -> None:
    session = Session()
    error = only(session.append(**{"prompt_token_ids": [5]} | fields))
    assert words in error.message
    assert error.turn == 2
    assert isinstance(only(session.append(1)), m.AppendInput)


def test_features_go_to_the_rank() -> None:
    feature = m.MultimodalFeature(hash="h", offset=0, length=2)
    session = Session(mm_features=[feature])
    assert session.add.mm_features == [feature]
    assert only(session.append(1, 2, mm_features=[feature])).mm_features == [feature]
    session.ask(request_id="plain", mm_features=[feature])
    assert session.added()[1].mm_features == [feature]


def test_how_full_a_session_is_counts_what_waits() -> None:
    session = Session(prompt=[1] * 20)
    session.append(*[1] * 20)
    assert "has 65 tokens or more" in only(session.append(*[1] * 25)).message
    session.step(2, turns=[session.end(1, 0, 20)])
    session.take()
    assert isinstance(only(session.append(*[1] * 23)), m.AppendInput)


def test_ids_are_each_clients_own() -> None:
    session = Session()
    session.feed(PeerUp(OTHER))
    assert session.append(1, peer=OTHER)[0].code == "unknown_request"
    assert session.say(m.EndTurn(request_id="s", turn=1, n=0), OTHER)[0].code == "unknown_request"
    assert session.say(ABORT, OTHER)[0].code == "unknown_request"
    session.ask(request_id="s", resumable=True)
    assert "in use" in only(session.take(CLIENT)).message
    session.ask(peer=OTHER, request_id="s", resumable=True)
    assert isinstance(only(session.take()), m.AddRequest)


@pytest.mark.parametrize("close", [True, False])
def test_an_id_may_be_used_again_after_the_end(close: bool) -> None:
    session = Session()
    session.say(CLOSE if close else ABORT)
    session.ask(request_id="s", resumable=True)
    assert "in use" in only(session.take(CLIENT)).message
    session.step(gone=[ended(session.handle, "closed" if close else "abort")])
    session.take()
    session.ask(request_id="s", resumable=True)
    second = session.added()[1]
    assert second.handle != session.handle
    session.step(9)  # late output of the first
    assert session.take(CLIENT) == []


def test_a_session_being_closed_takes_nothing_more() -> None:
    session = Session()
    session.append(7)
    session.say(CLOSE)
    for late in (session.append(1), session.say(CLOSE)):
        assert "is being closed" in only(late).message
    session.step(3, turns=[session.end(1, 0, 2)])
    session.step(4, turns=[session.end(2, 0, 3)], gone=[ended(session.handle, "closed")])
    assert [type(one).__name__ for one in session.take(CLIENT)][-2:] == ["TurnFinished", "Finished"]


@pytest.mark.parametrize(
    "message", [CLOSE, ABORT, m.Append(request_id="s", text="x"), m.EndTurn(request_id="s", turn=1, n=1)]
)
def test_an_unknown_session_is_an_error(message: Any) -> None:
    engine = Engine().start()
    engine.feed(Received(CLIENT, message))
    error = only(engine.take())
    assert (error.code, error.request_id, error.turn) == ("unknown_request", "s", 0)


def test_a_closes_own_tokens_and_parameters_are_ignored() -> None:
    session = Session()
    bad = m.Append(request_id="s", resumable=False, prompt_token_ids=[1000], text="x", params=m.GenerateParams(n=9))
    close = only(session.say(bad))
    assert (close.close, close.prompt_token_ids.nbytes, close.sampling) == (True, 0, None)


# Stopping turns


def test_a_running_turn_can_be_stopped() -> None:
    session = Session()
    session.step(3, 4, 5)
    session.take()
    stop = only(session.say(m.EndTurn(request_id="s", turn=1, n=1)))
    assert (stop.handle, stop.turn, stop.n) == (session.handle, 1, 1)
    session.step(turns=[session.end(1, 1, 3, "interrupted")])
    finished = only(session.take(CLIENT))
    assert (finished.output_tokens, finished.kept_tokens, finished.context_tokens) == (3, 1, 3)


@pytest.mark.parametrize(
    ("turn", "n", "words"),
    [
        (2, 0, "turn 2 has not begun; turn 1 runs"),
        (0, 0, "turn 0 has not begun"),
        (1, -1, "n -1 is not allowed; it must be 0 or more"),
    ],
)
def test_what_cannot_be_stopped_is_said(turn: int, n: int, words: str) -> None:
    session = Session()
    session.append(7)
    error = only(session.say(m.EndTurn(request_id="s", turn=turn, n=n)))
    assert words in error.message
    assert error.turn == 0  # no input is refused


def test_a_turn_that_has_ended_meanwhile_is_left_as_it_is() -> None:
    session = Session()
    session.step(3, turns=[session.end(1, 0, 2)])
    session.take()
    assert session.say(m.EndTurn(request_id="s", turn=1, n=0)) == []
    assert "turn 2 has not begun; no turn runs" in only(session.say(m.EndTurn(request_id="s", turn=2, n=0))).message
    session.append(1)
    stop = only(session.say(m.EndTurn(request_id="s", turn=2, n=0)))
    error = m.Error(code="invalid", message="it has ended", handle=session.handle, sequence=stop.sequence)
    session.feed(Received(RANKS[session.rank], error))  # the rank was faster
    assert session.take() == []


# Refusals of the rank


def test_an_input_that_the_rank_refuses_takes_no_turn() -> None:
    session = Session()
    refused, taken = only(session.append(*[1] * 30)), only(session.append(2))
    session.step(3, 4, turns=[session.end(1, 1, 3)])
    session.take()
    error = m.Error(code="invalid", message="too long", handle=session.handle, sequence=refused.sequence)
    session.feed(Received(RANKS[session.rank], error))
    assert only(session.take(CLIENT)) == m.Error(code="invalid", message="too long", request_id="s", turn=2)
    session.step(5, turns=[session.end(2, 0, 4)])
    assert session.take(CLIENT)[-1].turn == 2
    assert taken.sequence > refused.sequence
    session.append(1)
    session.step(5, turns=[session.end(3, 0, 5)])
    assert session.take(CLIENT)[-1].prompt_tokens == 5


def test_a_session_that_the_rank_refuses_ends_with_its_sentence() -> None:
    session = Session()
    session.append(1)
    session.step(gone=[ended(session.handle, "error", code="invalid", message="no room")])
    finished = only(session.take(CLIENT))
    assert (finished.reason, finished.message) == ("error", "no room")
    assert session.number_of_sessions() == 0


def test_a_lost_rank_ends_a_session_by_an_error() -> None:
    session = Session()
    session.step(3, turns=[session.end(1, 0, 2)])
    session.take()
    session.feed(PeerDown(RANKS[session.rank], "gone"))
    finished = only(session.take(CLIENT))
    assert (finished.reason, "was lost" in finished.message) == ("error", True)
    assert session.append(1)[0].code == "unknown_request"


def test_a_turn_that_cannot_be_is_dropped_and_counted() -> None:
    session = Session()
    session.step(3, turns=[session.end(2, 0, 2)])
    assert [type(one).__name__ for one in session.take(CLIENT)] == ["TokenDeltas"]
    assert session.counter("invalid_outputs") == 1
    session.step(4, turns=[session.end(1, 1, 3)])
    session.step(5, turns=[session.end(2, 0, 3)])
    assert [one.turn for one in session.take(CLIENT) if isinstance(one, m.TurnFinished)] == [1]


def test_a_session_that_waits_is_no_unfinished_request() -> None:
    session = Session()
    assert session.counter("unfinished_requests") == 1
    session.step(3, turns=[session.end(1, 0, 2)])
    assert (session.counter("unfinished_requests"), session.counter("sessions")) == (0, 1)
    session.append(1)
    assert session.counter("unfinished_requests") == 1


# Clients that come and go


def test_a_client_that_is_back_goes_on_where_it_was() -> None:
    session = Session()
    session.step(3, turns=[session.end(1, 0, 2)])
    session.append(7)
    session.step(4, 5)
    session.take()
    session.feed(PeerDown(CLIENT, "gone"))
    session.step(6)
    assert session.take() == []
    session.feed(PeerUp(BACK))
    resumed, again, end, rest = session.take(BACK)
    assert resumed == m.SessionResumed(request_id="s", turn=1, inputs=2)
    assert (tokens([again]), end.turn, tokens([rest])) == ([3], 1, [4, 5, 6])
    session.step(8, turns=[session.end(2, 3, 6)])
    assert tokens(session.take(BACK)) == [8]
    assert isinstance(only(session.append(1, peer=BACK)), m.AppendInput)


def test_nothing_that_happened_meanwhile_is_missed() -> None:
    session = Session()
    refused = only(session.append(1))
    session.append(2)
    session.say(CLOSE)
    session.feed(PeerDown(CLIENT, "gone"))
    session.step(3, turns=[session.end(1, 0, 2)])
    error = m.Error(code="invalid", message="no", handle=session.handle, sequence=refused.sequence)
    session.feed(Received(RANKS[session.rank], error))
    session.step(4, turns=[session.end(2, 0, 3)], gone=[ended(session.handle, "closed")])
    session.feed(PeerUp(BACK))
    resumed, *rest = session.take(BACK)
    assert (resumed.turn, resumed.inputs) == (1, 3)
    assert tokens(rest) == [3, 4]
    said = [(type(one).__name__, getattr(one, "turn", 0)) for one in rest if not isinstance(one, m.TokenDeltas)]
    assert said == [("TurnFinished", 1), ("Error", 2), ("TurnFinished", 2), ("Finished", 0)]
    assert session.number_of_sessions() == 0


def test_a_client_may_come_back_on_another_connection_of_the_same_start() -> None:
    session = Session()
    session.feed(PeerDown(CLIENT, "it has begun again"))
    session.feed(PeerUp(CLIENT))
    assert isinstance(only(session.take(CLIENT)), m.SessionResumed)
    session.step(3)
    assert tokens(session.take(CLIENT)) == [3]


def test_a_session_whose_client_does_not_come_back_ends() -> None:
    session = Session()
    session.feed(PeerDown(CLIENT, "gone"))
    session.tick(IDLE_S)
    assert session.take() == []
    session.tick(IDLE_S + 1)
    assert unpack_ints(only(session.take(RANKS[session.rank])).handles).tolist() == [session.handle]
    session.step(3, turns=[session.end(1, 0, 2)], gone=[ended(session.handle, "abort")])
    session.feed(PeerUp(BACK))
    assert session.take() == []
    assert (session.number_of_sessions(), session.counter("unfinished_requests")) == (0, 0)
    assert session.append(1, peer=BACK)[0].code == "unknown_request"


def test_a_client_that_is_there_may_be_silent() -> None:
    session = Session()
    session.step(3, turns=[session.end(1, 0, 2)])
    session.take()
    session.tick(10 * IDLE_S)
    assert isinstance(only(session.append(1)), m.AppendInput)


# Text: the HTTP side tokenises and detokenises


def rendering(session: Engine) -> RenderInput:
    found = [effect for effect in session.up if isinstance(effect, RenderInput)]
    session.up = [effect for effect in session.up if not isinstance(effect, RenderInput)]
    return only(found)


def rendered(session: Engine, asked: RenderInput, *ids: int, **fields: Any) -> None:
    session.feed(
        Posted(InputRendered(session=asked.session, input=asked.input, token_ids=pack_ints(list(ids)), **fields))
    )


def text_session(**fields: Any) -> Session:
    values = {"prompt_token_ids": None, "text": "hello", "text_output": True} | fields
    session = Session(**values)
    rendered(session, rendering(session), 5, 6)
    session.rank, session.add = session.added()
    session.handle = session.add.handle
    return session


def delivered(session: Engine) -> list[Delivery]:
    found = [output for effect in session.up if isinstance(effect, Deliver) for output in effect.outputs]
    session.up = [effect for effect in session.up if not isinstance(effect, Deliver | BeginTurn)]
    return found


def test_text_is_tokenised_and_comes_back_as_text() -> None:
    session = text_session()
    begin = only([effect for effect in session.up if isinstance(effect, BeginTurn)])
    assert (begin.request_id, begin.text_output, begin.connection) == ("s", True, None)
    assert unpack_ints(begin.token_ids).tolist() == [5, 6]
    session.step(7, 8, turns=[session.end(1, 1, 3)])
    assert session.take() == []
    output = only(delivered(session))
    assert (output.request_id, unpack_ints(output.token_ids).tolist()) == (begin.delivery, [7, 8])
    (finished,) = output.messages
    for message in (m.Delta(request_id="s", text="x"), finished):
        session.feed(Posted(SessionOutput(session=begin.session, message=message)))
    assert [type(one).__name__ for one in session.take(CLIENT)] == ["Delta", "TurnFinished"]


def test_what_comes_behind_text_waits_for_its_tokens() -> None:
    session = Session(prompt_token_ids=None, text="hello")
    first = rendering(session)
    assert first.opening
    assert session.append(9) == []
    assert session.append(prompt_token_ids=None, text="more") == []
    second = rendering(session)
    assert not second.opening
    assert session.say(CLOSE) == []
    rendered(session, second, 8)
    assert session.take() == []
    rendered(session, first, 5)
    add, *rest = session.take()
    assert isinstance(add, m.AddRequest)
    assert [unpack_ints(one.prompt_token_ids).tolist() for one in rest] == [[9], [8], []]
    assert [one.close for one in rest] == [False, False, True]


@pytest.mark.parametrize("first", [True, False])
def test_text_that_cannot_be_tokenised_refuses_its_input(first: bool) -> None:
    session = Session(prompt_token_ids=None, text="hello") if first else Session()
    if not first:
        session.append(prompt_token_ids=None, text="more")
    asked = rendering(session)
    session.append(4)
    rendered(session, asked, code="invalid", message="no such text")
    messages = session.take()
    error = next(one for one in messages if isinstance(one, m.Error))
    assert (error.message, error.turn) == ("no such text", 1 if first else 2)
    assert session.number_of_sessions() == (0 if first else 1)
    appended = [unpack_ints(one.prompt_token_ids).tolist() for one in messages if isinstance(one, m.AppendInput)]
    assert appended == ([] if first else [[4]])


def test_text_that_is_too_long_refuses_its_input() -> None:
    session = Session()
    session.append(prompt_token_ids=None, text="much")
    rendered(session, rendering(session), *[1] * 62)
    assert "has 64 tokens or more" in only(session.take()).message


def test_an_abort_while_the_text_is_tokenised_ends_it_at_once() -> None:
    session = Session(prompt_token_ids=None, text="hello")
    asked = rendering(session)
    assert only(session.say(ABORT)) == m.Finished(request_id="s", reason="abort")
    rendered(session, asked, 5)
    assert session.take() == []
    assert session.number_of_sessions() == 0


def test_text_that_is_tokenised_after_the_end_is_nobodys() -> None:
    session = text_session()
    session.append(prompt_token_ids=None, text="more")
    asked = rendering(session)
    session.step(gone=[ended(session.handle, "abort")])
    (finished,) = only(delivered(session)).messages
    rendered(session, asked, code="invalid", message="bad")
    assert session.take() == []
    session.feed(Posted(SessionOutput(session=1, message=finished)))
    assert session.take(CLIENT) == [finished]
    assert session.number_of_sessions() == 0


def test_a_chat_message_brings_back_the_token_that_its_answers_length_has_cut() -> None:
    session = Session()
    session.step(3, 4, turns=[session.end(1, 1, 3, "length")])
    session.take()
    session.append(prompt_token_ids=None, messages=[{"role": "user", "content": "?"}])
    rendered(session, rendering(session), 8)
    assert unpack_ints(only(session.take()).prompt_token_ids).tolist() == [4, 8]
    session.step(3, 2, turns=[session.end(2, 1, 6)])
    session.take()
    session.append(prompt_token_ids=None, messages=[{"role": "user", "content": "?"}])
    rendered(session, rendering(session), 2, 8)  # the template writes the end-of-message token itself
    assert unpack_ints(only(session.take()).prompt_token_ids).tolist() == [2, 8]


def test_text_begins_again_for_a_client_that_is_back() -> None:
    session = text_session()
    session.step(7, 8, turns=[session.end(1, 1, 3)])
    (finished,) = only(delivered(session)).messages
    number = next(iter(session.core._sessions._by_number))
    session.feed(Posted(SessionOutput(session=number, message=finished)))
    session.append(9)
    session.step(4)
    session.take()
    session.feed(PeerDown(CLIENT, "gone"))
    session.step(5)
    session.feed(Posted(SessionOutput(session=number, message=m.Delta(request_id="s", text="late"))))
    session.up.clear()
    session.feed(PeerUp(BACK))
    assert session.take() == []
    begins = [unpack_ints(effect.token_ids).tolist() for effect in session.up if isinstance(effect, BeginTurn)]
    assert begins == [[], [5, 6], [5, 6, 7, 9]]
    again = delivered(session)
    assert again[0].messages == (m.SessionResumed(request_id="s", turn=1, inputs=2),)
    assert [unpack_ints(output.token_ids).tolist() for output in again[1:]] == [[7, 8], [4, 5]]
    session.feed(Posted(SessionOutput(session=number, message=m.Delta(request_id="s", text="stale"))))
    session.append(1000, peer=BACK)
    assert session.take() == []  # not before it knows that it is back
    session.feed(Posted(SessionOutput(session=number, message=again[0].messages[0])))
    assert [type(one).__name__ for one in session.take(BACK)] == ["SessionResumed", "Error"]
    session.feed(Posted(SessionOutput(session=number, message=m.Delta(request_id="s", text="x"))))
    assert only(session.take(BACK)).text == "x"


# WebSocket connections


def test_a_connection_holds_a_session_of_its_own() -> None:
    engine = Engine().start()
    opening = m.Generate(request_id="s", prompt_token_ids=[5, 6], resumable=True, text_output=False)
    engine.feed(Posted(SessionCall(connection=4, message=opening)))
    rank, add = engine.added()
    begin = only([effect for effect in engine.up if isinstance(effect, BeginTurn)])
    assert (begin.connection, begin.text_output) == (4, False)
    engine.feed(Posted(SessionCall(connection=5, message=m.Append(request_id="s", prompt_token_ids=[1]))))
    refusal = engine.up[-1]
    assert isinstance(refusal, ToConnection)
    assert (refusal.connection, refusal.message.code) == (5, "unknown_request")
    engine.feed(Received(RANKS[rank], outputs([add.handle], [9])))
    assert unpack_ints(only(delivered(engine)).token_ids).tolist() == [9]
    engine.feed(Posted(ConnectionClosed(connection=4)))
    assert unpack_ints(only(engine.take()).handles).tolist() == [add.handle]
    engine.feed(Received(RANKS[rank], outputs([], [], ended=[ended(add.handle, "abort")])))
    assert only(delivered(engine)).messages[0].reason == "abort"  # so that the HTTP side forgets it
    engine.tick(1.0)
    assert engine.up[-1].counters["sessions"] == 0


def test_a_replay_may_begin_in_the_middle_of_sessions() -> None:
    session = text_session()
    session.ask(request_id="t", resumable=True)
    handle = session.added()[1].handle
    session.append(9)
    session.step(7)
    session.core = restore(capture(session.core), Engine().core)
    session.take()
    session.up.clear()
    session.step(8, turns=[session.end(1, 1, 3)])
    assert [type(effect).__name__ for effect in session.up] == ["Deliver", "BeginTurn"]
    session.feed(Received(RANKS[1 - session.rank], outputs([handle], [5])))
    assert tokens(session.take(CLIENT)) == [5]
    session.say(m.Abort(request_id="t"))
    session.feed(Received(RANKS[1 - session.rank], outputs([], [], ended=[ended(handle, "abort")])))
    assert only(session.take(CLIENT)).request_id == "t"
