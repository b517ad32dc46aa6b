"""Adapters as a frontend's core knows them: by name from the executor, and again from the next one."""

from typing import Any

import pytest

from bus import messages as m
from bus.core import Peer, PeerDown, PeerUp, Received
from bus.prefix import block_hashes
from bus.wire import pack_ints
from frontend.seam import AddCall, CommandCall, CommandResult, Deliver, RenderText, StatusUpdate
from tests.frontend.driving import CLIENT, EXECUTOR, SAMPLING, Engine

A, B = (m.Adapter(name=name, path=f"/{name}", identity=name * 32) for name in "ab")
AGAIN = Peer("command", "executor", 0, 31)


def status(engine: Engine, *adapters: m.Adapter, executor: Any = EXECUTOR) -> None:
    found = m.ExecutorStatus(model="x", max_model_len=64, num_blocks=8, block_size=16, adapters=list(adapters))
    engine.feed(Received(executor, found))


@pytest.fixture
def engine() -> Engine:
    engine = Engine().start()
    status(engine, A, B)
    return engine


def command(engine: Engine, body: Any, command_id: int = 4, **fields: Any) -> list[Any]:
    """What the client is told at once."""
    engine.feed(Received(CLIENT, m.CommandRequest(command_id=command_id, body=body, **fields)))
    return engine.take(CLIENT)


def test_a_request_goes_to_its_rank_with_the_adapters_identity_and_names_of_its_own(engine: Engine) -> None:
    prompt = list(range(5, 40))
    engine.ask(prompt_token_ids=prompt, adapter="a", cache_salt="s")
    _, add = engine.added()
    assert add.adapter == A.identity
    assert bytes(add.block_hashes) == block_hashes(pack_ints(prompt), 16, "s", adapter=A.identity)
    assert bytes(add.block_hashes) != block_hashes(pack_ints(prompt), 16, "s")
    engine.ask(request_id="session", adapter="b", resumable=True)
    assert engine.added()[1].adapter == B.identity
    call = AddCall(request_id="h", prompt_token_ids=pack_ints([5]), sampling=SAMPLING, adapter="b")
    engine.core._call(call)
    engine.ask(request_id="text", prompt_token_ids=None, text="x", text_output=True, adapter="a")
    assert [effect.request.adapter for effect in engine.up if isinstance(effect, RenderText)] == ["a"]


def test_an_unknown_adapter_is_refused(engine: Engine) -> None:
    sentence = "adapter 'c' is not loaded; loaded are 'a', 'b'"
    for fields in ({}, {"resumable": True}, {"prompt_token_ids": None, "text": "x", "text_output": True}):
        engine.ask(adapter="c", **fields)
        (error,) = engine.take(CLIENT)
        assert (error.code, error.message) == ("invalid", sentence)
    (deliver,) = engine.core._call(
        AddCall(request_id="h", prompt_token_ids=pack_ints([5]), sampling=SAMPLING, adapter="c")
    )
    assert isinstance(deliver, Deliver)
    assert deliver.outputs[0].ended is not None
    assert (deliver.outputs[0].ended.code, deliver.outputs[0].ended.message) == ("invalid", sentence)


def test_commands_go_to_the_executor_and_its_answers_come_back(engine: Engine) -> None:
    body = m.LoadAdapter(name="c", path="/c")
    assert command(engine, body, deadline_s=7.0) == []
    (asked,) = engine.take(EXECUTOR)
    assert (asked.body, asked.deadline_s) == (body, 7.0)
    engine.feed(Received(EXECUTOR, m.Reply(command_id=asked.command_id, value="C")))
    assert engine.take(CLIENT) == [m.Reply(command_id=4, value="C")]
    call = CommandCall(call_id=6, body=m.UnloadAdapter(name="z"))
    engine.sent += [(effect.peer, effect.message) for effect in engine.core._call(call)]
    (asked,) = engine.take(EXECUTOR)
    engine.feed(Received(EXECUTOR, m.Error(code="invalid", message="no", command_id=asked.command_id)))
    assert engine.up[-1] == CommandResult(6, None, [], "no", "invalid")


def test_commands_that_nobody_answers_are_answered_all_the_same(engine: Engine) -> None:
    (error,) = command(engine, m.LoadAdapter(name="c", path="/c"), ranks=[0])
    assert error.message == "LoadAdapter is not for ranks; leave them out"
    command(engine, m.LoadAdapter(name="c", path="/c"), deadline_s=2.0)
    engine.tick(2.5)
    assert engine.take(CLIENT) == []
    engine.tick(3.5)
    assert engine.take(CLIENT)[0].message == "the executor did not answer in time"
    command(engine, m.UnloadAdapter(name="a"))
    engine.feed(PeerDown(EXECUTOR, "it ended"))
    assert engine.take(CLIENT)[0].message == "the executor was lost before it answered"
    (error,) = command(engine, m.UnloadAdapter(name="a"))
    assert error.message == "no executor is up; try again when the engine is ready"


def test_adapters_are_listed_and_told_to_the_http_side_when_they_change(engine: Engine) -> None:
    assert command(engine, m.ListAdapters()) == [m.Reply(command_id=4, value=[A, B])]
    engine.up.clear()
    status(engine, B)
    (update,) = engine.up
    assert isinstance(update, StatusUpdate)
    assert update.executor is not None
    assert update.executor.adapters == [B]
    status(engine, B)
    assert len(engine.up) == 1


def test_cached_blocks_are_asked_for_by_the_adapters_name(engine: Engine) -> None:
    command(engine, m.ComputedBlocks(prompt_token_ids=[1], adapter="a"))
    bodies = [message.body for message in engine.take()]
    assert [body.adapter for body in bodies] == [A.identity] * 2
    (error,) = command(engine, m.ComputedBlocks(prompt_token_ids=[1], adapter="c"), command_id=5)
    assert "adapter 'c' is not loaded" in error.message


def test_the_next_executor_is_asked_for_what_the_one_before_had(engine: Engine) -> None:
    engine.feed(PeerDown(EXECUTOR, "it was killed"))
    engine.feed(PeerUp(AGAIN))
    assert engine.take(AGAIN) == []  # it has its own to say first
    status(engine, B, executor=AGAIN)
    (asked,) = engine.take(AGAIN)
    assert asked.body == m.LoadAdapter(name="a", path="/a", replace=True)
    engine.ask(adapter="a")
    (error,) = engine.take(CLIENT)
    assert error.code == "unavailable"
    assert error.message == "adapter 'a' is being loaded again, since the executor began anew; try again soon"
    engine.ask(adapter="b")
    assert engine.added()[1].adapter == B.identity
    status(engine, B, A, executor=AGAIN)
    engine.feed(Received(AGAIN, m.Reply(command_id=asked.command_id, value=A.identity)))
    engine.ask(request_id="again", adapter="a")
    assert engine.added()[1].adapter == A.identity


def test_an_adapter_that_is_gone_is_forgotten(engine: Engine) -> None:
    engine.feed(PeerDown(EXECUTOR, "it was killed"))
    engine.feed(PeerUp(AGAIN))
    status(engine, B, executor=AGAIN)
    (asked,) = engine.take(AGAIN)
    engine.feed(Received(AGAIN, m.Error(code="invalid", message="it is gone", command_id=asked.command_id)))
    engine.ask(adapter="a")
    assert engine.take(CLIENT)[0].message == "adapter 'a' is not loaded; loaded are 'b'"
