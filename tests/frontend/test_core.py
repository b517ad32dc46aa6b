"""The frontend's core, driven by events: requests, aborts, losses, commands, and what is refused."""

from typing import Any

import pytest

from bus import messages as m
from bus.core import Drained, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick
from bus.sampling import pooled
from bus.wire import pack_floats, pack_ints, unpack_ints
from frontend.seam import (
    AbortCall,
    AbortText,
    AddCall,
    CommandCall,
    CommandResult,
    Deliver,
    RenderText,
    StatusUpdate,
    TextOutput,
    TextRefused,
    TextRendered,
)
from tests.frontend.driving import CLIENT, EXECUTOR, OTHER, RANKS, SAMPLING, Engine, ended, outputs


@pytest.fixture
def engine() -> Engine:
    return Engine().start()


def test_a_request_goes_to_a_rank_and_its_tokens_come_back(engine: Engine) -> None:
    engine.ask(params=m.GenerateParams(max_tokens=3, stop_token_ids=[9]), cache_salt="s")
    rank, add = engine.added()
    assert unpack_ints(add.prompt_token_ids).tolist() == [5, 6]
    assert (add.sampling.max_tokens, add.sampling.eos_token_id, add.sampling.stop_token_ids) == (3, 2, [9, 3])
    started = m.RequestStarted(handle=add.handle, cached_tokens=1)
    engine.feed(Received(RANKS[rank], outputs([add.handle], [41], started=[started])))
    engine.feed(Received(RANKS[rank], outputs([add.handle], [42], ended=[ended(add.handle, stop_reason=9)])))
    first, second, last = engine.take(CLIENT)
    assert [unpack_ints(delta.tokens).tolist() for delta in (first, second)] == [[41], [42]]
    assert last == m.Finished(
        request_id="a", reason="stop", stop_reason=9, prompt_tokens=2, output_tokens=2, cached_tokens=1
    )
    engine.feed(Received(RANKS[rank], outputs([add.handle], [43])))
    assert engine.take(CLIENT) == []


def test_a_client_gets_all_tokens_of_a_step_in_one_message(engine: Engine) -> None:
    engine.feed(PeerUp(OTHER))
    handles = []
    for name, peer in (("a", CLIENT), ("b", CLIENT), ("c", OTHER)):
        engine.ask(peer, request_id=name, rank=0)
        handles.append(engine.added()[1].handle)
    engine.feed(Received(RANKS[0], outputs(handles, [1, 2, 3])))
    assert engine.take(CLIENT) == [m.TokenDeltas(request_ids=["a", "b"], tokens=pack_ints([1, 2]))]
    assert engine.take(OTHER) == [m.TokenDeltas(request_ids=["c"], tokens=pack_ints([3]))]


def test_counts_split_the_tokens(engine: Engine) -> None:
    engine.ask(request_id="a", rank=0)
    a = engine.added()[1].handle
    engine.ask(request_id="b", rank=0, params=m.GenerateParams(logprobs=0))
    b = engine.added()[1].handle
    logprobs = m.Logprobs(
        owner=b, positions=3, token_ids=pack_ints([2, 3, 4]), values=pack_floats([0, 0, 0]), ranks=pack_ints([1, 1, 1])
    )
    message = m.Outputs(
        handles=pack_ints([a, b]), counts=pack_ints([2, 3]), tokens=pack_ints([0, 1, 2, 3, 4]), logprobs=[logprobs]
    )
    engine.feed(Received(RANKS[0], message))
    batch, delta = engine.take(CLIENT)
    assert batch == m.TokenDeltas(request_ids=["a"], counts=pack_ints([2]), tokens=pack_ints([0, 1]))
    assert (delta.request_id, unpack_ints(delta.token_ids).tolist(), delta.logprobs.owner) == ("b", [2, 3, 4], 0)
    wrong = m.Outputs(handles=pack_ints([a, b]), counts=pack_ints([1, 9]), tokens=pack_ints([1]))
    engine.feed(Received(RANKS[0], wrong))
    assert engine.take() == []


