"""A rank process when those around it come and go, and when it goes itself."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.messages import KvEvents, KvPool, Sampling, UnfinishedRequests
from tests.engine import Engine
from tests.process.peers import FrontendSide, ToyExecutorSide
from tests.process.rank import RankUnderTest
from tests.ranks.toy import VOCAB, generate

POOL = KvPool(num_blocks=32, block_size=16, max_model_len=128, vocab_size=VOCAB)
PROMPT = list(range(20))
TOKENS = generate(PROMPT, Sampling(seed=0, max_tokens=8), POOL.max_model_len)[0]


@pytest.fixture(scope="module")
def rank(tiny_model: Path, engine_cache: Path) -> Iterator[RankUnderTest]:
    with Engine(tiny_model, engine_cache, ranks=1, frontends=2) as engine:
        rank = RankUnderTest(engine, POOL)
        try:
            yield rank
        finally:
            rank.close()


def serves(rank: RankUnderTest, frontend: int) -> bool:
    handle = rank.add(PROMPT, frontend=frontend)
    return rank.ended(handle, frontend).reason == "length" and rank.tokens(handle, frontend) == TOKENS


def test_an_executor_that_restarts(rank: RankUnderTest) -> None:
    assert serves(rank, 0)
    rank.executor.hold(True)
    unfinished = rank.add(PROMPT)
    assert rank.value(UnfinishedRequests()) == 1
    rank.executor.close()
    ended = rank.ended(unfinished)
    assert (ended.reason, ended.code) == ("error", "unavailable")
    assert "the executor was lost" in ended.message
    refused = rank.ended(rank.add(PROMPT))
    assert "no executor" in refused.message
    assert rank.frontends[0].received(KvEvents)[-1] == rank.frontends[1].received(KvEvents)[-1]
    assert rank.frontends[0].received(KvEvents)[-1].snapshot
    rank.wait_for_pool(there=False)
    rank.executor = ToyExecutorSide(rank.engine.config, POOL)
    rank.wait_for_pool()
    assert serves(rank, 0)
    assert rank.executor.core.toy.cached == 0  # the prefix cache went with the old pool


def test_a_frontend_that_restarts(rank: RankUnderTest) -> None:
    rank.executor.hold(True)
    rank.add(PROMPT, frontend=1)
    assert rank.value(UnfinishedRequests(), frontend=1) == 1
    rank.frontends[1].close()
    deadline = time.monotonic() + 20
    while rank.value(UnfinishedRequests()):  # until it has noticed
        assert time.monotonic() < deadline
    rank.executor.hold(False)
    rank.frontends[1] = FrontendSide(1, rank.engine.config)
    rank.wait_for_pool()
    first = rank.frontends[1].received(KvEvents)[0]
    assert first.snapshot
    assert first.stored.nbytes > 0
    assert serves(rank, 1)
    assert serves(rank, 0)


def test_sigterm_ends_it_with_goodbye(rank: RankUnderTest) -> None:
    rank.engine["rank-0"].send_signal(signal.SIGTERM)
    assert rank.engine["rank-0"].wait_for_end(20) == 0
    for side in (*rank.frontends, rank.executor):
        side.wait(lambda side=side: not side.core.peers, "the rank's Goodbye")
        assert "SIGTERM" in side.core.lost[-1]
    rank.engine.stop("rank-0")


def test_a_rank_started_again_serves_at_once(rank: RankUnderTest) -> None:
    rank.engine.start("rank-0")
    rank.wait_for_pool()
    assert serves(rank, 0)
