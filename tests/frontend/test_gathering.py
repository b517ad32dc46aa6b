"""Who is sent what in one message when several events come before all is read, and in what order."""

from typing import Any

import msgspec
import pytest

from bus import messages as m
from bus.core import Drained, PeerUp, Received, Send
from bus.wire import pack_ints, unpack_ints
from frontend.gathering import MOST
from tests.frontend.driving import CLIENT, OTHER, RANKS, Engine, ended, outputs, singly


@pytest.fixture
def engine() -> Engine:
    """CLIENT knows no messages with several things, OTHER does."""
    engine = Engine().start()
    engine.feed(PeerUp(OTHER, m.PROTOCOL_MINOR))
    return engine


def generate(name: str, rank: int, peer: Any = OTHER) -> Received:
    return Received(peer, m.Generate(request_id=name, prompt_token_ids=[5, 6], text_output=False, rank=rank))


def from_rank(rank: int, message: m.Message) -> Received:
    return Received(RANKS[rank], message)


def sent(effects: list[Any]) -> list[Any]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


def begin(engine: Engine, *asked: Received) -> list[int]:
    """Handles of requests, which have each had a token."""
    engine.take()
    engine.feed_all(list(asked))
    adds = [(peer.index, add.handle) for peer, add in engine.sent]
    engine.take()
    for rank in (0, 1):
        handles = [handle for of, handle in adds if of == rank]
        engine.feed(from_rank(rank, outputs(handles, [0] * len(handles))))
    engine.take()
    return sorted(handle for _, handle in adds)


def test_requests_for_a_rank_go_together_in_their_order(engine: Engine) -> None:
    effects = engine.feed_all([generate(name, rank) for name, rank in (("a", 0), ("b", 1), ("c", 0), ("d", 0))])
    (first, several), (second, single) = sent(effects)
    assert (first, second) == (RANKS[0], RANKS[1])
    assert [(add.request_id, add.sequence) for add in several.requests] == [("a", 1), ("c", 2), ("d", 3)]
    assert (type(single), single.request_id) == (m.AddRequest, "b")


def test_a_rank_that_knows_no_better_is_sent_requests_one_by_one(engine: Engine) -> None:
    engine.feed(PeerUp(RANKS[0]))
    engine.load(0)
    effects = engine.feed_all([generate(name, 0) for name in "abc"])
    assert [type(message) for _, message in sent(effects)] == [m.AddRequest] * 3


def test_requests_do_not_wait_for_ever(engine: Engine) -> None:
    effects = []
    for number in range(MOST):
        assert not effects
        effects = engine.core.handle(generate(f"r{number}", 0))
    ((_, several),) = sent(effects)
    assert len(several.requests) == MOST
    assert engine.core.handle(Drained(0.0)) == []


def test_requests_together_are_no_larger_than_a_message_may_be() -> None:
    engine = Engine(max_message_bytes=2048).start()
    names = [str(number) + "x" * (number % 7 * 100) for number in range(30)]
    asked = [m.Generate(request_id=name, prompt_token_ids=[5], text_output=False, rank=0) for name in names]
    messages = [message for _, message in sent(engine.feed_all([Received(CLIENT, one) for one in asked]))]
    assert max(len(msgspec.msgpack.encode(message)) for message in messages) <= 2048
    assert len(messages) < len(names)
    assert [add.request_id for message in messages for add in singly(message)] == names


def test_an_abort_comes_after_its_request(engine: Engine) -> None:
    events = [generate("a", 0), generate("b", 0), Received(OTHER, m.Abort(request_id="a")), generate("c", 0)]
    assert [type(message) for _, message in sent(engine.feed_all(events))] == [
        m.AddRequests,
        m.AbortRequests,
        m.AddRequest,
    ]


def test_steps_of_both_ranks_and_of_one_reach_a_client_in_one_message(engine: Engine) -> None:
    a, b, c = begin(engine, generate("a", 0), generate("b", 1), generate("c", 0))
    steps = [
        from_rank(0, outputs([a, c], [1, 2])),
        from_rank(1, outputs([b], [3])),
        from_rank(0, outputs([a, c], [4, 5, 6, 7], counts=pack_ints([2, 2]))),
    ]
    ((peer, message),) = sent(engine.feed_all(steps))
    assert peer == OTHER
    assert message.request_ids == ["a", "c", "b"]
    assert unpack_ints(message.counts).tolist() == [3, 3, 1]
    assert unpack_ints(message.tokens).tolist() == [1, 4, 5, 2, 6, 7, 3]


def test_ends_come_after_the_tokens_in_one_message_with_them(engine: Engine) -> None:
    a, b, c = begin(engine, generate("a", 0), generate("b", 1), generate("c", 0, CLIENT))
    steps = [
        from_rank(0, outputs([a, c], [1, 2], ended=[ended(a), ended(c)])),
        from_rank(1, outputs([b], [3], ended=[ended(b)])),
    ]
    said = sent(engine.feed_all(steps))
    assert [(peer, type(message)) for peer, message in said] == [
        (OTHER, m.TokenDeltas),
        (CLIENT, m.TokenDeltas),
        (CLIENT, m.Finished),
    ]
    message = said[0][1]
    assert (message.request_ids, unpack_ints(message.tokens).tolist()) == (["a", "b"], [1, 3])
    assert [(end.request_id, end.output_tokens) for end in message.finished] == [("a", 2), ("b", 2)]
    assert said[1][1].finished == []


def test_tokens_of_other_sequences_of_a_rank_are_another_message(engine: Engine) -> None:
    a, b = begin(engine, generate("a", 0), generate("b", 0))
    steps = [
        from_rank(0, outputs([a, b], [1, 2], ended=[ended(b)])),
        from_rank(0, outputs([a], [3])),
        from_rank(0, outputs([a], [4])),
    ]
    first, second = (message for _, message in sent(engine.feed_all(steps)))
    assert (first.request_ids, [end.request_id for end in first.finished]) == (["a", "b"], ["b"])
    assert (second.request_ids, unpack_ints(second.tokens).tolist()) == (["a"], [3, 4])


def test_what_waits_goes_before_anything_else(engine: Engine) -> None:
    (a,) = begin(engine, generate("a", 0))
    events = [
        from_rank(0, outputs([a], [1])),
        Received(OTHER, m.Abort(request_id="unknown")),
        from_rank(0, outputs([a], [2])),
        from_rank(0, outputs([a], [3, 4], counts=pack_ints([2]), ended=[ended(a)])),
    ]
    said = [message for _, message in sent(engine.feed_all(events))]
    assert [type(message) for message in said] == [m.TokenDeltas, m.Error, m.TokenDeltas]
    assert unpack_ints(said[2].tokens).tolist() == [2, 3, 4]
    assert [end.request_id for end in said[2].finished] == ["a"]