def test_log_probabilities_of_a_prompt_come_before_its_first_token(engine: Engine) -> None:
    """In messages of their own, with those of the first token beside them or not, and over the seam with the rest."""
    engine.ask(request_id="a", rank=0, params=m.GenerateParams(prompt_logprobs=0))
    engine.ask(request_id="b", rank=0, params=m.GenerateParams(prompt_logprobs=0, logprobs=0, n=2))
    engine.feed(Posted(AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=SAMPLING, rank=0)))
    adds = [message for message in engine.take() if isinstance(message, m.AddRequest)]
    assert [add.sampling.prompt_logprobs for add in adds] == [0, 0, 0, None]
    a, _, b, h = (add.handle for add in adds)

    def found(owner: int, position: int) -> m.Logprobs:
        values = pack_floats([0.0])
        return m.Logprobs(
            owner=owner,
            positions=1,
            token_ids=pack_ints([7]),
            values=values,
            ranks=pack_ints([1]),
            prompt_position=position,
        )

    engine.feed(Received(RANKS[0], outputs([], [], logprobs=[found(a, 1), found(h, 1)])))
    (delta,) = engine.take(CLIENT)
    assert (delta.request_id, delta.token_ids.nbytes, delta.logprobs) == ("a", 0, found(0, 1))
    assert engine.up[-1].outputs[0].prompt_logprobs == found(h, 1)
    several = [found(b, 1), found(a, 2), found(b, 0), found(99, 1)]
    engine.feed(Received(RANKS[0], outputs([a, b, h], [4, 5, 6], logprobs=several)))
    first, second, tokens, drawn = engine.take(CLIENT)
    assert [(delta.request_id, delta.index, delta.logprobs.prompt_position) for delta in (first, second)] == [
        ("b", 1, 1),
        ("a", 0, 2),
    ]
    assert tokens == m.TokenDeltas(request_ids=["a"], tokens=pack_ints([4]))
    assert (unpack_ints(drawn.token_ids).tolist(), drawn.logprobs) == ([5], found(1, 0))


def test_children_draw_with_seeds_of_their_own_and_end_on_their_own(engine: Engine) -> None:
    engine.ask(params=m.GenerateParams(n=3, seed=11))
    adds = [(peer, message) for peer, message in engine.sent if isinstance(message, m.AddRequest)]
    adds.sort(key=lambda sent: sent[1].request_id)
    assert [add.sampling.seed for _, add in adds] == [11, 12, 13]
    assert {peer.index for peer, _ in adds} == {0, 1}
    engine.take()
    for peer, add in reversed(adds):
        engine.feed(Received(peer, outputs([], [], ended=[ended(add.handle, "length")])))
    assert [message.index for message in engine.take(CLIENT)] == [2, 1, 0]


