"""Buses over tcp: who has the key gets in, and nobody else."""

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from bus import config as configuration
from bus import curve
from bus.config import Config, ConfigError

SILENCE_MS = 300
DEADLINE_MS = 10_000


def _key(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(zmq.curve_keypair()[1].decode() + "\n")
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def context() -> Any:
    context = zmq.Context()
    context.linger = 0
    yield context
    context.destroy()


def test_only_who_has_the_key_gets_in(tmp_path: Path, context: Any) -> None:
    ours, other = (Config(curve_key_file=_key(tmp_path, name)) for name in ("ours", "other"))
    endpoint = f"tcp://127.0.0.1:{_free_port()}"
    server = context.socket(zmq.ROUTER)
    curve.guard_binding(server, ours)
    server.bind(curve.binding(endpoint))
    clients = {}
    for name in ("none", "other", "ours"):
        clients[name] = client = context.socket(zmq.DEALER)
        if name != "none":
            curve.guard_connecting(client, ours if name == "ours" else other)
        client.connect(endpoint)
        client.send(name.encode())
    assert server.poll(DEADLINE_MS)
    assert server.recv_multipart()[1] == b"ours"
    assert not server.poll(SILENCE_MS)


@pytest.mark.parametrize("text", ["", "short", "~" * 40, "\udcff"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, context: Any, text: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"^curve_key_file: "):
        curve.guard_binding(context.socket(zmq.ROUTER), Config(curve_key_file=str(path)))


def test_a_name_is_bound_at_every_address() -> None:
    assert curve.binding("tcp://leader.default:5557") == "tcp://*:5557"
    assert curve.binding("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"follower_address": "tcp://a:1"}, "follower_address: tcp://a:1 needs keys; set curve_key_file"),
        ({"follower_address": "ipc://a", "curve_key_file": "k"}, "it must be tcp://host:port"),
        ({"coordinator": "here"}, "coordinator: 'here' is not allowed; it must be host:port"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        configuration.load(settings, {})


def test_a_file_that_is_not_there_is_refused(context: Any) -> None:
    with pytest.raises(ConfigError, match="curve_key_file: /nowhere/key cannot be read"):
        curve.guard_connecting(context.socket(zmq.DEALER), Config(curve_key_file="/nowhere/key"))
