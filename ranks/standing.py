"""The steps that the executor may begin without another schedule, and what has to wait until it may not any more."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bus.core import Drained, Event, PeerDown, PeerUp, Received, Tick
from bus.messages import AddRequest, AddRequests, CommandRequest, StandingSchedule, StepResult
from bus.standing import may_end
from bus.wire import unpack_ints
from ranks.commands import PROBES
from ranks.request import Int32


@dataclass(slots=True)
class Standing:
    """What a rank lets stand: the steps up to `last_step`, nothing if that is None.

    Those from `first_step` on were sent last, in one message. As long as something stands it is not known which step
    runs, so nothing may change what runs or where. What would is kept in `events`, in order, and what stands is
    recalled.
    """

    first_step: int = 0
    last_step: int | None = None
    is_recalled: bool = False
    events: deque[Event] = field(default_factory=deque)
    num_recalls: int = 0
    _first_of_all: int = 0
    _stops: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    def begin(self, schedule: StandingSchedule) -> None:
        """Let more steps stand."""
        if self.last_step is None:
            self._first_of_all = schedule.first_step
        self.first_step = schedule.first_step
        self.last_step = schedule.first_step + schedule.num_steps - 1
        self._stops = unpack_ints(schedule.stop_token_ids)

    def may_grow(self, last_result: int) -> bool:
        """Whether more may be sent: one message at a time can be on its way, so that `next_step` knows which."""
        return self.last_step is None or (not self.is_recalled and last_result >= self.first_step)

    def next_step(self, result: StepResult, depth: int) -> int | None:
        """The first step that was not sent, if a result says that nothing stands any more. `depth` is `async_depth`."""
        if self.last_step is None:
            return None
        if result.next_step is not None:
            return max(result.next_step, self._first_of_all, result.step + 1)
        if may_end(result, self._stops):
            return max(self._first_of_all, result.step + 1)  # the executor knew of nothing that stands
        arrived = result.step >= self.first_step
        return self.last_step + 1 if arrived and result.step + depth >= self.last_step else None

    def must_end_before(self, event: Event) -> bool:
        """Whether an event has to wait until nothing stands."""
        if self.last_step is None or isinstance(event, Drained | Tick):
            return False
        if isinstance(event, Received | PeerUp | PeerDown) and event.peer.role == "executor":
            return False
        return bool(self.events) or not _leaves_all_as_it_is(event)

    def end(self) -> None:
        """Nothing stands any more."""
        self.last_step, self.is_recalled = None, False


def _leaves_all_as_it_is(event: Event) -> bool:
    """Whether what runs is not touched: it only asks for something, or brings what may join later."""
    if not isinstance(event, Received):
        return False
    message = event.message
    if isinstance(message, CommandRequest):
        return type(message.body) in PROBES
    return isinstance(message, AddRequest | AddRequests)