def test_unseeded_requests_get_different_seeds_and_the_same_again_in_a_replay() -> None:
    def seeds() -> list[int]:
        engine = Engine().start()
        for name in "abc":
            engine.ask(request_id=name)
        return [message.sampling.seed for _, message in engine.sent if isinstance(message, m.AddRequest)]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1] * 64}, "has 64 tokens; with max_model_len 64 it may have 63"),
        ({"prompt_token_ids": [100]}, "token id 100 is not in the vocabulary; ids go from 0 to 99"),
        ({"prompt_token_ids": [-1]}, "token id -1"),
        ({"prompt_token_ids": [2**40]}, "token id 1099511627776"),
        ({"prompt_token_ids": None}, "exactly one of"),
        ({"text": "a"}, "exactly one of"),
        ({"request_id": ""}, "request_id is empty"),
        ({"params": m.GenerateParams(max_tokens=63)}, "at most 62"),
        ({"params": m.GenerateParams(max_tokens=0)}, "max_tokens 0"),
        ({"params": m.GenerateParams(min_tokens=9, max_tokens=8)}, "min_tokens 9"),
        ({"params": m.GenerateParams(temperature=-1.0)}, "temperature -1.0"),
        ({"params": m.GenerateParams(temperature=float("nan"))}, "temperature nan"),
        ({"params": m.GenerateParams(temperature=float("inf"))}, "temperature inf"),
        ({"params": m.GenerateParams(top_p=0.0)}, "top_p"),
        ({"params": m.GenerateParams(top_p=1.5)}, "top_p 1.5"),
        ({"params": m.GenerateParams(min_p=2.0)}, "min_p"),
        ({"params": m.GenerateParams(top_k=-1)}, "top_k"),
        ({"params": m.GenerateParams(n=0)}, "n 0"),
        ({"params": m.GenerateParams(n=1000)}, "n 1000"),
        ({"params": m.GenerateParams(seed=-1)}, "seed"),
        ({"params": m.GenerateParams(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"params": m.GenerateParams(presence_penalty=3.0)}, "presence_penalty"),
        ({"params": m.GenerateParams(logit_bias={100: 1.0})}, "logit_bias names token 100"),
        ({"params": m.GenerateParams(logit_bias={1: float("inf")})}, "finite"),
        ({"params": m.GenerateParams(allowed_token_ids=[])}, "must be left out or not empty"),
        ({"params": m.GenerateParams(stop_token_ids=[-5])}, "stop_token_ids names token -5"),
        ({"params": m.GenerateParams(stop=["x"])}, "stop needs text"),
        ({"params": m.GenerateParams(bad_words=["x"])}, "bad_words needs text"),
        ({"params": m.GenerateParams(prompt_logprobs=101)}, "prompt_logprobs 101 is not allowed"),
        ({"params": m.GenerateParams(prompt_logprobs=1), "resumable": True}, "prompt_logprobs are not available in a"),
        ({"rank": 5}, "rank 5 takes no requests now; ranks that do: 0, 1"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(engine: Engine, fields: Any, words: str) -> None:
    engine.ask(**fields)
    (error,) = engine.take()
    assert isinstance(error, m.Error)
    assert words in error.message
    assert error.request_id == fields.get("request_id", "a")
    engine.ask()
    assert isinstance(engine.take()[0], m.AddRequest)


def test_an_id_in_use_is_refused_but_not_another_clients(engine: Engine) -> None:
    engine.feed(PeerUp(OTHER))
    engine.ask()
    engine.take()
    engine.ask()
    assert "in use" in engine.take(CLIENT)[0].message
    engine.ask(peer=OTHER)
    assert isinstance(engine.take()[0], m.AddRequest)


def test_before_the_engine_is_ready_requests_are_refused_at_once() -> None:
    engine = Engine()
    engine.feed(PeerUp(CLIENT))
    engine.ask()
    assert engine.take(CLIENT)[0].code == "unavailable"
    engine.feed(Posted(AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=SAMPLING)))
    delivery = engine.up[-1].outputs[0]
    assert (delivery.ended.reason, delivery.ended.code) == ("error", "unavailable")


def test_an_abort_is_confirmed_by_the_rank(engine: Engine) -> None:
    engine.ask()
    rank, add = engine.added()
    engine.feed(Received(CLIENT, m.Abort(request_id="a")))
    ((peer, message),) = engine.sent
    assert (peer, unpack_ints(message.handles).tolist()) == (RANKS[rank], [add.handle])
    engine.take()
    engine.feed(Received(RANKS[rank], outputs([], [], ended=[ended(add.handle, "abort")])))
    assert engine.take(CLIENT)[0].reason == "abort"
    engine.feed(Received(CLIENT, m.Abort(request_id="a")))
    assert "not an unfinished request" in engine.take(CLIENT)[0].message


def test_a_client_that_leaves_has_its_requests_aborted_and_hears_nothing(engine: Engine) -> None:
    engine.ask(params=m.GenerateParams(n=2))
    engine.ask(request_id="t", text="hello", prompt_token_ids=None)
    adds = [message for message in engine.take() if isinstance(message, m.AddRequest)]
    engine.up.clear()
    engine.feed(PeerDown(CLIENT, "gone"))
    aborted = [handle for message in engine.take() for handle in unpack_ints(message.handles).tolist()]
    assert sorted(aborted) == sorted(add.handle for add in adds)
    assert engine.up == [AbortText(CLIENT, "t")]
    for peer, add in zip(RANKS, adds, strict=True):
        engine.feed(Received(peer, outputs([], [], ended=[ended(add.handle, "abort")])))
    engine.feed(Posted(TextOutput(peer=CLIENT, message=m.Delta(request_id="t", text="x"))))
    assert engine.take(CLIENT) == []
    engine.tick(1.0)
    counters = engine.up[-1].counters
    assert (counters["unfinished_requests"], counters["unfinished_text_requests"]) == (0, 0)


def test_a_lost_rank_ends_its_requests_with_an_error_and_others_go_on(engine: Engine) -> None:
    engine.ask(request_id="a", rank=0)
    engine.ask(request_id="b", rank=1)
    call = AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=SAMPLING, rank=0)
    engine.feed(Posted(call))
    b = engine.take(RANKS[1])[0]
    engine.take()
    engine.feed(PeerDown(RANKS[0], "gone"))
    (finished,) = engine.take(CLIENT)
    assert (finished.request_id, finished.reason) == ("a", "error")
    assert "rank 0 was lost" in finished.message
    deliver = next(effect for effect in engine.up if isinstance(effect, Deliver))
    assert (deliver.outputs[0].request_id, deliver.outputs[0].ended.reason) == ("h", "error")
    engine.feed(Received(RANKS[1], outputs([b.handle], [1])))
    assert engine.take(CLIENT)[0].request_ids == ["b"]
    engine.ask(request_id="c")
    assert engine.sent[0][0] == RANKS[1]


