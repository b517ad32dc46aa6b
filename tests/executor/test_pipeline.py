"""The device's threads, with a runner that is a stand-in for a model."""

import queue
import threading
import time
from typing import Any

import numpy as np

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
    pipeline = Pipeline(runner, posted.put)
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


def test_a_failure_is_told_once_and_ends_both_threads() -> None:
    runner, posted = Echo(), queue.Queue[StepDone | DeviceFailed]()
    runner.fail_on = 12
    before = threading.active_count()
    pipeline = Pipeline(runner, posted.put)
    for number, row in ((1, 11), (2, 12), (3, 13)):
        pipeline.submit(RunStep(number, step(row)))
    runner.let_go.put(11)
    told = [posted.get(timeout=DEADLINE_S) for _ in range(2)]
    assert DeviceFailed("ValueError: no memory is left") in told
    assert pipeline.stop(DEADLINE_S)
    assert posted.empty()
    assert isinstance(pipeline.error, ValueError)
    assert threading.active_count() == before
