"""Steady decode: step after step the same rows draw a token each, and nothing begins or ends.

What such a step needs is known from the one before. Here it is kept by place in the step, and a step costs a few array
operations however many rows there are, and something for each block that is filled or begun.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bus.messages import Ints, Outputs
from bus.wire import pack_ints
from ranks.batch import NONE, Batch, Rows
from ranks.kv_cache import KvCache
from ranks.planning import Step
from ranks.request import Int32
from ranks.scheduler import StepOutputs

FEW_STOPS = 4
"""So many stop tokens are compared with one by one."""


class Steady:
    """All rows of a batch, each of which draws a token in every step.

    While it lasts, `known`, `unseen` and `computed` of the batch stand still; `settle` brings them up to date.
    """

    def __init__(self, batch: Batch, kv: KvCache, steps: Sequence[Step], names_early: bool) -> None:
        """`steps` are in flight, the last has just been made, and all of them are as the steps to come.

        With `names_early` blocks get their names when their last token comes, not only when the next step is made.
        """
        rows = steps[-1].rows
        self._batch = batch
        self._kv = kv
        self._names_early = names_early
        self._rows = rows
        self._ones = np.ones(rows.size, np.int32)
        self._all = np.ones(rows.size, np.bool_)
        self._in_flight = len(steps)
        self._last_number = steps[-1].number
        # As of now; steps are counted from here.
        self._known: Int32 = batch.known[rows]
        self._computed: Int32 = batch.computed[rows]
        self._planned = self._taken = 0
        self._named_at = NONE
        left = batch.limit[rows] - self._computed - 1
        self._most, self._longest = int(left.min()), int(left.max())
        self._last_tokens = int((batch.limit[rows] - self._known).min())
        """The step, counted from here, whose token is the last of some row."""
        phases = (self._computed - 1) % kv.block_size
        self._of_phase = [np.flatnonzero(phases == phase) for phase in range(kv.block_size)]
        """By the last computed token's place in its block: those in whose turn it is to begin a block."""
        self._stops = _stops_of(batch, rows)
        self._at = rows * batch.tokens.shape[1] + self._known
        """Where each row's next token goes among all of the batch's tokens."""
        self._addressees = _addressees(batch, rows)

    @property
    def size(self) -> int:
        """Rows in a step."""
        return self._rows.size

    def plan(self, number: int) -> Step | None:
        """The next step; None if it cannot be like the others: a row comes to its end, or there are too few blocks."""
        if self._planned >= self._most:
            return None
        count = self._planned + 1
        block_rows, block_ids = _NO_ROWS, _NO_BLOCKS
        beginning = self._of_phase[-count % self._kv.block_size]
        if beginning.size:
            rows = self._rows[beginning]
            lacking = self._kv.lacking(rows, self._computed[beginning] + count)
            needed = int(np.add.reduce(lacking))
            if needed > self._kv.pool.num_free:
                return None
            if needed:
                block_rows, block_ids = self._kv.grow(rows, lacking)
        self._planned = count
        self._last_number = number
        self._name_full()
        return Step(number, self._rows, self._ones, self._all, block_rows, block_ids, [], [], {})

    def expects_more(self) -> bool:
        """Whether any row has tokens to draw after the last step planned."""
        return self._planned < self._longest

    def take(self, tokens: Int32) -> bool:
        """Give the rows the tokens [size] of the oldest step in flight; not if one of them may end its request."""
        if self._taken + 1 >= self._last_tokens:
            return False
        if len(self._stops) <= FEW_STOPS:
            if any(np.count_nonzero(tokens == stop) for stop in self._stops):
                return False
        elif np.isin(tokens, self._stops).any():
            return False
        self._batch.tokens.reshape(-1)[self._at] = tokens
        self._at += 1
        self._taken += 1
        if self._names_early and self._in_flight + self._planned > self._taken:
            self._name_full()
        return True

    def outputs(self, step: int, tokens: Int32) -> StepOutputs:
        """What the frontends are told of a step's `tokens` [size]."""
        return [
            (
                frontend,
                Outputs(step=step, handles=handles, tokens=pack_ints(tokens if places is None else tokens[places])),
            )
            for frontend, handles, places in self._addressees
        ]

    def settle(self) -> None:
        """Bring the batch up to date."""
        batch, rows = self._batch, self._rows
        batch.known[rows] = self._known + self._taken
        batch.computed[rows] = self._computed + self._planned
        batch.unseen[rows] = self._in_flight + self._planned - self._taken
        batch.use(rows, self._last_number)

    def _name_full(self) -> None:
        """Let blocks be found whose last token came with the last step taken."""
        if self._named_at == self._taken:
            return
        self._named_at = self._taken
        # A row's phase counts from its last computed token, which is `in_flight` - 1 ahead of its last known one
        full = self._of_phase[(self._in_flight - self._taken - 2) % self._kv.block_size]
        if full.size:
            self._kv.name_full(self._rows[full], self._known[full] + self._taken)


_NO_ROWS: Rows = np.empty(0, np.intp)
_NO_BLOCKS: list[int] = []


def _stops_of(batch: Batch, rows: Rows) -> list[int]:
    """All tokens that any of `rows` stops at."""
    stops = dict.fromkeys(np.unique(batch.stops[rows]).tolist())
    stops.pop(NONE, None)
    for row in rows.tolist() if batch.many_stops else ():
        stops |= dict.fromkeys(batch.many_stops.get(row, ()))
    return list(stops)


def _addressees(batch: Batch, rows: Rows) -> list[tuple[int, Ints, npt.NDArray[np.intp] | None]]:
    """Each frontend that has requests in `rows`, their handles, and their places if it does not have all."""
    frontends = batch.frontend[rows]
    handles = batch.handle[rows]
    present = np.unique(frontends).tolist()
    if len(present) == 1:
        return [(present[0], pack_ints(handles), None)]
    places = {frontend: np.flatnonzero(frontends == frontend) for frontend in present}
    return [(frontend, pack_ints(handles[mine]), mine) for frontend, mine in places.items()]