def test_http_requests_are_delivered_and_aborted_over_the_seam(engine: Engine) -> None:
    call = AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=SAMPLING, arrival_time=5.0, priority=3)
    engine.feed(Posted(call))
    rank, add = engine.added()
    assert (add.arrival_time, add.priority, add.sampling) == (5.0, 3, SAMPLING)
    engine.feed(Received(RANKS[rank], outputs([add.handle], [9])))
    deliver = engine.up[-1]
    assert (deliver.rank, deliver.outputs[0].request_id) == (rank, "h")
    engine.feed(Posted(AbortCall(request_ids=["h", "unknown"])))
    engine.up.clear()
    engine.feed(Received(RANKS[rank], outputs([add.handle], [9], ended=[ended(add.handle, "abort")])))
    assert engine.up == []


def test_a_priority_that_nobody_would_look_at_is_refused_on_every_way_in() -> None:
    engine = Engine(policy="fcfs").start()
    for resumable in (False, True):
        engine.ask(priority=-2, resumable=resumable)
        (error,) = (message for message in engine.take(CLIENT) if isinstance(message, m.Error))
        assert (error.code, error.message) == (
            "invalid",
            "priority -2 would change nothing with policy fcfs; leave it out",
        )
    call = AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=SAMPLING, arrival_time=5.0, priority=3)
    (deliver,) = engine.feed(Posted(call))
    assert deliver.outputs[0].ended.code == "invalid"
    engine.ask()
    assert engine.added()[1].priority == 0


def test_text_requests_go_up_and_their_output_comes_down_until_the_last_child(engine: Engine) -> None:
    engine.ask(request_id="t", text="hello", prompt_token_ids=None, params=m.GenerateParams(n=2))
    assert isinstance(engine.up[-1], RenderText)
    engine.ask(request_id="t", text="hello", prompt_token_ids=None)
    assert "in use" in engine.take(CLIENT)[0].message
    engine.feed(Posted(TextOutput(peer=CLIENT, message=m.Delta(request_id="t", text="x"))))
    for index in range(2):
        finished = m.Finished(request_id="t", index=index, reason="stop")
        engine.feed(Posted(TextOutput(peer=CLIENT, message=finished)))
    assert [type(message) for message in engine.take(CLIENT)] == [m.Delta, m.Finished, m.Finished]
    engine.ask(request_id="t", text="again", prompt_token_ids=None)
    engine.feed(Posted(TextRefused(peer=CLIENT, request_id="t", code="invalid", message="no good")))
    assert engine.take(CLIENT)[0] == m.Error(code="invalid", message="no good", request_id="t")


def embed(engine: Engine, **fields: Any) -> None:
    values = {"request_id": "e", "prompt_token_ids": [5, 6]} | fields
    engine.feed(Received(CLIENT, m.Embed(**values)))


def vector(handle: int) -> m.Pooled:
    return m.Pooled(owner=handle, vector=pack_floats([handle, 0.5]))


