"""The device's threads, with a runner that is a stand-in for a model."""

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest

from executor.core import DeviceFailed, RunStep, StepDone
from executor.pipeline import Pipeline
from executor.step import MergedStep, SampledStep

DEADLINE_S = 10.0
NONE = np.zeros(0, np.int32)


def step(row: int) -> MergedStep:
    rows = np.array([row], np.int32)
    return MergedStep([], NONE, rows, NONE, NONE, np.zeros(0, np.bool_), np.zeros((0, 0), np.int32))


class Echo:
    """Draws each sequence's row number. A step can be collected once its row was let go."""

    def __init__(self) -> None:
        self.dispatched: queue.Queue[int] = queue.Queue()
        self.let_go: queue.Queue[int] = queue.Queue()
        self.fail_on: int | None = None

    def dispatch(self, step: MergedStep) -> Any:
        row = int(step.rows[0])
        if row == self.fail_on:
            raise ValueError("no memory is left")
        self.dispatched.put(row)
        return row

    def collect(self, handle: Any) -> SampledStep:
        assert self.let_go.get(timeout=DEADLINE_S) == handle
        return SampledStep(np.array([handle], np.int32))


def test_the_next_step_is_dispatched_while_one_runs_and_results_come_in_order() -> None:
    runner, posted = Echo(), queue.Queue[StepDone | DeviceFailed]()
    pipeline = Pipeline(runner, posted.put, depth=2)
    begun = time.monotonic()
    pipeline.submit(RunStep(1, step(11)))
    pipeline.submit(RunStep(2, step(12)))
    assert [runner.dispatched.get(timeout=DEADLINE_S) for _ in range(2)] == [11, 12]
    assert posted.empty()
    dispatched, before = time.monotonic(), begun
    for number, row in ((1, 11), (2, 12)):
        runner.let_go.put(row)
        done = posted.get(timeout=DEADLINE_S)
        assert isinstance(done, StepDone)
        assert (done.number, done.sampled.tokens.tolist()) == (number, [row])
        assert before <= done.done_at - done.device_s <= done.done_at <= time.monotonic()  # one after the other
        assert begun <= done.dispatch_at <= done.dispatch_at + done.dispatch_s
        assert done.dispatch_at <= dispatched <= done.done_at
        before = done.done_at
    assert pipeline.stop(DEADLINE_S)
    assert pipeline.error is None


def test_a_step_that_cannot_be_dispatched_is_told_of_once_and_ends_the_threads() -> None:
    runner, posted = Echo(), queue.Queue[StepDone | DeviceFailed]()
    runner.fail_on = 12
    before = threading.active_count()
    pipeline = Pipeline(runner, posted.put, depth=2)
    for number, row in ((1, 11), (2, 12), (3, 13)):
        pipeline.submit(RunStep(number, step(row)))
    runner.let_go.put(11)
    told = [posted.get(timeout=DEADLINE_S) for _ in range(2)]
    assert DeviceFailed("ValueError: no memory is left") in told
    assert pipeline.stop(DEADLINE_S)
    assert posted.empty()
    assert isinstance(pipeline.error, ValueError)
    assert threading.active_count() == before


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_cannot_be_collected_is_told_of_once_and_ends_the_threads(depth: int) -> None:
    runner, posted = Echo(), queue.Queue[StepDone | DeviceFailed]()
    before = threading.active_count()
    pipeline = Pipeline(runner, posted.put, depth)
    for number, row in ((1, 11), (2, 12), (3, 13)):
        pipeline.submit(RunStep(number, step(row)))
    runner.let_go.put(99)
    failed = posted.get(timeout=DEADLINE_S)
    assert isinstance(failed, DeviceFailed)
    assert failed.reason.startswith("AssertionError")
    assert pipeline.stop(DEADLINE_S)
    assert posted.empty()
    assert threading.active_count() == before


def test_with_one_step_in_flight_the_next_is_dispatched_when_it_is_done() -> None:
    runner, posted = Echo(), queue.Queue[StepDone | DeviceFailed]()
    pipeline = Pipeline(runner, posted.put, depth=1)
    for number, row in ((1, 11), (2, 12), (3, 13)):
        pipeline.submit(RunStep(number, step(row)))
    for row in (11, 12, 13):
        assert runner.dispatched.get(timeout=DEADLINE_S) == row
        assert runner.dispatched.empty()
        runner.let_go.put(row)
        assert isinstance(posted.get(timeout=DEADLINE_S), StepDone)
    assert pipeline.stop(DEADLINE_S)
