"""Steady decode takes a short way, on which everything has to come out as on the long one."""

from typing import Any

import msgspec
import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import KvPool, Outputs, PartialSchedule, StepResult
from bus.wire import unpack_ints
from ranks.native import NativeScheduler
from ranks.scheduler import KvChanges, LoadFigures, StepOutputs
from tests.ranks.test_random_traces import Trace


class Recorded(NativeScheduler):
    """Keeps what it says."""

    short_way = True

    def __init__(self, config: Config, pool: KvPool, counters: Counters) -> None:
        # The trace allows for a block that vLLM's scheduler does not use
        super().__init__(config, msgspec.structs.replace(pool, num_blocks=pool.num_blocks - 1), counters)
        self.said: list[object] = []
        self.short_steps = 0
        self._rows: list[int] = []

    def _watch(self, plan: Any) -> None:
        if self.short_way:
            super()._watch(plan)

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        schedule = super().schedule(step, now)
        if schedule is None:
            self.said.append((step, None))
            return None
        self.short_steps += schedule.again
        whole = _readable(schedule)
        self._rows = whole["rows"] = self._rows if whole.pop("again", False) else unpack_ints(schedule.rows).tolist()
        self.said.append(whole)
        return schedule

    def update(self, result: StepResult) -> StepOutputs:
        outputs = super().update(result)
        self.said.append([(frontend, _readable(message)) for frontend, message in outputs])
        return outputs

    def take_kv_changes(self) -> KvChanges:
        changes = super().take_kv_changes()
        self.said.append(changes)
        return changes

    def load(self) -> LoadFigures:
        figures = super().load()
        self.said.append(figures)
        return figures


class LongWay(Recorded):
    short_way = False


def _readable(message: PartialSchedule | Outputs) -> dict[str, Any]:
    """Its fields that are not empty."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value}


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked for its load"])
def test_the_short_way_says_what_the_long_one_says(asks: bool) -> None:
    short_steps = 0
    for seed in range(60):
        traces = [AskingTrace(kind, seed, asks) for kind in (Recorded, LongWay)]
        for trace in traces:
            trace.run(num_requests=6)
        short, long = (trace.scheduler for trace in traces)
        assert short.said == long.said, f"seed {seed}"
        assert traces[0].counters.snapshot() == traces[1].counters.snapshot()
        assert not long.short_steps
        short_steps += short.short_steps
    assert short_steps > 100


class AskingTrace(Trace):
    """Asks for the load and the tokens now and then, which must not disturb anything."""

    def __init__(self, kind: type[Recorded], seed: int, asks: bool) -> None:
        super().__init__(kind, seed)
        self.asks = asks

    def turn(self, quiet: bool = False) -> bool:
        if self.asks and self.step % 3 == 0:
            self.scheduler.load()
            self.scheduler.said.append(self.scheduler.token_count())
        return super().turn(quiet)