def test_embeddings_come_with_the_ends_of_their_requests_and_beside_others(engine: Engine) -> None:
    embed(engine, prompt_token_ids=[7] * 64, pooling="mean", normalize=False, rank=0, cache_salt="s", priority=3)
    embed(engine, request_id="f", rank=0)
    engine.ask(rank=0)
    http = AddCall(request_id="h", prompt_token_ids=pack_ints([1]), sampling=pooled(m.Pooling(kind="last")), rank=0)
    engine.feed(Posted(http))
    mean, last, drawing, over_seam = (message for message in engine.take() if isinstance(message, m.AddRequest))
    assert mean.sampling == pooled(m.Pooling(kind="mean", normalize=False))
    assert (mean.cache_salt, mean.priority, mean.prompt_token_ids.nbytes) == ("s", 3, 4 * 64)
    assert last.sampling == over_seam.sampling == pooled(m.Pooling(kind="last"))
    handles = [mean.handle, over_seam.handle]
    started = [m.RequestStarted(handle=handle, cached_tokens=0) for handle in handles]
    ends = [ended(handle) for handle in handles]
    found = [vector(handle) for handle in handles]
    engine.feed(Received(RANKS[0], outputs([drawing.handle], [41], started=started, ended=ends, pooled=found)))
    tokens, embedding = engine.take(CLIENT)
    assert tokens == m.TokenDeltas(request_ids=["a"], tokens=pack_ints([41]))
    assert embedding == m.Embedding(request_id="e", vector=found[0].vector, prompt_tokens=64)
    (delivery,) = engine.up[-1].outputs
    assert (delivery.request_id, delivery.vector, delivery.ended) == ("h", found[1].vector, ends[1])
    failed = ended(last.handle, "error", message="it is not a number")
    engine.feed(Received(RANKS[0], outputs([], [], ended=[failed])))
    assert engine.take(CLIENT) == [
        m.Finished(request_id="f", reason="error", message="it is not a number", prompt_tokens=2)
    ]


