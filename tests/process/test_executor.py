"""The executor process with a real model, over real sockets."""

import itertools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bus.messages import ContinueRow, Error, Goodbye, StepResult
from bus.wire import pack_ints
from tests.engine import Engine
from tests.process.wire_rank import GREEDY, WireRank

START_S = 110.0
PROMPTS = {0: [5], 1: list(range(20, 37)), 2: [200, 3, 100, 77, 30] * 6}

pytestmark = pytest.mark.timeout(240)  # the first test starts what all of them use

incarnations = itertools.count(1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    with Engine(tiny_model, engine_cache, max_num_seqs=4, num_blocks=129) as engine:
        engine.start("executor-0")
        engine["executor-0"].wait_for_log("ready", START_S)
        yield engine
        engine.check_running()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """HF transformers' greedy continuation of a prompt by a number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        out = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
        )
        return [int(token) for token in out[0, len(prompt) :]]

    return greedy


def rank(engine: Engine, index: int) -> WireRank:
    return WireRank(engine.config, index, next(incarnations))


def prefill(peer: WireRank, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Set these rows up and run them whole in one step; returns the first token of each."""
    new = [peer.new_row(row, prompt) for row, prompt in prompts.items()]
    peer.schedule({row: len(prompt) for row, prompt in prompts.items()}, new=new)
    return {row: [token] for row, token in zip(prompts, peer.result(), strict=True)}


def test_ranks_share_the_blocks_and_the_first_ones_get_what_is_left_over(engine: Engine) -> None:
    with rank(engine, 0) as first, rank(engine, 1) as second:
        pools = first.meet(), second.meet()
    assert [pool.num_blocks for pool in pools] == [65, 64]
    assert {(pool.block_size, pool.max_model_len, pool.vocab_size) for pool in pools} == {(16, 1024, 259)}


def test_two_ranks_with_two_steps_in_flight_draw_what_the_reference_draws(engine: Engine, reference: Any) -> None:
    with rank(engine, 0) as first, rank(engine, 1) as second:
        first.meet(), second.meet()
        first.schedule({row: len(prompt) for row, prompt in PROMPTS.items()}, new=[
            first.new_row(row, prompt) for row, prompt in PROMPTS.items()
        ])  # fmt: skip
        second.schedule({3: 30}, new=[second.new_row(3, PROMPTS[2] + PROMPTS[1])])
        second.schedule({3: 17})  # the second chunk of the prompt
        outputs = {row: [token] for row, token in zip(PROMPTS, first.result(), strict=True)}
        assert second.result() == [-1]
        last = second.result()
        for row, tokens in first.decode(list(PROMPTS), 12).items():
            outputs[row] += tokens
        last += second.decode([3], 12)[3]
    for row, prompt in PROMPTS.items():
        assert outputs[row] == reference(prompt, 13)
    assert last == reference(PROMPTS[2] + PROMPTS[1], 13)


def test_a_turn_that_continues_a_row_computes_what_one_prompt_would(engine: Engine, reference: Any) -> None:
    prompt, appended = PROMPTS[1], [9, 8, 7]
    with rank(engine, 0) as peer:
        peer.meet()
        said = prefill(peer, {2: prompt})[2] + peer.decode([2], 4)[2]
        turn = ContinueRow(row=2, token_ids=pack_ints(appended), drop=1, sampling=GREEDY)
        peer.schedule({2: 3}, continued=[turn])
        answer = peer.result() + peer.decode([2], 5)[2]
    assert answer == reference([*prompt, *said[:-1], *appended], 6)


def test_a_rank_that_was_restarted_resumes_where_it_was(engine: Engine, reference: Any) -> None:
    prompt = PROMPTS[2]
    with rank(engine, 0) as before:
        before.meet()
        said = prefill(before, {1: prompt})[1] + before.decode([1], 3)[1]
        before.schedule({1: 1})  # its result is for nobody
        with rank(engine, 0) as after:
            after.meet()
            after.schedule({1: 1})
            refused = after.receive()
            assert isinstance(refused, Error)
            assert (refused.code, refused.step) == ("schedule_refused", 1)
            after.schedule({1: len(prompt) + len(said)}, resumed=[after.resume_row(1, prompt, said)])
            said += after.result() + after.decode([1], 4)[1]
    assert said == reference(prompt, 9)


def test_what_one_rank_does_wrong_is_told_to_it_and_hurts_nobody_else(engine: Engine, reference: Any) -> None:
    with rank(engine, 0) as good, rank(engine, 1) as bad:
        good.meet(), bad.meet()
        said = prefill(good, {0: PROMPTS[1]})[0]
        bad.schedule({0: 1}, new=[bad.new_row(0, [259])])
        answer = bad.receive()
        assert isinstance(answer, Error)
        assert "token 259 does not exist" in answer.message
        bad.socket.send_multipart([b"\0" * 16, b"\xc1" * 50])
        answer = bad.receive()
        assert isinstance(answer, Error)
        assert answer.code == "invalid_message"
        bad.schedule({0: 1, 1: 1}, new=[bad.new_row(0, [5])])
        assert isinstance(bad.receive(), Error)
        said += good.decode([0], 5)[0]
        assert prefill(bad, {0: PROMPTS[0]})[0] == reference(PROMPTS[0], 1)
    assert said == reference(PROMPTS[1], 6)


def test_it_ends_in_an_orderly_way(tiny_model: Path, engine_cache: Path) -> None:
    with Engine(tiny_model, engine_cache, max_num_seqs=4, num_blocks=129) as engine:
        engine.start("executor-0")
        engine["executor-0"].wait_for_log("ready", START_S)
        with rank(engine, 0) as peer:
            peer.meet()
            peer.schedule({0: 1}, new=[peer.new_row(0, [5])])
            assert engine.stop("executor-0", by=signal.SIGTERM) == {"executor-0": 0}
            last = peer.receive()
            if isinstance(last, StepResult):  # the step was done before the signal came
                last = peer.receive()
            assert last == Goodbye(reason="it got SIGTERM")
