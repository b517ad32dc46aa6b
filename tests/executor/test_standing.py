"""Steps that stand, as the executor's core sees them: they go on until a token, a rank or a fault ends that."""

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from bus.config import Config
from bus.core import Posted, Received, Send
from bus.messages import MOST_STANDING_STEPS, Error, PartialSchedule, Recall, Recalled, StandingSchedule, StepResult
from bus.wire import pack_ints, unpack_ints
from executor.core import FEW_STANDING, GATHERING_S, RunStep, StepDone
from executor.step import SampledStep
from tests.executor.test_core import CONFIG, Bench, decoding, rank

STOP = 13


def stand(bench: Bench, first_step: int, num_steps: int, after: int, index: int = 0, **fields: Any) -> None:
    nothing = pack_ints([0] * num_steps)
    schedule = {"num_blocks": nothing, "stop_token_ids": pack_ints([STOP]), "more": True} | fields
    message = StandingSchedule(first_step=first_step, num_steps=num_steps, after=after, **schedule)
    bench.feed(Received(rank(index), message))
    bench.drain()


def finish(bench: Bench, token: int = 9) -> StepResult:
    """The device finishes a step; what rank 0 is told."""
    before = len(bench.sent)
    bench.finish(token)
    bench.drain()
    (told,) = (send.message for send in bench.sent[before:] if isinstance(send.message, StepResult))
    return told


def recall(bench: Bench, number: int) -> Recalled:
    bench.feed(Received(rank(0), Recall(number=number)))
    answer = bench.sent[-1].message
    assert isinstance(answer, Recalled)
    return answer


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Rank 0 has run its step 1."""
    bench = Bench(Config(**{"ranks": 3, "max_num_seqs": CONFIG.max_num_seqs, "async_depth": request.param}))
    bench.up(0)
    bench.send(0, 1)
    bench.drain()
    finish(bench)
    return bench


def at_device(bench: Bench) -> list[int]:
    """The rank's numbers of the steps that the device has."""
    return [run.parts[0][1] for run in bench.queued]


def test_steps_that_stand_follow_each_other_up_to_the_last(bench: Bench) -> None:
    depth = bench.config.async_depth
    stand(bench, 2, 3, after=1)
    assert at_device(bench) == [2, 3][:depth]
    positions = []
    while bench.queued:
        positions += bench.queued[0].step.positions.tolist()
        assert finish(bench).next_step is None
    assert positions == [1, 2, 3]
    assert bench.results(0) == [1, 2, 3, 4]


def test_blocks_come_with_the_step_that_begins_them(bench: Bench) -> None:
    begin = structs.replace(decoding(1), prompt_token_ids=pack_ints([7] * 15), block_ids=pack_ints([3]))
    schedule = PartialSchedule(step=2, rows=pack_ints([1]), num_tokens=pack_ints([15]), new=[begin])
    bench.feed(Received(rank(0), schedule))
    bench.drain()
    finish(bench)
    numbers = {"num_blocks": pack_ints([0, 1]), "block_rows": pack_ints([1]), "block_ids": pack_ints([8])}
    stand(bench, 3, 2, after=2, **numbers)
    while bench.queued:
        finish(bench)
    tables = [run.step.block_tables.tolist() for run in bench.steps[-2:]]
    assert tables == [[[3]], [[3, 8]]]
    assert bench.errors() == []


@pytest.mark.parametrize("token", [STOP, -2])
def test_a_token_that_may_end_a_request_voids_what_stands(bench: Bench, token: int) -> None:
    stand(bench, 2, 8, after=1)
    sent = at_device(bench)
    assert finish(bench, token).next_step == sent[-1] + 1
    assert at_device(bench) == sent[1:]
    bench.send(0, sent[-1] + 1, new=True)
    bench.drain()
    assert at_device(bench)[-1] == sent[-1] + 1
    assert bench.errors() == []


def test_what_was_sent_before_such_a_token_was_known_is_void(bench: Bench) -> None:
    stand(bench, 2, 1, after=1)
    finish(bench, STOP)
    stand(bench, 3, 4, after=1)
    assert at_device(bench) == []
    bench.send(0, 3, new=True)
    bench.drain()
    assert at_device(bench) == [3]


def test_a_first_message_that_crosses_such_a_token_is_void(bench: Bench) -> None:
    bench.send(0, 2)
    bench.drain()
    told = finish(bench, STOP)
    assert told.next_step is None  # nothing was known to stand
    stand(bench, 3, 4, after=1)
    assert at_device(bench) == []


def test_more_may_be_added_to_what_stands(bench: Bench) -> None:
    stand(bench, 2, 2, after=1)
    stand(bench, 4, 2, after=1)
    while bench.queued:
        finish(bench)
    assert bench.results(0) == [1, 2, 3, 4, 5]


def test_what_is_recalled_does_not_run(bench: Bench) -> None:
    stand(bench, 2, 8, after=1)
    sent = at_device(bench)
    assert recall(bench, 4) == Recalled(number=4, next_step=sent[-1] + 1)
    while bench.queued:
        assert finish(bench).next_step is None
    assert bench.results(0) == [1, *sent]
    assert recall(bench, 5).next_step == sent[-1] + 1  # nothing stands; it is answered all the same


