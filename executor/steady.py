"""Ranks whose rows run again, one token each: their next step follows from the last, so little is looked at anew."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bus.messages import PartialSchedule
from bus.wire import all_below, unpack_ints
from executor.checks import Limits
from executor.rows import Rows
from executor.step import Index, Int32, MergedStep, Part, firsts, largest

_ONE = np.int32(1)


class _Begun(NamedTuple):
    """Blocks that rows begin, at most one each, in the merged step's numbers. All [m].

    `places` are those of the rows in the step.
    """

    places: Index
    rows: Index
    blocks: Int32


class Steady:
    """Ranks that have run the rows of their last schedules again, together in one step.

    What changes from step to step is in the table of rows: the ranks may also run without each other in between.
    """

    def __init__(self, parts: list[Part], step: MergedStep, rows: Rows, limits: Limits) -> None:
        """`step` was merged from `parts`, which all ran again."""
        self._parts = parts
        self._step = step
        self._rows = rows
        self._limits = limits
        self._firsts = firsts(parts)
        self._index = step.rows.astype(np.intp)
        self._places = np.full(rows.lengths.size, -1, np.intp)
        """By global row, where it is in the step, or -1."""
        self._places[self._index] = np.arange(step.rows.size)
        ranks = [part.rank for part in parts]
        self._numbers = np.arange(len(ranks))
        self._first_rows = np.array([limits.first_row(rank) for rank in ranks], np.intp)
        self._first_blocks = np.array([limits.first_block(rank) for rank in ranks], np.int32)
        self._num_blocks = np.array([limits.blocks_of_rank[rank] for rank in ranks], np.uint32)

    def goes_on(self, last: Mapping[int, Part], schedules: Sequence[PartialSchedule]) -> bool:
        """Whether the ranks' next schedules run these rows again, `last` being what each rank ran last."""
        for part, schedule in zip(self._parts, schedules, strict=True):
            before = last.get(part.rank)
            if before is None or before.rows is not part.rows or not before.again or not schedule.again:
                return False
        return True

    def run(self, schedules: Sequence[PartialSchedule]) -> tuple[list[Part], MergedStep] | None:
        """The parts and the step of schedules by which it goes on; the table of rows is brought up to date.

        None, and nothing is changed, if a schedule is not to be run as it is.
        """
        last, rows, table = self._step, self._index, self._rows
        positions = table.positions[rows]
        ends = positions + _ONE
        longest = largest(ends)
        begun = self._blocks_begun(schedules)
        if begun is None or longest > self._limits.max_model_len:
            return None
        num_blocks = table.num_blocks[rows]
        if begun.rows.size:
            num_blocks[begun.places] += _ONE
            counts = num_blocks[begun.places]
            if largest(counts) > table.most_blocks:
                return None
        if np.count_nonzero(num_blocks * table.block_size < ends):
            return None
        if begun.rows.size:
            table.append_block_each(begun.rows, begun.blocks, counts)
        table.advance(rows, ends, ends + _ONE)
        parts = [
            Part(
                part.rank,
                schedule.step,
                [],
                part.rows,
                ends[first : first + part.rows.size],
                part.num_tokens,
                part.samples,
                True,
            )
            for part, schedule, first in zip(self._parts, schedules, self._firsts, strict=True)
        ]
        tables = table.tables(rows, longest)
        return parts, MergedStep([], last.ranks, last.rows, positions, last.num_tokens, last.samples, tables)

    def _blocks_begun(self, schedules: Sequence[PartialSchedule]) -> _Begun | None:
        """The blocks that the rows begin; None if they do not exist, or are more than one for a row."""
        counts = [schedule.block_ids.nbytes // 4 for schedule in schedules]
        if not any(counts):
            return _NONE_BEGUN
        local = unpack_ints(memoryview(b"".join([schedule.block_rows for schedule in schedules])))
        blocks = unpack_ints(memoryview(b"".join([schedule.block_ids for schedule in schedules])))
        of = self._numbers.repeat(counts)
        if not (all_below(local, self._limits.max_num_seqs) and all_below(blocks, self._num_blocks[of])):
            return None
        rows = local + self._first_rows[of]
        places = self._places[rows]
        different = set(places.tolist())
        if -1 in different or len(different) < places.size:
            return None
        return _Begun(places, rows, blocks + self._first_blocks[of])


_NO_ROWS: Index = np.empty(0, np.intp)
_NONE_BEGUN = _Begun(_NO_ROWS, _NO_ROWS, np.empty(0, np.int32))
