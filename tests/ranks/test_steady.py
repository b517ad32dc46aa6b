"""Steady decode takes a short way, on which everything has to come out as on the long one."""

import random
from typing import Any

import msgspec
import pytest
from msgspec import structs

from bus.config import Config
from bus.counters import Counters
from bus.messages import KvPool, Outputs, PartialSchedule, PauseState, StepResult
from bus.wire import unpack_ints
from executor.standing import Standing
from ranks.native import NativeScheduler
from ranks.scheduler import Ended, KvChanges, LoadFigures, StepOutputs
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
        return self._say(schedule)

    def _say(self, schedule: PartialSchedule) -> PartialSchedule:
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


class StandingWay(Recorded):
    """Lets steps stand, as the executor would run them."""

    def __init__(self, config: Config, pool: KvPool, counters: Counters) -> None:
        super().__init__(config, pool, counters)
        self.standing = Standing()
        self.next_step = 0
        self.standing_steps = 0
        self.recalled_steps = 0
        self._last_result = -1
        self._draw = random.Random(pool.num_blocks)

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        if self.standing and not self.may_stand():
            self.recall()
        if not self.standing or self._draw.random() < 0.2:
            first = self.standing.last_step + 1 if self.standing else step
            if (schedule := self.stand(first, self._last_result, self._draw.randint(1, 32))) is not None:
                assert not self.standing.fault_of(schedule)
                self.standing.add(schedule)
        self.next_step = step + 1
        if not self.standing:
            self.stand_down(step)
            return super().schedule(step, now)
        self.standing_steps += 1
        return self._say(self.standing.take())

    def update(self, result: StepResult) -> StepOutputs:
        self._last_result = result.step
        standing = len(self.standing)
        if self.standing.end_by(result):
            self.recalled_steps += standing
        if not self.standing:
            self.stand_down(self.next_step)
        return super().update(result)

    def recall(self) -> None:
        self.recalled_steps += len(self.standing)
        self.standing.clear()
        self.stand_down(self.next_step)

    def finish_ids(self, *arguments: Any) -> list[Ended]:
        self.recall()
        return super().finish_ids(*arguments)

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        self.recall()
        return super().reset_prefix_cache(reset_running)

    def set_pause(self, state: PauseState) -> None:
        self.recall()
        super().set_pause(state)

    def take_kv_changes(self) -> KvChanges:
        self._bring_up_to_date()
        return super().take_kv_changes()


def _readable(message: PartialSchedule | Outputs) -> dict[str, Any]:
    """Its fields that are not empty."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value}


def _without_blocks(said: list[object]) -> list[object]:
    """Without `more`, too, which is said before those are known who come meanwhile."""
    kept: list[object] = []
    for one in said:
        if isinstance(one, LoadFigures):
            kept.append(one._replace(used_blocks=0))
        elif isinstance(one, dict):
            kept.append({name: value for name, value in one.items() if name != "more"})
        elif not isinstance(one, KvChanges):
            kept.append(one)
    return kept


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


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked for its load"])
def test_steps_that_stand_are_those_that_would_be_scheduled(asks: bool) -> None:
    """One by one the same schedules come of it, the same outputs, counts, and names of blocks.

    Blocks are only counted, and told of, when their step is known to have been sent.
    """
    standing = recalled = 0
    for seed in range(120):
        traces = [AskingTrace(kind, seed, asks, depth=1) for kind in (StandingWay, LongWay)]
        for trace in traces:
            trace.run(num_requests=6)
        stood, long = (trace.scheduler for trace in traces)
        assert _without_blocks(stood.said) == _without_blocks(long.said), f"seed {seed}"
        assert traces[0].names == traces[1].names
        assert traces[0].counters.snapshot() == traces[1].counters.snapshot()
        standing, recalled = standing + stood.standing_steps, recalled + stood.recalled_steps
    assert standing > 300
    assert recalled > 300


def test_with_two_steps_in_flight_tokens_and_kv_are_right() -> None:
    standing = 0
    for seed in range(120):
        trace = AskingTrace(StandingWay, seed, False, depth=2)
        trace.run(num_requests=6)
        standing += trace.scheduler.standing_steps
    assert standing > 300


class AskingTrace(Trace):
    """Asks for the load and the tokens now and then, which must not disturb anything."""

    def __init__(self, kind: type[Recorded], seed: int, asks: bool, depth: int | None = None) -> None:
        super().__init__(kind, seed)
        if depth is not None:
            self.config = structs.replace(self.config, async_depth=depth)
            self.scheduler = kind(self.config, self.executor.pool, self.counters)
        self.asks = asks

    def turn(self, quiet: bool = False) -> bool:
        if self.asks and self.step % 3 == 0:
            self.scheduler.load()
            self.scheduler.said.append(self.scheduler.token_count())
        return super().turn(quiet)