def test_other_ranks_are_in_the_same_steps(bench: Bench) -> None:
    stand(bench, 2, 8, after=1)
    bench.up(1)
    bench.send(1, 1)
    bench.drain()
    taken = []
    for _ in range(4):
        taken.append(bench.queued[0].step.ranks.tolist())
        bench.finish()
        bench.drain()
        if 1 in taken[-1]:
            bench.send(1, len(taken) + 10, new=False)
            bench.drain()
    assert [0, 1] in taken


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (PartialSchedule(step=9, rows=pack_ints([0])), "schedule 9 was not run: steps stand; they must be recalled"),
        (
            StandingSchedule(first_step=5, num_steps=1, after=1, num_blocks=pack_ints([0])),
            "schedule 5 was not run: its number must be larger than that of the last, 9",
        ),
        (
            StandingSchedule(first_step=10, num_steps=1, after=1, num_blocks=pack_ints([2])),
            "schedule 10 was not run: the blocks of its steps make 2; it has 0",
        ),
        (
            StandingSchedule(
                first_step=10,
                num_steps=MOST_STANDING_STEPS,
                after=1,
                num_blocks=pack_ints([0] * MOST_STANDING_STEPS),
            ),
            f"{MOST_STANDING_STEPS} may",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_voids_what_stands(bench: Bench, message: Any, sentence: str) -> None:
    stand(bench, 2, 8, after=1)
    bench.feed(Received(rank(0), message))
    (error,) = (send.message for send in bench.sent if isinstance(send.message, Error))
    assert sentence in error.message
    while bench.queued:
        bench.finish()
        bench.drain()
    assert max(bench.results(0)) <= 3


@pytest.mark.parametrize(("num_steps", "blocks"), [(0, []), (MOST_STANDING_STEPS + 1, [0] * 65), (2, [0])])
def test_a_message_says_how_many_steps_it_may_have(num_steps: int, blocks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"num_steps|num_blocks"):
        StandingSchedule(first_step=1, num_steps=num_steps, after=0, num_blocks=pack_ints(blocks))


def test_tokens_of_a_rank_end_only_what_stands_of_that_rank() -> None:
    bench = Bench(Config(ranks=3, max_num_seqs=CONFIG.max_num_seqs, async_depth=1))
    bench.up(0, 1)
    for index in (0, 1):
        bench.send(index, 1)
    bench.drain()
    bench.finish()
    for index in (0, 1):
        stand(bench, 2, 4, after=1, index=index, stop_token_ids=pack_ints([STOP] if index else []))
    bench.drain()
    bench.finish(STOP)
    told = {send.peer.index: send.message for send in bench.sent if isinstance(send.message, StepResult)}
    assert (told[0].next_step, told[1].next_step) == (None, 3)
    assert unpack_ints(told[0].tokens).tolist() == [STOP]


def done(bench: Bench, device_s: float) -> list[type]:
    """The device finishes a step that took it so long; what comes of it."""
    run = bench.queued.popleft()
    event = Posted(StepDone(run.number, SampledStep(np.full(run.step.rows.size, 9, np.int32)), device_s))
    effects = list(bench.core.handle(event))
    for effect in effects:
        bench.do(effect)
    return [type(effect) for effect in effects]


def test_results_of_quick_steps_that_stand_wait_for_others(bench: Bench) -> None:
    stand(bench, 2, 30, after=1)
    for _ in range(3):
        assert done(bench, 0.0005) == [RunStep]
        bench.drain(after=GATHERING_S / 4)
    assert bench.results(0) == [1]
    assert bench.wake_at is not None  # should the device take long for the next
    bench.drain(after=GATHERING_S / 4)
    assert bench.results(0) == [1, 2, 3, 4]


def test_results_of_slower_steps_go_at_once(bench: Bench) -> None:
    stand(bench, 2, 30, after=1)
    assert done(bench, 0.005) == [RunStep, Send]


def test_nothing_waits_when_few_steps_stand_or_something_else_is_told(bench: Bench) -> None:
    stand(bench, 2, 12, after=1)
    done(bench, 0.0005)
    assert bench.results(0) == [1]
    assert recall(bench, 1).next_step > 2
    assert bench.results(0) == [1, 2]  # before the answer
    while bench.queued:
        done(bench, 0.0005)
    last = max(bench.results(0))
    stand(bench, last + 1, FEW_STANDING + 1, after=last)
    done(bench, 0.0005)
    assert max(bench.results(0)) == last + 1


def test_a_token_that_may_end_a_request_comes_after_what_has_waited(bench: Bench) -> None:
    stand(bench, 2, 30, after=1)
    done(bench, 0.0005)
    while bench.queued:
        bench.finish(STOP)
        bench.drain()
    assert len(bench.results(0)) > 2
    assert bench.results(0) == list(range(1, 1 + len(bench.results(0))))