def test_a_text_to_embed_goes_up_and_comes_back_as_tokens(engine: Engine) -> None:
    embed(engine, text="hello", prompt_token_ids=None, pooling="mean", rank=1)
    asked = engine.up[-1]
    assert isinstance(asked, RenderText)
    tokens = m.Embed(request_id="e", prompt_token_ids=pack_ints([4]), pooling="mean", rank=1)
    rendered = TextRendered(peer=CLIENT, request=tokens)
    engine.feed(Posted(rendered))
    rank, add = engine.added()
    assert (rank, unpack_ints(add.prompt_token_ids).tolist(), add.sampling.pooling) == (1, [4], m.Pooling(kind="mean"))
    engine.take()
    engine.feed(Received(CLIENT, m.Abort(request_id="e")))
    engine.feed(Received(RANKS[1], outputs([], [], ended=[ended(add.handle, "abort")])))
    assert engine.take(CLIENT) == [m.Finished(request_id="e", reason="abort", prompt_tokens=1)]
    engine.take()
    engine.feed(Posted(rendered))
    assert engine.take() == []  # nobody waits for it
    embed(engine, text="hello", prompt_token_ids=None)
    engine.feed(Received(CLIENT, m.Abort(request_id="e")))
    assert engine.up[-1] == AbortText(CLIENT, "e")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [5] * 65}, "the prompt has 65 tokens; with max_model_len 64 it may have 64"),
        ({"prompt_token_ids": [100]}, "token id 100 is not in the vocabulary"),
        ({"text": "both"}, "exactly one of text, messages and prompt_token_ids"),
        ({"request_id": ""}, "request_id is empty"),
        ({"rank": 5}, "rank 5 takes no requests now"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_a_sentence(engine: Engine, fields: Any, words: str) -> None:
    embed(engine, **fields)
    (error,) = engine.take()
    assert isinstance(error, m.Error)
    assert words in error.message


def command(engine: Engine, command_id: int = 1, body: Any = None, **fields: Any) -> dict[int, m.CommandRequest]:
    request = m.CommandRequest(command_id=command_id, body=body or m.TokenCount(), **fields)
    engine.feed(Received(CLIENT, request))
    return {peer.index: message for peer, message in engine.sent if peer.role == "rank"}


def reply(engine: Engine, rank: int, asked: dict[int, m.CommandRequest], value: Any) -> None:
    engine.feed(Received(RANKS[rank], m.Reply(command_id=asked[rank].command_id, value=value)))


def test_a_command_is_folded_once_all_have_answered(engine: Engine) -> None:
    asked = command(engine)
    reply(engine, 1, asked, 20)
    assert engine.take(CLIENT) == []
    reply(engine, 0, asked, 10)
    assert engine.take(CLIENT) == [m.Reply(command_id=1, value=[10, 20])]
    reply(engine, 0, asked, 10)
    assert engine.take(CLIENT) == []


def test_a_command_goes_only_to_the_ranks_named(engine: Engine) -> None:
    asked = command(engine, ranks=[1])
    assert set(asked) == {1}
    reply(engine, 1, asked, 20)
    assert engine.take(CLIENT)[0].value == [20]
    command(engine, ranks=[0, 9])
    assert "[9] are not up" in engine.take(CLIENT)[0].message


def test_ranks_that_do_not_answer_in_time_are_named(engine: Engine) -> None:
    asked = command(engine, deadline_s=2.0)
    reply(engine, 1, asked, 20)
    engine.tick(1.9)
    assert engine.take(CLIENT) == []
    engine.tick(2.0)
    assert engine.take(CLIENT) == [m.Reply(command_id=1, value=[20], missing=[0])]
    command(engine)
    engine.tick(40.0)
    assert "no rank answered" in engine.take(CLIENT)[0].message


def test_a_rank_that_is_lost_is_missing_at_once(engine: Engine) -> None:
    asked = command(engine)
    reply(engine, 1, asked, 20)
    engine.feed(PeerDown(RANKS[0], "gone"))
    assert engine.take(CLIENT) == [m.Reply(command_id=1, value=[20], missing=[0])]


def test_a_refusal_or_nonsense_of_one_rank_is_the_answer(engine: Engine) -> None:
    asked = command(engine)
    error = m.Error(code="x", message="not now", command_id=asked[0].command_id)
    engine.feed(Received(RANKS[0], error))
    reply(engine, 1, asked, 20)
    assert engine.take(CLIENT)[0].message == "rank 0: not now"
    engine.take()
    asked = command(engine, ranks=[0])
    reply(engine, 0, asked, "twenty")
    assert "rank 0 answered TokenCount" in engine.take(CLIENT)[0].message


def test_commands_without_an_engine_or_with_a_bad_id_are_refused() -> None:
    engine = Engine()
    engine.feed(PeerUp(CLIENT))
    command(engine)
    assert "no rank is up" in engine.take(CLIENT)[0].message
    command(engine, command_id=0)
    assert "must be 1 or more" in engine.take(CLIENT)[0].message


def test_a_command_id_still_unanswered_is_refused(engine: Engine) -> None:
    command(engine)
    command(engine)
    assert "still unanswered" in engine.take(CLIENT)[0].message


def test_commands_over_the_seam_and_of_lost_clients(engine: Engine) -> None:
    engine.feed(Posted(CommandCall(call_id=5, body=m.UnfinishedRequests())))
    asked = {peer.index: message for peer, message in engine.sent}
    for rank in range(2):
        reply(engine, rank, asked, rank + 1)
    assert engine.up[-1] == CommandResult(5, 3, [], "")
    engine.take()
    asked = command(engine)
    engine.feed(PeerDown(CLIENT, "gone"))
    for rank in range(2):
        reply(engine, rank, asked, 1)
    assert engine.take(CLIENT) == []


def test_shutdown_ends_ranks_then_executor_then_this_process(engine: Engine) -> None:
    effects = engine.feed(Received(CLIENT, m.CommandRequest(command_id=3, body=m.Shutdown())))
    peers = [effect.peer for effect in effects if isinstance(effect, Send)]
    assert peers == [*RANKS, EXECUTOR, CLIENT]
    assert isinstance(effects[-1], Stop)


def test_status_tells_readiness_at_once_and_loads_with_every_tick() -> None:
    engine = Engine()
    engine.up.clear()
    engine.start()
    assert [effect.ready for effect in engine.up if isinstance(effect, StatusUpdate)] == [True]
    engine.load(0, running=3)
    engine.feed(Tick(5.0, 6.0, {"bus_sent_frames/step": 4}))
    status = engine.up[-1]
    assert (status.loads[0].running, status.counters["bus_sent_frames/step"]) == (3, 4)
    engine.feed(PeerDown(EXECUTOR, "gone"))
    assert engine.up[-1].ready is False
    assert engine.feed(Drained(7.0)) == []
