"""The threads that keep the device fed: one hands steps to the model's runner, another waits for what they drew."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from executor.core import DeviceFailed, RunStep, StepDone
from executor.step import MergedStep, SampledStep


class StepRunner(Protocol):
    """What runs the model: `dispatch` starts a step and returns at once, `collect` waits for one that was started."""

    def dispatch(self, step: MergedStep) -> Any: ...

    def collect(self, handle: Any) -> SampledStep: ...


class _Dispatched(NamedTuple):
    """A step at the device: its number, the runner's handle, and when giving it to the device began and ended."""

    number: int
    handle: Any
    begin: float
    end: float


class Pipeline:
    """Runs steps in the order of `submit` and posts a `StepDone` for each, and one `DeviceFailed` if that cannot go on.

    Step k + 1 is dispatched while k runs, so that the device goes from one to the next without the host.
    """

    def __init__(self, runner: StepRunner, post: Callable[[StepDone | DeviceFailed], None]) -> None:
        self.error: Exception | None = None
        """What the device failed with, if it did."""
        self._runner = runner
        self._post = post
        self._submitted: SimpleQueue[RunStep | None] = SimpleQueue()
        self._dispatched: SimpleQueue[_Dispatched | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in (("dispatch", self._dispatch), ("collect", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, run: RunStep) -> None:
        """Run a step after those submitted before."""
        self._submitted.put(run)

    def stop(self, within_s: float) -> bool:
        """Finish the steps that were submitted; whether that was done in time."""
        self._submitted.put(None)
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _dispatch(self) -> None:
        while (run := self._submitted.get()) is not None:
            begin = time.monotonic()
            handle = self._runner.dispatch(run.step)
            self._dispatched.put(_Dispatched(run.number, handle, begin, time.monotonic()))

    def _collect(self) -> None:
        idle_since = 0.0
        while (dispatched := self._dispatched.get()) is not None:
            number, handle, begin, end = dispatched
            sampled = self._runner.collect(handle)
            done = time.monotonic()
            self._post(StepDone(number, sampled, done - max(end, idle_since), begin, end - begin, done))
            idle_since = done

    def _guard(self, loop: Callable[[], None]) -> None:
        """End both threads when one ends."""
        try:
            loop()
        except Exception as error:
            if self.error is None:
                self.error = error
                self._post(DeviceFailed(f"{type(error).__name__}: {error}"))
        finally:
            self._submitted.put(None)
            self._dispatched.put(None)
