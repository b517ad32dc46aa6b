"""Steady decode: step after step the same rows draw a token each, and nothing begins or ends.

What such a step needs is known from the one before. Here it is kept by place in the step, and a step costs a few array
operations however many rows there are, and something for each block that is filled or begun.
"""

from collections.abc import Sequence

import numpy as np

from bus.messages import Ints, Outputs, StandingSchedule
from bus.standing import has_any
from bus.wire import pack_ints
from ranks.batch import NO_ROWS, NONE, Batch, Rows, stops_of
from ranks.kv_cache import KvCache
from ranks.planning import Step
from ranks.request import Int32
from ranks.results import Places
from ranks.scheduler import StepOutputs


class Steady:
    """All rows of a batch, each of which draws a token in every step.

    While it lasts, `known`, `unseen` and `computed` of the batch stand still; `settle` brings them up to date.

    A step is planned and then taken; or, if it was foreseen, it may be passed: then what is to be done for it waits for
    `catch_up`, which does it for several steps at once.
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
        self._passed: list[Int32] = []
        """The tokens of steps that were passed, after those planned and taken."""
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
        block_rows, block_ids = NO_ROWS, _NO_BLOCKS
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

    def foresee(self, first_step: int, after: int, known_ahead: int, most: int) -> StandingSchedule | None:
        """What `plan` will make of up to `most` steps from `first_step` on, if nothing else is done meanwhile.

        These follow `known_ahead` steps that were foreseen before and are not planned yet. None if there is not even
        one such step.
        """
        last = min(known_ahead + most, self._most - self._planned)
        if last <= known_ahead:
            return None
        rows, lacking, step_of = self._beginning(last)
        num_blocks = np.bincount(step_of[lacking > 0], minlength=last)
        begun = np.cumsum(num_blocks)
        last = int(np.searchsorted(begun, self._kv.pool.num_free, side="right"))
        if last <= known_ahead:
            return None
        before = int(begun[known_ahead - 1]) if known_ahead else 0
        until = int(begun[last - 1])
        return StandingSchedule(
            first_step=first_step,
            num_steps=last - known_ahead,
            after=after,
            num_blocks=pack_ints(num_blocks[known_ahead:last]),
            block_rows=pack_ints(rows[lacking > 0][before:until]),
            block_ids=pack_ints(self._kv.pool.peek(until)[before:]),
            stop_token_ids=pack_ints(self._stops),
            more=self._planned + last < self._longest,
        )

    def _beginning(self, count: int) -> tuple[Rows, Int32, Int32]:
        """The rows whose turn it is to begin a block in the next `count` steps, in order, each once per `block_size`.

        With how many blocks they lack then, 0 or 1, and in which of the steps that is, counted from 0.
        """
        size = self._kv.block_size
        steps = range(self._planned + 1, self._planned + count + 1)
        places = [self._of_phase[-step % size] for step in steps]
        step_of = np.repeat(np.arange(count, dtype=np.int32), [of_step.size for of_step in places])
        joined = np.concatenate(places)
        rows = self._rows[joined]
        ends = self._computed[joined] + step_of + np.int32(self._planned + 1)
        lacking = self._kv.lacking(rows, ends)
        if count > size:  # what a row lacks at its second turn and later, it was given in part at the one before
            later = step_of >= size
            lacking[later] -= self._kv.lacking(rows[later], ends[later] - size)
        return rows, lacking, step_of

    def goes_on(self, tokens: Int32) -> bool:
        """Whether none of the tokens [size] of the oldest step without result may end a request."""
        if self._taken + len(self._passed) + 1 >= self._last_tokens:
            return False
        return not has_any(tokens, self._stops)

    def passes(self, number: int, tokens: Int32) -> None:
        """The step `number` was foreseen, and has given the rows these tokens [size], with which all goes on."""
        self._last_number = number
        self._passed.append(tokens)

    def catch_up(self) -> int:
        """Do for all steps that were passed what `plan` and `take` would have done; how many they are."""
        passed, self._passed = self._passed, []
        for begin in range(0, len(passed), self._kv.block_size):
            self._catch_up_with(passed[begin : begin + self._kv.block_size])
        if passed:
            self._batch.complete(self._last_number)
        return len(passed)

    def _catch_up_with(self, passed: list[Int32]) -> None:
        """Up to `block_size` steps: no row begins or fills more than one block."""
        count = len(passed)
        rows, lacking, _ = self._beginning(count)
        if lacking.any():
            self._kv.grow(rows, lacking)
        self._batch.tokens.reshape(-1)[self._at[:, None] + np.arange(count)] = np.stack(passed, axis=1)
        full = [self._full_at(taken) for taken in range(self._taken, self._taken + count) if taken != self._named_at]
        self._planned += count
        self._taken += count
        self._at += count
        self._named_at = self._taken - 1
        self._name(full)

    def take(self, tokens: Int32) -> None:
        """Give the rows the tokens [size] of the oldest step in flight, with which all goes on."""
        self._batch.tokens.reshape(-1)[self._at] = tokens
        self._at += 1
        self._taken += 1
        if self._names_early and self._in_flight + self._planned > self._taken:
            self._name_full()

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
        if self._named_at != self._taken:
            self._named_at = self._taken
            self._name([self._full_at(self._taken)])

    def _full_at(self, taken: int) -> tuple[Places, Int32]:
        """The places of rows that filled a block with the step taken as this one, and how long they were then."""
        # A row's phase counts from its last computed token, which is `in_flight` - 1 ahead of its last known one
        full = self._of_phase[(self._in_flight - taken - 2) % self._kv.block_size]
        return full, self._known[full] + np.int32(taken)

    def _name(self, full: Sequence[tuple[Places, Int32]]) -> None:
        """Let the last full blocks of rows be found, each row named once, given by their places and lengths."""
        if any(places.size for places, _ in full):
            rows = self._rows[np.concatenate([places for places, _ in full])]
            self._kv.name_full(rows, np.concatenate([lengths for _, lengths in full]))


_NO_BLOCKS: list[int] = []


def _stops_of(batch: Batch, rows: Rows) -> Int32:
    """All tokens that any of `rows` stops at, each where it comes first."""
    stops, places = np.unique(batch.stops[rows], return_index=True)
    found = dict.fromkeys(stops[np.argsort(places)].tolist())
    found.pop(NONE, None)
    for row in rows.tolist() if batch.many_stops else ():
        if row in batch.many_stops:
            found |= dict.fromkeys(stops_of(batch.request(row)))
    return np.array(list(found), np.int32)


def _addressees(batch: Batch, rows: Rows) -> list[tuple[int, Ints, Places | None]]:
    """Each frontend that has requests in `rows`, their handles, and their places if it does not have all."""
    frontends = batch.frontend[rows]
    handles = batch.handle[rows]
    present = np.unique(frontends).tolist()
    if len(present) == 1:
        return [(present[0], pack_ints(handles), None)]
    places = {frontend: np.flatnonzero(frontends == frontend) for frontend in present}
    return [(frontend, pack_ints(handles[mine]), mine) for frontend, mine in places.items()]
