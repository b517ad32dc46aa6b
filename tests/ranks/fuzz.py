"""Native scheduler against vLLM's on random traces: ``python -m tests.ranks.fuzz --traces 10000 --jobs 2``."""

import argparse
import multiprocessing
import time
from collections import Counter
from typing import Any

from bus.config import Config
from bus.counters import Counters
from ranks.vllm_loading import load
from tests.ranks.decisions import Action, Add, Side, Trace, compare, shrunk
from tests.ranks.native_side import NativeOnTheBus, NativeSingleStep, as_on_the_bus, make_native
from tests.ranks.random_traces import draw_trace, seen

LEAST_SHARE = 0.2
HAS_TO_HAPPEN = ("preemption", "eviction", "prefix hit", "chunk", "draft reject", "session")


def load_oracle() -> Any:
    """Import vLLM, and return what makes its schedulers."""
    load(Config(), Counters())
    from tests.ranks.oracle import OracleMaker

    return OracleMaker()


def play(maker: Any, trace: Trace) -> list[list[Any]]:
    """Compare both schedulers on a trace; traces without drafts go over the step bus as well."""
    native = NativeSingleStep(make_native(trace.settings, single_step=True))
    history = compare(trace, native, maker.make(trace.settings), native.has_reclaimed)
    if not any(turn.drafts or any(_is_sessions(action) for action in turn.before) for turn in trace.turns):
        on_the_bus = NativeOnTheBus(make_native(trace.settings))
        compare(trace, on_the_bus, _Forgetful(maker.make(trace.settings)))
    return history


def _is_sessions(action: Action) -> bool:
    return isinstance(action, Add) and action.session


class _Forgetful:
    """A side that does not tell what the step bus does not show."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def schedule(self) -> Any:
        decision = self._side.schedule()
        while not decision.scheduled and decision.preempted:  # a rank asks again at once
            self._side.update({})
            decision = self._side.schedule()
        return as_on_the_bus(decision)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)


def check(maker: Any, seeds: range) -> Counter[str]:
    """Play the traces of these seeds; how many of them had what.

    Raises:
        AssertionError: a trace on which they differ, as small as it gets.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        trace = draw_trace(seed)
        try:
            counts += seen(trace, play(maker, trace))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {_smallest(maker, trace, type(error))}") from error
        counts["traces"] += 1
    return counts


def _smallest(maker: Any, trace: Trace, kind: type[Exception]) -> Exception:
    last: list[Exception] = []

    def fails(candidate: Trace) -> bool:
        try:
            play(maker, candidate)
        except kind as error:
            last.append(error)
            return True
        return False

    small = shrunk(trace, fails)
    assert fails(small)
    return last[-1]


def _work(seeds: range, results: Any) -> None:
    try:
        results.put(check(load_oracle(), seeds))
    except BaseException as error:
        results.put(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    every = arguments.jobs
    seeds = range(arguments.first, arguments.first + arguments.traces)
    workers = [context.Process(target=_work, args=(seeds[i::every], results)) for i in range(every)]
    for worker in workers:
        worker.start()
    counts: Counter[str] = Counter()
    try:
        for _ in workers:
            result = results.get()
            if isinstance(result, BaseException):
                raise SystemExit(f"they differ\n{result}")
            counts += result
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    print(f"{counts['traces']} traces, no difference, {time.monotonic() - begin:.0f} s")
    for what, count in sorted(counts.items()):
        print(f"  {what:14} {count:6} {count / counts['traces']:6.1%}")
    rare = [what for what in HAS_TO_HAPPEN if counts[what] < LEAST_SHARE * counts["traces"]]
    if rare:
        raise SystemExit(f"too rare: {', '.join(rare)}")


if __name__ == "__main__":
    main()
