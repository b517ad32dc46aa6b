"""Two frontends that share the ranks: each answers for its own requests, and what is told to one holds for all."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.messages import GetPauseState, RequestCounts, Resume, SetPause
from frontend.client import Client, Completion
from tests.e2e.conftest import metrics
from tests.engine import Engine

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def pair(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    with Engine(tiny_model, engine_cache, frontends=2) as engine:
        engine.start()
        engine.wait_ready()
        yield engine


@pytest.fixture
def clients(pair: Engine) -> Iterator[list[Client]]:
    with Client(pair.config.client_endpoint(0)) as first, Client(pair.config.client_endpoint(1)) as second:
        yield [first, second]


def greedy(client: Client, text_output: bool = False) -> Completion:
    (completion,) = client.complete(PROMPT, text_output=text_output, temperature=0.0, max_tokens=10, ignore_eos=True)
    return completion


def test_both_give_the_same_answer(clients: list[Client]) -> None:
    tokens = {tuple(greedy(client, text_output).token_ids) for client in clients for text_output in (False, True)}
    assert len(tokens) == 1


def test_each_metric_has_one_exporter(pair: Engine, clients: list[Client]) -> None:
    for client in clients:
        greedy(client)
    for name in ("rankbus_rank_num_blocks", "vllm:num_requests_running", "vllm:prefix_cache_queries_total"):
        assert metrics(pair, name, frontend=0)
        assert not metrics(pair, name, frontend=1)
    assert not metrics(pair, "rankbus_executor_steps_total", frontend=1)
    for frontend in range(2):
        (labels,) = metrics(pair, "rankbus_frontend_requests_started_total", frontend)
        assert f'frontend="{frontend}"' in labels


def test_a_pause_told_to_one_holds_for_the_other(clients: list[Client]) -> None:
    first, second = clients
    assert first.command(SetPause(mode="keep")).value == "paused_all"
    assert second.command(GetPauseState()).value == "paused_all"
    done: list[Completion] = []
    thread = threading.Thread(target=lambda: done.append(greedy(second)))
    thread.start()
    try:
        while first.command(RequestCounts()).value != [0, 1]:
            assert thread.is_alive(), "it was served in a pause"
    finally:
        assert first.command(Resume()).value == "unpaused"
    thread.join(60)
    assert done


def test_one_ends_and_the_other_serves_on(pair: Engine, clients: list[Client]) -> None:
    assert pair.stop("frontend-1") == {"frontend-1": 0}
    assert greedy(clients[0]).finished.output_tokens == 10
    pair.start("frontend-1")
    pair.wait_ready()
    with Client(pair.config.client_endpoint(1)) as client:
        assert greedy(client).token_ids == greedy(clients[0]).token_ids
