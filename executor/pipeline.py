"""The threads that keep the device fed: they hand steps to the model's runner and wait for what they drew."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

from executor.core import DeviceFailed, RunStep, StepDone
from executor.step import MergedStep, SampledStep


class StepRunner(Protocol):
    """What runs the model: `dispatch` starts a step and returns at once, `collect` waits for one that was started."""

    def dispatch(self, step: MergedStep) -> Any: ...

    def collect(self, handle: Any) -> SampledStep: ...


class Pipeline:
    """Runs steps in the order of `submit` and posts a `StepDone` for each, and one `DeviceFailed` if that cannot go on.

    A step is dispatched and collected by one thread, since handing it to another costs as much as some steps. There are
    as many threads as steps may be in flight: while one waits for its step, another dispatches the next, so that the
    device goes from one to the next without the host.
    """

    def __init__(self, runner: StepRunner, post: Callable[[StepDone | DeviceFailed], None], depth: int) -> None:
        """`depth` is how many steps may be in flight."""
        self.error: Exception | None = None
        """What the device failed with, if it did."""
        self._runner = runner
        self._post = post
        self._submitted: SimpleQueue[RunStep | Callable[[], None] | None] = SimpleQueue()
        self._dispatching = threading.Lock()
        self._failing = threading.Lock()
        self._last_told = threading.Lock()
        """Held until the step dispatched last has been told of."""
        self._idle_since = 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"device {number}", daemon=True) for number in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, run: RunStep) -> None:
        """Run a step after those submitted before."""
        self._submitted.put(run)

    def between(self, job: Callable[[], None]) -> None:
        """Have something done after the steps submitted before were dispatched, and before those submitted later."""
        self._submitted.put(job)

    def stop(self, within_s: float) -> bool:
        """Finish the steps that were submitted; whether that was done in time."""
        self._submitted.put(None)
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """Run the next step; False if there is none to come."""
        with self._dispatching:
            run = self._submitted.get()
            if run is None or self.error is not None:
                self._submitted.put(None)  # the other threads are to end, too
                return False
            begin = time.monotonic()
            if not isinstance(run, RunStep):
                try:
                    run()
                except Exception as error:
                    return self._fail(error)
                return True
            try:
                handle = self._runner.dispatch(run.step)
            except Exception as error:
                return self._fail(error)
            end = time.monotonic()
            before, self._last_told = self._last_told, threading.Lock()
            told = self._last_told
            told.acquire()
        with before, _released(told):
            if self.error is not None:
                return False
            try:
                sampled = self._runner.collect(handle)
            except Exception as error:
                return self._fail(error)
            done = time.monotonic()
            self._post(StepDone(run.number, sampled, done - max(end, self._idle_since), begin, end - begin, done))
            self._idle_since = done
        return True

    def _fail(self, error: Exception) -> bool:
        with self._failing:
            if self.error is None:
                self.error = error
                self._post(DeviceFailed(f"{type(error).__name__}: {error}"))
        self._submitted.put(None)
        return False


@contextmanager
def _released(lock: threading.Lock) -> Iterator[None]:
    """Release a lock that is held at the end of the `with` block."""
    try:
        yield
    finally:
        lock.release()
