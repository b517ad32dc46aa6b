"""Sessions with text on the embedded model, over WebSocket with a client library."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from bus.messages import RequestCounts, TokenCount
from frontend.client import Client
from tests.engine import Engine

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
