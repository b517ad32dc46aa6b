"""Sessions with text on the embedded model: WebSocket with a client library, the terminal's chat, the client bus."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from bus.messages import RequestCounts, TokenCount
from frontend.client import Client, EngineError
from tests.engine import ROOT, Engine

pytestmark = pytest.mark.timeout(500)  # the first test starts the engine, perhaps with nothing compiled

DEADLINE_S = 60.0
QUESTION = {"role": "user", "content": "What is the capital of France?"}
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
def socket(engine: Engine) -> Iterator[ClientConnection]:
    with connect(address(engine), open_timeout=DEADLINE_S) as socket:
        yield socket


def address(engine: Engine) -> str:
    return f"ws://{engine.config.host}:{engine.port()}/v1/sessions"


def say(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def hear(socket: ClientConnection, last: str) -> list[dict[str, Any]]:
    """Events up to the first of type `last`."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != last:
        events.append(json.loads(socket.recv(timeout=DEADLINE_S)))
    return events


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "delta")


def all_gone(engine: Engine, client: Client) -> None:
    """Nothing is left of any session."""
    engine.wait_until(lambda: client.command(TokenCount()).value == [0, 0], "sessions are gone", DEADLINE_S)
    assert client.command(RequestCounts()).value == [0, 0]


def test_a_conversation_over_websocket_says_what_requests_say(
    engine: Engine, client: Client, socket: ClientConnection
) -> None:
    say(socket, type="open", messages=[QUESTION], params=GREEDY)
    events = hear(socket, "turn_finished")
    assert events[0] == {"type": "opened", "id": "session"}
    (alone,) = client.complete([QUESTION], **GREEDY)
    assert text(events) == alone.text
    assert {event["turn"] for event in events if event["type"] == "delta"} == {1}
    first = events[-1]
    assert (first["turn"], first["reason"], first["kept_tokens"]) == (1, "stop", first["output_tokens"] - 1)
    again = {"role": "user", "content": "And of Italy?"}
    say(socket, type="append", messages=[again])
    events = hear(socket, "turn_finished")
    whole = [QUESTION, {"role": "assistant", "content": alone.text}, again]
    (alone,) = client.complete(whole, **GREEDY)
    assert text(events) == alone.text
    second = events[-1]
    assert second["prompt_tokens"] == alone.finished.prompt_tokens  # the template's end-of-message token came with it
    assert second["cached_tokens"] == first["context_tokens"]  # nothing was computed twice
    say(socket, type="close")
    assert hear(socket, "finished")[-1]["reason"] == "closed"
    all_gone(engine, client)


