"""Nonsense on every socket of a running engine: an error or a drop, counted; the engine serves on."""

import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from bus.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR
from bus.wire import ENVELOPE
from frontend.client import Client, EngineError
from tests.e2e.conftest import metrics
from tests.engine import Engine

pytestmark = pytest.mark.timeout(500)  # the first test starts the engine, perhaps with nothing compiled

ROLES = {"client": "client", "command": "rank", "step": "rank"}


class Stranger:
    """A raw DEALER on one of the engine's sockets."""

    def __init__(self, context: zmq.Context, endpoint: str, role: str) -> None:
        self._role = role
        self._incarnation = time.time_ns()
        self._peer = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(endpoint)

    def hello(self, **fields: Any) -> dict[str, Any]:
        values = {"type": "Hello", "role": self._role, "index": 77, "incarnation": self._incarnation}
        self.send(values | {"major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR} | fields)
        answer = self.receive()
        self._peer = answer.get("incarnation", 0)
        return answer

    def send(self, message: Any) -> None:
        self.send_frames(ENVELOPE.pack(self._incarnation, self._peer), msgspec.msgpack.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = msgspec.msgpack.decode(self.socket.recv_multipart()[1])
            if message["type"] != "Heartbeat":
                return message


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


def endpoint(engine: Engine, bus: str) -> str:
    config = engine.config
    return {
        "client": config.client_endpoint(0),
        "command": config.command_endpoint(0),
        "step": config.step_endpoint(),
    }[bus]


@pytest.mark.parametrize("bus", list(ROLES))
def test_random_bytes_and_wrong_messages_are_counted_and_the_engine_serves_on(
    engine: Engine, client: Client, context: zmq.Context, bus: str
) -> None:
    draw = random.Random(bus)
    stranger = Stranger(context, endpoint(engine, bus), ROLES[bus])
    before = rejected(engine, bus)
    for _ in range(200):
        stranger.send_frames(
            *(draw.randbytes(draw.choice([0, 1, 15, 16, 17, 100])) for _ in range(draw.choice([1, 2, 3])))
        )
    messages = (
        {"type": "Nothing"},
        {"type": "Generate"},
        {"type": "Generate", "request_id": 5},
        {"type": "PartialSchedule", "step": "one", "rows": b"123"},
        {"type": "Outputs", "handles": b"1"},
        [1, 2, 3],
        "hello",
        None,
        {"no": "type"},
    )
    for message in messages:
        stranger.send(message)
    stranger.send_frames(bytes(16), bytes(engine.config.max_message_bytes + 1))
    sent = 200 + len(messages) + 1
    assert [stranger.receive()["type"] for _ in range(sent)] == ["Error"] * sent
    if bus != "client":
        assert stranger.hello()["code"] == "index"
    assert stranger.hello(major=9)["code"] == "protocol"
    expected = before + sent
    engine.wait_until(lambda: rejected(engine, bus) >= expected, f"{expected} frames are counted", 20)
    engine.check_running()
    assert client.complete([5, 6, 7], text_output=False, max_tokens=3, ignore_eos=True)[0].finished.output_tokens == 3


def rejected(engine: Engine, bus: str) -> float:
    """Frames rejected on a bus by the process that binds it."""
    samples = metrics(engine, "rankbus_bus_rejected_frames_total")
    return sum(count for labels, count in samples.items() if f'bus="{bus}"' in labels)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "Generate", "request_id": "a", "text": "x", "params": {"temprature": 1}}, "temprature"),
        ({"type": "Generate", "request_id": "a", "text": "x", "params": {"temperature": -1}}, "temperature"),
        ({"type": "Generate", "request_id": "a", "text": ""}, ""),
        ({"type": "Generate", "request_id": "a", "messages": []}, ""),
        ({"type": "Generate", "request_id": "a", "messages": [{"role": 5}]}, ""),
        ({"type": "Generate", "request_id": "a", "prompt_token_ids": [7] * 9000}, "8192"),
        ({"type": "Generate", "request_id": "a", "prompt_token_ids": [7] * 9000, "text_output": False}, "8192"),
        ({"type": "Generate", "request_id": "a", "prompt_token_ids": [49152], "text_output": False}, "49152"),
        ({"type": "Generate", "request_id": "a", "text": "x", "rank": 9}, "rank 9"),
        ({"type": "Abort", "request_id": "unknown"}, "unknown"),
        ({"type": "CommandRequest", "command_id": 1, "body": {"command": "Nothing"}}, "Nothing"),
        ({"type": "CommandRequest", "command_id": 1, "body": {"command": "SetPause"}}, "mode"),
        ({"type": "CommandRequest", "command_id": 1, "body": {"command": "SetPause", "mode": "nap"}}, "nap"),
        ({"type": "CommandRequest", "command_id": 1, "body": {"command": "Schedule"}}, "single"),
        ({"type": "CommandRequest", "command_id": 1, "body": {"command": "TokenCount"}, "ranks": [8]}, "[8]"),
        ({"type": "CommandRequest", "body": {"command": "TokenCount"}}, "command_id"),
        ({"type": "CommandRequest", "command_id": -4, "body": {"command": "TokenCount"}}, "command_id"),
    ],
)
def test_a_client_s_mistake_is_answered_at_once_with_a_sentence(
    engine: Engine, context: zmq.Context, message: dict[str, Any], words: str
) -> None:
    stranger = Stranger(context, endpoint(engine, "client"), "client")
    assert stranger.hello()["type"] == "Welcome"
    stranger.send(message)
    answer = stranger.receive()
    assert answer["type"] == "Error"
    assert words in answer["message"]
    assert len(answer["message"]) > 10
    for name in ("request_id", "command_id"):
        if name in message:
            assert answer[name] == message[name]
    stranger.send({"type": "Goodbye"})


def test_unknown_ids_and_missing_fields_of_the_client_library_are_errors(client: Client) -> None:
    with pytest.raises(EngineError, match="temprature"):
        client.generate("x", temprature=1)
    with pytest.raises(EngineError, match="max_tokens"):
        client.complete("x", max_tokens=0)
