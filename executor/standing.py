"""The steps that a rank has said ahead, which run one after the other as long as their tokens let them."""

from collections import deque
from itertools import accumulate, pairwise

import numpy as np

from bus.messages import MOST_STANDING_STEPS, PartialSchedule, StandingSchedule, StepResult
from bus.standing import may_end
from bus.wire import unpack_ints
from executor.step import Int32


class Standing:
    """What stands of one rank, in order; false when nothing does."""

    def __init__(self) -> None:
        self.last_step = -1
        """The last that was added."""
        self._goes_on = False
        """Whether the rank's last schedule was one of these."""
        self._steps: deque[PartialSchedule] = deque()
        self._stops: Int32 = np.empty(0, np.int32)
        self._told: deque[StepResult] = deque(maxlen=MOST_STANDING_STEPS)
        """The rank's last results, which it may not have had when it sent what comes next."""

    def __len__(self) -> int:
        return len(self._steps)

    def fault_of(self, schedule: StandingSchedule) -> str:
        """Why steps cannot be added; empty if they can."""
        if len(self._steps) + schedule.num_steps > MOST_STANDING_STEPS:
            return f"{len(self._steps)} + {schedule.num_steps} steps would stand; {MOST_STANDING_STEPS} may"
        num_blocks = unpack_ints(schedule.num_blocks)
        given = schedule.block_ids.nbytes // 4
        if (num_blocks < 0).any() or int(num_blocks.sum(dtype=np.int64)) != given:
            return f"the blocks of its steps make {num_blocks.sum(dtype=np.int64)}; it has {given}"
        return ""

    def add(self, schedule: StandingSchedule) -> None:
        """Add steps that have no fault; not if a result that the rank has not seen may have ended a request."""
        stops = unpack_ints(schedule.stop_token_ids)
        if any(result.step > schedule.after and may_end(result, stops) for result in self._told):
            return
        self._goes_on = True
        self._stops = stops
        self.last_step = schedule.first_step + schedule.num_steps - 1
        bounds = accumulate((4 * unpack_ints(schedule.num_blocks)).tolist(), initial=0)
        for step, (begin, end) in enumerate(pairwise(bounds), schedule.first_step):
            self._steps.append(
                PartialSchedule(
                    step=step,
                    again=True,
                    block_rows=schedule.block_rows[begin:end],
                    block_ids=schedule.block_ids[begin:end],
                    more=schedule.more or step < self.last_step,
                )
            )

    def take(self) -> PartialSchedule:
        """The next step; it stands no more."""
        return self._steps.popleft()

    def clear(self) -> None:
        """Nothing stands any more, or the rank goes on with other schedules."""
        self._goes_on = False
        self._steps.clear()

    def end_by(self, result: StepResult) -> bool:
        """Note what the rank is told of a step. Whether what stands, or may be on its way, is void by that."""
        self._told.append(result)
        if not self._goes_on or not may_end(result, self._stops):
            return False
        self.clear()
        return True
