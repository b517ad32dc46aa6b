"""A frontend process alone: it needs no other to start, to say what is missing, and to end."""

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.messages import RequestCounts, Shutdown
from frontend.client import Client, EngineError
from tests.engine import START_S, Engine

END_S = 10.0


def status(engine: Engine, path: str = "/health", body: Any = None) -> tuple[int, str]:
    """HTTP status and body; 0 if nothing listens yet."""
    connection = http.client.HTTPConnection(engine.config.host, engine.port(), timeout=30)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except ConnectionRefusedError:
        return 0, ""
    finally:
        connection.close()


@pytest.fixture(scope="module")
def alone(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    """A frontend whose HTTP server is up."""
    with Engine(tiny_model, engine_cache) as engine:
        engine.start("frontend-0")
        engine.wait_until(lambda: status(engine)[0] != 0, "HTTP is up", START_S)
        yield engine


def test_it_says_that_it_cannot_serve_yet(alone: Engine) -> None:
    assert status(alone)[0] == 503
    assert status(alone, "/v1/models")[0] == 200
    for stream in (False, True):
        code, answer = status(alone, "/v1/completions", {"prompt": "a", "stream": stream})
        assert code == 503
        assert "when the engine is ready" in json.loads(answer)["error"]["message"]
    with Client(alone.config.client_endpoint(0)) as client:
        with pytest.raises(EngineError, match="not ready"):
            client.complete("text")
        with pytest.raises(EngineError):
            client.command(RequestCounts())


def test_metrics_are_there(alone: Engine) -> None:
    metrics = status(alone, "/metrics")[1]
    assert "rankbus_ready 0.0" in metrics
    assert "rankbus_ranks_up 0.0" in metrics


def test_sigterm_ends_it(alone: Engine) -> None:
    assert alone.stop("frontend-0") == {"frontend-0": 0}
    alone.start("frontend-0")
    alone.wait_until(lambda: status(alone)[0] != 0, "HTTP is up again", START_S)


def test_a_command_ends_it(tiny_model: Path, engine_cache: Path) -> None:
    """Also while vLLM is still being imported: the bus is up before."""
    with Engine(tiny_model, engine_cache) as engine:
        engine.start("frontend-0")
        with Client(engine.config.client_endpoint(0)) as client:
            assert client.command(Shutdown()).value is True
        assert engine["frontend-0"].wait_for_end(END_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_import_ends_it(tiny_model: Path, engine_cache: Path, number: signal.Signals) -> None:
    with Engine(tiny_model, engine_cache) as engine:
        engine.start("frontend-0")
        with Client(engine.config.client_endpoint(0)) as client:
            with pytest.raises(EngineError):
                client.command(RequestCounts())  # answered: the bus runs, and the import has begun
            engine["frontend-0"].send_signal(number)
            assert engine["frontend-0"].wait_for_end(END_S) == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "/no/such/model"}, "/no/such/model is not there"),
        ({"max_model_len": 100_000}, "max_model_len: 100000 is more than the model allows, 1024"),
        ({"host": "no.such.host.invalid"}, "host: 'no.such.host.invalid' is not an address of this machine"),
    ],
)
def test_bad_configuration_is_78(tiny_model: Path, engine_cache: Path, settings: Any, sentence: str) -> None:
    with Engine(Path(settings.pop("model", tiny_model)), engine_cache, **settings) as engine:
        engine.start("frontend-0")
        assert engine["frontend-0"].wait_for_end(END_S) == 78
        assert any(sentence in str(event.get("event")) for event in engine["frontend-0"].events())


def test_a_port_that_is_taken_is_an_error(tiny_model: Path, engine_cache: Path) -> None:
    with Engine(tiny_model, engine_cache) as engine, socket.create_server(("127.0.0.1", engine.port())):
        engine.start("frontend-0")
        assert engine["frontend-0"].wait_for_end(END_S) == 1
        assert "HTTP cannot listen on" in engine["frontend-0"].tail()
