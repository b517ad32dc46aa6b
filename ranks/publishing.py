"""When frontends are told of a rank's load: soon after a change that matters to routing, and once a second in full."""

from collections.abc import Iterable

from bus.counters import Counters
from bus.messages import Load, PauseState
from ranks.scheduler import LoadFigures

FULL_INTERVAL_S = 1.0
"""The rank's counters are in full reports only: they are most of a report, and matter to nobody's routing."""
INTERVAL_S = 0.005
"""Changes within this time of a report wait for others, to go in one."""
_NOTHING = LoadFigures(0, 0, 0, None, 0, 0)


class LoadReports:
    """Knows what each frontend was told last."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._number = 0
        self._told: dict[int, tuple[object, ...]] = {}
        self._next = self._next_full = 0.0
        self._bus_counters: dict[str, float] = {}
        self.changed = False
        """Something has happened that may have changed the load."""

    def due(self, frontends: Iterable[int], now: float) -> tuple[list[int], float | None]:
        """Those of the frontends for whom it is worth making a report now, and when it will be for the others."""
        untold = [frontend for frontend in frontends if frontend not in self._told]
        if not self.changed:
            return untold, None
        if now < self._next:
            return untold, self._next
        self._next = now + INTERVAL_S
        self.changed = False
        return list(frontends), None

    def make(
        self, frontend: int, figures: LoadFigures | None, acknowledged: int, pause_state: PauseState, draining: bool
    ) -> Load | None:
        """A report for a frontend, None if it knows already. Without `figures` the rank has nothing to run on."""
        figures = figures or _NOTHING
        matters = (
            figures.running,
            figures.waiting,
            figures.pending_prefill_tokens,
            figures.num_blocks,
            acknowledged,
            pause_state,
            draining,
        )
        told = self._told.get(frontend)
        if told == matters:
            return None
        self._told[frontend] = matters
        self._number += 1
        return Load(
            number=self._number,
            acknowledged=acknowledged,
            running=figures.running,
            waiting=figures.waiting,
            pending_prefill_tokens=figures.pending_prefill_tokens,
            min_remaining_output=figures.min_remaining_output,
            used_blocks=figures.used_blocks,
            num_blocks=figures.num_blocks,
            pause_state=pause_state,
            draining=draining,
            counters=self._counters.snapshot() | self._bus_counters if told is None else {},
        )

    def forget(self, frontend: int) -> None:
        """The frontend is gone."""
        self._told.pop(frontend, None)

    def refresh(self, now: float, bus_counters: dict[str, float]) -> None:
        """Make a full report due when it is time for one. `bus_counters` go with all reports from now on."""
        self._bus_counters = bus_counters
        if now >= self._next_full:
            self._next_full = now + FULL_INTERVAL_S
            self._told.clear()