def test_two_sessions_on_one_connection_stop_abort_and_take_text(
    engine: Engine, client: Client, socket: ClientConnection
) -> None:
    params = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    say(socket, type="open", id="long", text="Once upon a time", params=params)
    say(socket, type="open", id="short", prompt_token_ids=[], text_output=False)
    seen: list[dict[str, Any]] = []
    while {"delta", "turn_finished"} - {event["type"] for event in seen}:
        seen.append(json.loads(socket.recv(timeout=DEADLINE_S)))
    ends = [event for event in seen if event["type"] == "turn_finished"]
    assert [(end["id"], end["reason"], end["context_tokens"]) for end in ends] == [("short", "empty", 0)]
    say(socket, type="end_turn", id="long", turn=1, n=1)
    end = hear(socket, "turn_finished")[-1]
    assert (end["id"], end["reason"], end["kept_tokens"]) == ("long", "interrupted", 1)
    say(socket, type="append", id="long", text=" there was", params={"max_tokens": 3, "logprobs": 1})
    events = hear(socket, "turn_finished")
    logprobs = [one for event in events if event["type"] == "delta" for one in event["logprobs"]]
    assert len(logprobs) == events[-1]["output_tokens"]
    assert all(len(one["token_ids"]) == len(one["values"]) == 2 for one in logprobs)
    assert events[-1]["prompt_tokens"] > end["context_tokens"]
    say(socket, type="abort", id="long")
    say(socket, type="close", id="short")
    reasons = {event["id"]: event["reason"] for event in (hear(socket, "finished")[-1] for _ in range(2))}
    assert reasons == {"long": "abort", "short": "closed"}
    all_gone(engine, client)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("no json", "not a valid message"),
        ("[1]", "not a valid message"),
        ('{"type": "shout"}', "shout"),
        ('{"type": "append", "txt": "x"}', "unknown field `txt`"),
        ('{"type": "open", "params": {"temprature": 1}}', "unknown field `temprature`"),
        ('{"type": "open", "id": ""}', "`id` is empty"),
        ('{"type": "open", "id": 5}', "`$.id`"),
        ('{"type": "open", "text": "a", "prompt_token_ids": [1]}', "one of text, messages and prompt_token_ids"),
        ('{"type": "open", "prompt_token_ids": [99999999999]}', "is not in the vocabulary"),
        ('{"type": "open", "messages": [{"content": "x"}]}', "has no `role`"),
        ('{"type": "open", "params": {"n": 2}}', "n 2 is not allowed in a session"),
        ('{"type": "open", "params": {"stop": ["x"]}}', "stop strings are not allowed in a session"),
        ('{"type": "append", "id": "other", "text": "x"}', "other is not an open session of yours"),
        ('{"type": "end_turn", "turn": 1, "n": 0}', "is not an open session of yours"),
        (json.dumps({"type": "open", "text": "x" * (9 << 20)}), "at most 8388608 are allowed"),
        (b"binary", "this one is binary"),
    ],
)
def test_nonsense_is_answered_with_a_sentence_and_the_connection_stays(
    engine: Engine, client: Client, socket: ClientConnection, message: Any, words: str
) -> None:
    socket.send(message)
    error = hear(socket, "error")[-1]
    assert words in error["message"]
    say(socket, type="open", id="still", prompt_token_ids=[])
    assert hear(socket, "turn_finished")[-1]["id"] == "still"


def test_what_is_too_large_for_the_server_ends_the_connection(engine: Engine, socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        socket.send("x" * (17 << 20))
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=DEADLINE_S)


def test_pages_from_elsewhere_may_not_connect(engine: Engine) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(address(engine), origin="http://elsewhere.example", open_timeout=DEADLINE_S)
    response = refused.value.response
    assert response.status_code == 403
    assert "http://elsewhere.example may not open sessions" in json.loads(response.body)["error"]["message"]
    own = f"http://{engine.config.host}:{engine.port()}"
    with connect(address(engine), origin=own, open_timeout=DEADLINE_S) as socket:
        say(socket, type="open", prompt_token_ids=[])
        hear(socket, "turn_finished")


def test_a_connection_that_goes_takes_its_sessions_along(engine: Engine, client: Client) -> None:
    with connect(address(engine), open_timeout=DEADLINE_S) as socket:
        say(socket, type="open", text="Once upon a time", params={"max_tokens": 2000, "ignore_eos": True})
        hear(socket, "delta")
    all_gone(engine, client)


def test_the_client_library_holds_a_session_with_text(engine: Engine, client: Client) -> None:
    with client.session("One, two, three,", max_tokens=6, temperature=0.0, ignore_eos=True) as session:
        first = session.first.end()
        assert len(session.first.text) > 6
        turn = session.append(" and then", max_tokens=300, ignore_eos=True)
        for _ in turn:
            turn.stop(2)
            break
        assert turn.end().reason == "interrupted"
        with pytest.raises(EngineError, match="n 2 is not allowed"):
            session.append("x", n=2).end()
        assert session.append().end().reason == "empty"
        assert session.append(" more", max_tokens=2).end().prompt_tokens > first.context_tokens
    assert session.over
    all_gone(engine, client)


def test_chat_holds_a_session_and_shows_what_it_saves(engine: Engine) -> None:
    lines = "What is the capital of France?\nAnd of Italy?\n/stats\n"
    command = [sys.executable, "-m", "frontend.cli", "chat", "--endpoint", engine.config.client_endpoint(0)]
    done = subprocess.run(
        [*command, "--session", "--temperature", "0", "--max-tokens", "40"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.splitlines()[0]
    assert "2 turns, " in done.stdout
    assert "of them not computed again" in done.stderr
