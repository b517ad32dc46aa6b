"""The executor as two processes with one mesh, each as good as on a host of its own: real JAX, real sockets."""

import itertools
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from bus.config import EX_CONFIG
from bus.messages import Goodbye, LoadAdapter, Pooling, Sampling
from bus.sampling import pooled
from bus.wire import unpack_floats
from tests.adapters import merged, write_adapter
from tests.engine import Engine
from tests.executor.test_llama import generate
from tests.process.peers import FrontendSide
from tests.process.wire_rank import WireRank

START_S = 110.0
SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_blocks": 129, "max_model_len": 256}
DRAWN = Sampling(seed=7, max_tokens=99, temperature=0.8, top_p=0.9, logprobs=2, prompt_logprobs=2)
ASKING = Sampling(seed=0, max_tokens=99, temperature=0.0, prompt_logprobs=40)
"""More than are found on the devices."""
BOTH = ("executor-0", "executor-1")

pytestmark = pytest.mark.timeout(240)  # each starts processes that compile, the first time

incarnations = itertools.count(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def engine_of(model: Path, cache: Path, executors: int, **settings: Any) -> Engine:
    return Engine(model, cache, executors=executors, coordinator=f"127.0.0.1:{_free_port()}", **SMALL, **settings)


def rank(engine: Engine, index: int) -> WireRank:
    return WireRank(engine.config, index, next(incarnations))


class Played(NamedTuple):
    """What two ranks have drawn, the log-probabilities that they have heard of their prompts, and their vectors."""

    tokens: list[list[int]]
    values: list[float]
    vectors: list[list[float]]

    def check(self, expected: "Played") -> None:
        assert self.tokens == expected.tokens
        assert len(self.values) == 20 * 41 + 4 * 3
        assert self.values == pytest.approx(expected.values, abs=1e-4)
        for vector, other in zip(self.vectors, expected.vectors, strict=True):
            assert vector == pytest.approx(other, abs=1e-4)


def play(engine: Engine) -> Played:
    """What two ranks draw, side by side: prompts in chunks, greedy rows and others, two steps in flight."""
    with rank(engine, 0) as first, rank(engine, 1) as second:
        first.meet(), second.meet()
        first.schedule({0: 16}, new=[first.new_row(0, list(range(20, 41)), ASKING)])
        second.schedule({0: 5}, new=[second.new_row(0, [9, 8, 7, 6, 5], DRAWN)])
        first.schedule({0: 5})
        assert first.result() == [-1]
        drawn = first.result(), second.result()
        # 30 steps go over the border of a block: what is told of a table changes
        tokens = [begun + peer.decode([0], 30)[0] for begun, peer in zip(drawn, (first, second), strict=True)]
        told = [*first.prompt_logprobs, *second.prompt_logprobs]
        first.schedule({0: 16}, new=[first.new_row(0, list(range(20, 41)), pooled(Pooling(kind="mean")))])
        second.schedule({0: 5}, new=[second.new_row(0, [9, 8, 7, 6, 5], pooled(Pooling(kind="last")))])
        first.schedule({0: 5})
        assert (first.result(), first.result(), second.result()) == ([-1], [-3], [-3])
        vectors = [unpack_floats(item.vector).tolist() for item in (*first.pooled, *second.pooled)]
        return Played(tokens, [value for found in told for value in unpack_floats(found.values).tolist()], vectors)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    with engine_of(tiny_model, engine_cache, 2) as engine:
        engine.start(*BOTH)
        yield engine


@pytest.fixture(scope="module")
def alone(tiny_model: Path, engine_cache: Path) -> Iterator[Played]:
    """What one process draws."""
    with engine_of(tiny_model, engine_cache, 1) as engine:
        engine.start("executor-0")
        engine["executor-0"].wait_for_log("ready", START_S)
        yield play(engine)


def test_two_processes_draw_what_one_draws(pair: Engine, alone: Played) -> None:
    pair["executor-0"].wait_for_log("all executors are ready", START_S)
    play(pair).check(alone)


def test_two_processes_that_share_each_weight_and_meet_over_tcp_draw_what_one_draws(
    tiny_model: Path, engine_cache: Path, tmp_path: Path, alone: Played
) -> None:
    key = tmp_path / "key"
    key.write_bytes(zmq.curve_keypair()[1])
    over_tcp = {"follower_address": f"tcp://127.0.0.1:{_free_port()}", "curve_key_file": str(key)}
    folders = [write_adapter(tmp_path / f"{seed}", tiny_model, 4, seed=seed) for seed in (1, 2)]
    adapters = {"max_loras": 2, "max_lora_rank": 4, "lora_modules": f"first={folders[0]}"}
    with engine_of(tiny_model, engine_cache, 2, tensor_parallel=2, **over_tcp, **adapters) as engine:
        engine.start(*BOTH)
        engine["executor-0"].wait_for_log("all executors are ready", START_S)
        play(engine).check(alone)
        with FrontendSide(0, engine.config) as frontend, rank(engine, 0) as peer:
            second = frontend.value(LoadAdapter(name="second", path=str(folders[1])))
            peer.meet()
            assert peer.adapters[1] == second
            for identity, folder in zip(peer.adapters, folders, strict=True):
                peer.schedule({0: 9}, new=[peer.new_row(0, range(30, 39), adapter=identity)])
                drawn = peer.result() + peer.decode([0], 5)[0]
                assert drawn == generate(merged(tiny_model, folder), list(range(30, 39)), 6)


def test_when_a_follower_is_killed_all_end_and_come_back_as_one(pair: Engine, alone: Played) -> None:
    pair["executor-0"].wait_for_log("all executors are ready", START_S)
    with rank(pair, 0) as peer:
        peer.meet()
        pair.stop("executor-1", by=signal.SIGKILL)
        last = peer.receive()
        assert isinstance(last, Goodbye)
        assert "executor/1 is lost" in last.reason
    assert pair.stop("executor-0")["executor-0"] not in (0, EX_CONFIG)  # supervisord starts it again
    pair.start(*BOTH)
    pair["executor-0"].wait_for_log("all executors are ready", START_S)
    play(pair).check(alone)
