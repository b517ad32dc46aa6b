"""From the ranks' partial schedules to one merged step, with nothing taken on trust."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from bus.messages import ContinueRow, Ints, NewRow, PartialSchedule, ResumeRow
from bus.sampling import fault_of
from bus.wire import unpack_ints
from executor.rows import Rows
from executor.step import Int32, MergedStep, RowSetup


class Refused(Exception):
    """A schedule that cannot be run; the text is the sentence to answer with."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What schedules are checked against. `blocks_of_rank` has the KV blocks of each rank.

    `first_blocks`, where given, is the number that the first block of each rank has in the merged step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    blocks_of_rank: Sequence[int]
    first_blocks: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A schedule that was applied to the rows: one rank's share of a merged step.

    `rows` [n] are global; `ends` [n] is the position after each sequence's last token of the step.
    """

    rank: int
    step: int
    setups: list[RowSetup]
    rows: Int32
    ends: Int32
    num_tokens: Int32
    samples: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Steady:
    """Rows of a rank that run again and again, one token each, all drawing one.

    `rows`, `ones` and `samples` [n] stay the same objects; `ends` [n] is as in `Part`, `longest` its largest. `room`
    [n] is how many positions each row's blocks have. `places` [rows of the rank] says where a row is in these, or -1.
    """

    rows: Int32
    ones: Int32
    samples: npt.NDArray[np.bool_]
    ends: Int32
    longest: int
    room: Int32
    places: Int32


@dataclass(frozen=True, slots=True)
class _Joined:
    """What parts of the same rows as before have in common when they are put together."""

    parts: list[Part]
    ranks: Int32
    rows: Int32
    num_tokens: Int32
    samples: npt.NDArray[np.bool_]


class Merger:
    """Applies schedules to the rows, in the order in which they are to run, and puts parts together."""

    def __init__(self, rows: Rows, limits: Limits) -> None:
        self._rows = rows
        self._limits = limits
        self._last: dict[int, Part] = {}
        """What each rank ran last."""
        self._steady: dict[int, _Steady] = {}
        """By rank, of those that run the same rows again."""
        self._joined: _Joined | None = None

    def void(self, rank: int) -> None:
        """Forget all rows of a rank: it is gone, or its view of them and ours have come apart."""
        self._last.pop(rank, None)
        self._steady.pop(rank, None)
        self._rows.void(rank)

    def apply(self, rank: int, schedule: PartialSchedule) -> Part:
        """Check a rank's next schedule and bring its rows up to date with it.

        Raises:
            Refused: it cannot be run. Deltas say nothing without those before them, so all rows of the rank are void
                then: it has to set up again what it still wants to run.
        """
        try:
            if schedule.again:
                return self._run_again(rank, schedule)
            self._steady.pop(rank, None)
            setups = self._set_up(rank, schedule)
            self._append_blocks(rank, schedule)
            part = self._last[rank] = self._advance(rank, schedule, setups)
            return part
        except Refused:
            self.void(rank)
            raise

    def merge(self, parts: list[Part]) -> MergedStep:
        """One batch of `parts`, which are in rank order and of different ranks; at least one."""
        joined = self._join(parts)
        ends = np.concatenate([part.ends for part in parts])
        return MergedStep(
            setups=[setup for part in parts for setup in part.setups],
            ranks=joined.ranks,
            rows=joined.rows,
            positions=ends - joined.num_tokens,
            num_tokens=joined.num_tokens,
            samples=joined.samples,
            block_tables=self._rows.tables(joined.rows, int(ends.max())),
        )

    def _join(self, parts: list[Part]) -> _Joined:
        """Put together what does not change while the same rows run again; it is the same objects then."""
        before = self._joined
        if before is not None and len(parts) == len(before.parts):
            pairs = zip(parts, before.parts, strict=True)
            if all(part.rows is old.rows and part.num_tokens is old.num_tokens for part, old in pairs):
                return before
        rows = np.concatenate([part.rows for part in parts])
        ranks = rows // np.int32(self._limits.max_num_seqs)
        num_tokens = np.concatenate([part.num_tokens for part in parts])
        samples = np.concatenate([part.samples for part in parts])
        self._joined = _Joined(parts, ranks, rows, num_tokens, samples)
        return self._joined

    def _run_again(self, rank: int, schedule: PartialSchedule) -> Part:
        steady = self._steady.get(rank)
        if steady is None:
            steady = self._steady[rank] = self._begin_again(rank)
        if schedule.block_ids.nbytes:
            self._append_blocks(rank, schedule)
            rows = unpack_ints(schedule.block_rows)
            rows = rows[steady.places[rows] >= 0]
            steady.room[steady.places[rows]] = self._room(rows + np.int32(self._first_row(rank)))
        ends = steady.ends = steady.ends + np.int32(1)
        steady.longest += 1
        if steady.longest > self._limits.max_model_len:
            self._refuse_too_far(
                int(steady.rows[ends.argmax()]) - self._first_row(rank), steady.longest, steady.longest
            )
        if (uncovered := ends > steady.room).any():
            self._refuse_uncovered(rank, steady.rows, ends, uncovered)
        self._rows.advance(steady.rows, ends, steady.samples)
        return Part(rank, schedule.step, [], steady.rows, ends, steady.ones, steady.samples)

    def _begin_again(self, rank: int) -> _Steady:
        last = self._last.get(rank)
        if last is None:
            raise Refused("it runs the rows of the last schedule again, but there is none")
        if not last.samples.all():
            row = int(last.rows[last.samples.argmin()]) - self._first_row(rank)
            raise Refused(f"row {row} did not come to its last token; only rows that drew one can run again")
        places = np.full(self._limits.max_num_seqs, -1, np.int32)
        places[last.rows - self._first_row(rank)] = np.arange(last.rows.size)
        room = self._room(last.rows)
        return _Steady(last.rows, np.ones_like(last.rows), last.samples, last.ends, int(last.ends.max()), room, places)

    def _room(self, rows: Int32) -> Int32:
        room: Int32 = self._rows.num_blocks[rows] * np.int32(self._rows.block_size)
        return room

    def _set_up(self, rank: int, schedule: PartialSchedule) -> list[RowSetup]:
        count = len(schedule.new) + len(schedule.resumed) + len(schedule.continued)
        if count == 0:
            return []
        if count > self._limits.max_num_seqs:
            raise Refused(f"{count} rows are set up; there are {self._limits.max_num_seqs}")
        setups = [self._begin(rank, item, item.prompt_token_ids, 0) for item in schedule.new]
        setups += [self._begin(rank, item, item.token_ids, item.num_output_tokens) for item in schedule.resumed]
        setups += [self._continue(rank, item) for item in schedule.continued]
        rows = [setup.row for setup in setups]
        if len(set(rows)) != len(rows):
            twice = next(row for place, row in enumerate(rows) if row in rows[:place])
            raise Refused(f"row {twice - self._first_row(rank)} is set up twice")
        return setups

    def _begin(self, rank: int, item: NewRow | ResumeRow, token_ids: Ints, num_output_tokens: int) -> RowSetup:
        row = self._global_row(rank, item.row)
        tokens = self._tokens(token_ids, item.row)
        blocks = unpack_ints(item.block_ids)
        if not 0 <= num_output_tokens < tokens.size:
            raise Refused(f"row {item.row}: {num_output_tokens} of {tokens.size} tokens cannot be output")
        if not 0 <= item.num_computed_tokens < tokens.size:
            raise Refused(
                f"row {item.row}: {item.num_computed_tokens} of {tokens.size} tokens cannot be computed already"
            )
        if tokens.size > self._limits.max_model_len:
            raise Refused(
                f"row {item.row}: {tokens.size} tokens are more than max_model_len {self._limits.max_model_len}"
            )
        self._check_blocks(rank, blocks)
        if blocks.size > self._rows.most_blocks:
            raise Refused(
                f"row {item.row}: {blocks.size} blocks are more than the {self._rows.most_blocks} a row can use"
            )
        self._check_sampling(item)
        self._rows.set_up(row, tokens.size, item.num_computed_tokens, blocks)
        return RowSetup(row, 0, tokens, tokens.size - num_output_tokens, item.sampling)

    def _continue(self, rank: int, item: ContinueRow) -> RowSetup:
        row = self._global_row(rank, item.row)
        length = int(self._rows.lengths[row])
        if length == 0:
            raise Refused(f"row {item.row} is continued but was never set up")
        tokens = self._tokens(item.token_ids, item.row)
        if not 0 <= item.drop <= length:
            raise Refused(f"row {item.row} has {length} tokens, {item.drop} cannot be dropped")
        base, most = length - item.drop, self._limits.max_model_len
        if base + tokens.size > most:
            raise Refused(f"row {item.row}: {base} + {tokens.size} tokens are more than max_model_len {most}")
        self._check_sampling(item)
        self._rows.rewrite(row, base, base + tokens.size)
        return RowSetup(row, base, tokens, base + tokens.size, item.sampling)

    def _append_blocks(self, rank: int, schedule: PartialSchedule) -> None:
        rows = unpack_ints(schedule.block_rows)
        blocks = unpack_ints(schedule.block_ids)
        if rows.size == 0:
            return
        self._check_rows(rows)
        self._check_blocks(rank, blocks)
        appended = np.bincount(rows, minlength=self._limits.max_num_seqs)
        mine = slice(self._first_row(rank), self._first_row(rank + 1))
        unknown = (appended > 0) & (self._rows.lengths[mine] == 0)
        if unknown.any():
            raise Refused(f"row {unknown.argmax()} gets blocks but was never set up")
        too_many = self._rows.num_blocks[mine] + appended > self._rows.most_blocks
        if too_many.any():
            raise Refused(f"row {too_many.argmax()} gets more than the {self._rows.most_blocks} blocks a row can use")
        one_each = int(appended.max()) == 1
        self._rows.append_blocks(rows + np.int32(self._first_row(rank)), blocks, one_each)

    def _advance(self, rank: int, schedule: PartialSchedule, setups: list[RowSetup]) -> Part:
        local = unpack_ints(schedule.rows)
        if local.size == 0:
            raise Refused("no row runs")
        self._check_rows(local)
        times = np.bincount(local)
        if times.max() > 1:
            raise Refused(f"row {times.argmax()} runs twice")
        num_tokens = unpack_ints(schedule.num_tokens) if schedule.num_tokens.nbytes else np.ones_like(local)
        # Each is positive and their int64 sum is small, so nothing below overflows.
        if num_tokens.min() < 1:
            raise Refused(f"row {local[num_tokens.argmin()]} runs {num_tokens.min()} tokens; it must be at least 1")
        if (total := int(num_tokens.sum(dtype=np.int64))) > self._limits.max_num_batched_tokens:
            raise Refused(f"{total} tokens are more than max_num_batched_tokens {self._limits.max_num_batched_tokens}")
        rows = local + np.int32(self._first_row(rank))
        lengths = self._rows.lengths[rows]
        ends = self._rows.positions[rows] + num_tokens
        too_far = ends > np.minimum(lengths, self._limits.max_model_len)
        if too_far.any():
            self._refuse_too_far(
                int(local[too_far.argmax()]), int(lengths[too_far.argmax()]), int(ends[too_far.argmax()])
            )
        if (uncovered := ends > self._room(rows)).any():
            self._refuse_uncovered(rank, rows, ends, uncovered)
        samples = ends == lengths
        self._rows.advance(rows, ends, samples)
        return Part(rank, schedule.step, setups, rows, ends, num_tokens, samples)

    def _refuse_uncovered(self, rank: int, rows: Int32, ends: Int32, uncovered: npt.NDArray[np.bool_]) -> NoReturn:
        place = int(uncovered.argmax())
        raise Refused(f"row {rows[place] - self._first_row(rank)} has no block for position {ends[place] - 1}")

    def _refuse_too_far(self, row: int, length: int, end: int) -> NoReturn:
        if length == 0:
            raise Refused(f"row {row} runs but was never set up")
        if end > length:
            raise Refused(f"row {row} has {length} tokens but would be computed up to {end}")
        raise Refused(f"row {row} would be computed up to {end}, past max_model_len {self._limits.max_model_len}")

    def _first_row(self, rank: int) -> int:
        return rank * self._limits.max_num_seqs

    def _global_row(self, rank: int, row: int) -> int:
        if not 0 <= row < self._limits.max_num_seqs:
            raise Refused(f"row {row} does not exist; rows are 0 to {self._limits.max_num_seqs - 1}")
        return self._first_row(rank) + row

    def _check_rows(self, rows: Int32) -> None:
        for row in (int(rows.min()), int(rows.max())):
            self._global_row(0, row)

    def _check_blocks(self, rank: int, blocks: Int32) -> None:
        for block in (int(blocks.min()), int(blocks.max())) if blocks.size else ():
            if not 0 <= block < self._limits.blocks_of_rank[rank]:
                raise Refused(f"block {block} does not exist; blocks are 0 to {self._limits.blocks_of_rank[rank] - 1}")

    def _tokens(self, token_ids: Ints, row: int) -> Int32:
        tokens = unpack_ints(token_ids)
        if tokens.size == 0:
            raise Refused(f"row {row} gets no tokens")
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self._limits.vocab_size:
                raise Refused(f"row {row}: token {token} does not exist; tokens are 0 to {self._limits.vocab_size - 1}")
        return tokens

    def _check_sampling(self, item: NewRow | ResumeRow | ContinueRow) -> None:
        if fault := fault_of(item.sampling, self._limits.vocab_size):
            raise Refused(f"row {item.row}: {fault}")
