"""From the ranks' partial schedules to one merged step, with nothing taken on trust."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from bus.messages import ContinueRow, Ints, NewRow, PartialSchedule, ResumeRow
from bus.sampling import fault_of
from bus.wire import all_below, unpack_ints
from executor.rows import Rows
from executor.step import NO_MASKS, Drafts, Int32, Masks, MergedStep, RowSetup

_ONE = np.int32(1)
_NONE: Int32 = np.empty(0, np.int32)

_MOST_STEADY = 8
"""So many sets of ranks that run again are remembered, for the case that ranks run in turns."""


class Refused(Exception):
    """A schedule that cannot be run; the text is the sentence to answer with."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What schedules are checked against. `blocks_of_rank` has the KV blocks of each rank.

    `first_blocks`, where given, is the number that the first block of each rank has in the merged step. `most_drafts`
    is for each row; with `draws_drafts` their tokens do not come with schedules.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    blocks_of_rank: Sequence[int]
    first_blocks: Sequence[int] | None = None
    most_drafts: int = 0
    draws_drafts: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A schedule that was applied to the rows: one rank's share of a merged step.

    `rows` [n] are global; `ends` [n] is the position after each sequence's last token of the step. `again` says that
    they are the rows of the rank's part before, one token each. `masks` are by place in these rows.
    """

    rank: int
    step: int
    setups: list[RowSetup]
    rows: Int32
    ends: Int32
    num_tokens: Int32
    samples: npt.NDArray[np.bool_]
    again: bool = False
    drafts: Drafts | None = None
    masks: Masks = NO_MASKS


class _Begun(NamedTuple):
    """Blocks that rows begin: each row and block in the merged step's numbers, and how many the row has then.

    int32 [m] all; `room` is as in `_Steady`.
    """

    rows: Int32
    blocks: Int32
    num_blocks: Int32
    room: Int32


@dataclass(slots=True)
class _Steady:
    """Ranks whose rows run again and again, one token each, all drawing one.

    `parts` are those of the last step, `step` is what it was merged to, and `first` where each part begins in it.
    `ends` [n] is the position after each sequence's token, `longest` the largest of them, `room` [n] how many positions
    there are in each row's blocks, and `places` [global rows] where a row is in these, or -1.
    """

    parts: list[Part]
    step: MergedStep
    first: list[int]
    ends: Int32
    longest: int
    room: Int32
    places: Int32


def _firsts(parts: list[Part]) -> list[int]:
    """Where the rows of each part begin in the step that is made of them."""
    return [0, *accumulate(part.rows.size for part in parts[:-1])]


def _put_together(parts: list[Part]) -> Masks:
    """The masks of parts, by place in the step that is made of them."""
    if not any(part.masks.at.size for part in parts):
        return NO_MASKS
    masked = [(begin, part.masks) for begin, part in zip(_firsts(parts), parts, strict=True) if part.masks.at.size]
    return Masks(
        np.concatenate([masks.at + np.int32(begin) for begin, masks in masked]),
        np.concatenate([masks.words for _, masks in masked]),
    )


class Merger:
    """Applies schedules to the rows, in the order in which they are to run, and puts parts together."""

    def __init__(self, rows: Rows, limits: Limits, slots: Mapping[str, int] = MappingProxyType({})) -> None:
        """`slots` are those of the adapters that rows may have, by identity, as they are when it is asked."""
        self._rows = rows
        self._slots = slots
        self._limits = limits
        self._blocks_of_rank = np.array(limits.blocks_of_rank, np.uint32)
        self._first_blocks = np.array(limits.first_blocks or [0] * len(limits.blocks_of_rank), np.int32)
        self._last: dict[int, Part] = {}
        """What each rank ran last."""
        self._steady: dict[tuple[int, ...], _Steady] = {}
        """By the ranks that took part in a step."""
        self._drafting: dict[int, Part] = {}
        """Rows with drafts that are not judged, and the parts that these were in."""

    def void(self, rank: int) -> None:
        """Forget all rows of a rank: it is gone, or its view of them and ours have come apart."""
        self._last.pop(rank, None)
        self._drafting = {row: part for row, part in self._drafting.items() if part.rank != rank}
        self._rows.void(rank)

    def judged(self, parts: list[Part], counts: Int32) -> None:
        """A step with drafts, merged from `parts`, has come back with `counts` tokens of each of its sequences."""
        for first, part in zip(_firsts(parts), parts, strict=True):
            if part.drafts is not None:
                for place in np.flatnonzero(part.drafts.counts).tolist():
                    row = int(part.rows[place])
                    if self._drafting.get(row) is part:
                        del self._drafting[row]
                        self._rows.accept(row, int(counts[first + place]) - 1)

    def apply(self, rank: int, schedule: PartialSchedule) -> Part:
        """Check a rank's next schedule and bring its rows up to date with it.

        Raises:
            Refused: it cannot be run. Deltas say nothing without those before them, so all rows of the rank are void
                then: it has to set up again what it still wants to run.
        """
        try:
            setups = self._set_up(rank, schedule)
            if schedule.block_ids.nbytes:
                self._append_blocks(rank, schedule)
            part = self._last[rank] = self._advance(rank, schedule, setups)
            return part
        except Refused:
            self.void(rank)
            raise

    def merge(self, parts: list[Part]) -> MergedStep:
        """One batch of `parts`, which are in rank order and of different ranks; at least one."""
        rows = np.concatenate([part.rows for part in parts])
        ends = np.concatenate([part.ends for part in parts])
        num_tokens = np.concatenate([part.num_tokens for part in parts])
        step = MergedStep(
            setups=[setup for part in parts for setup in part.setups],
            ranks=rows // np.int32(self._limits.max_num_seqs),
            rows=rows,
            positions=ends - num_tokens,
            num_tokens=num_tokens,
            samples=np.concatenate([part.samples for part in parts]),
            block_tables=self._rows.tables(rows, int(ends.max())),
            drafts=_drafts_of(parts),
            masks=_put_together(parts),
        )
        if all(part.again for part in parts):
            self._begin_steady(parts, step, ends)
        return step

    # Rows that run again

    def again(self, ranks: list[int], schedules: list[PartialSchedule]) -> tuple[list[Part], MergedStep] | None:
        """What `apply` to each of the ranks and `merge` would give, if they run the same rows again and all is well.

        None if it is not so, and then nothing was changed.
        """
        steady = self._steady.get(tuple(ranks))
        if steady is None or not all(schedule.again for schedule in schedules):
            return None
        if not all(self._last.get(part.rank) is part for part in steady.parts):
            return None
        positions, ends = steady.ends, steady.ends + _ONE
        longest = steady.longest + 1
        if longest > self._limits.max_model_len:
            return None
        begun = self._blocks_begun(steady, ranks, schedules)
        if begun is None or np.count_nonzero(ends > begun.room):
            return None
        if begun.rows.size:
            self._rows.append_block_each(begun.rows, begun.blocks, begun.num_blocks)
        steady.room, steady.ends, steady.longest = begun.room, ends, longest
        last = steady.step
        steady.parts = [
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
            for part, schedule, first in zip(steady.parts, schedules, steady.first, strict=True)
        ]
        for part in steady.parts:
            self._last[part.rank] = part
        self._rows.advance(last.rows, ends, ends + _ONE)
        tables = self._rows.tables(last.rows, longest)
        steady.step = MergedStep([], last.ranks, last.rows, positions, last.num_tokens, last.samples, tables)
        return steady.parts, steady.step

    def _begin_steady(self, parts: list[Part], step: MergedStep, ends: Int32) -> None:
        places = np.full(self._rows.lengths.size, -1, np.int32)
        places[step.rows] = np.arange(step.rows.size)
        if len(self._steady) >= _MOST_STEADY:
            self._steady.clear()
        ranks = tuple(part.rank for part in parts)
        self._steady[ranks] = _Steady(parts, step, _firsts(parts), ends, int(ends.max()), self._room(step.rows), places)

    def _blocks_begun(self, steady: _Steady, ranks: list[int], schedules: list[PartialSchedule]) -> "_Begun | None":
        """The blocks that the rows begin in this step; None if they are not at most one for each of the rows."""
        count = [schedule.block_ids.nbytes // 4 for schedule in schedules]
        if not any(count):
            return _Begun(_NONE, _NONE, _NONE, steady.room)
        local = unpack_ints(memoryview(b"".join([schedule.block_rows for schedule in schedules])))
        blocks = unpack_ints(memoryview(b"".join([schedule.block_ids for schedule in schedules])))
        of = np.repeat(np.array(ranks, np.int32), count)
        if not (all_below(local, self._limits.max_num_seqs) and all_below(blocks, self._blocks_of_rank[of])):
            return None
        rows = local + of * np.int32(self._limits.max_num_seqs)
        places = steady.places[rows]
        num_blocks = self._rows.num_blocks[rows] + _ONE
        if np.count_nonzero(places < 0) or np.count_nonzero(num_blocks > self._rows.most_blocks):
            return None
        if len(set(rows.tolist())) < rows.size:
            return None
        room = steady.room.copy()
        room[places] = num_blocks * self._rows.block_size
        return _Begun(rows, blocks + self._first_blocks[of], num_blocks, room)

    def _room(self, rows: Int32) -> Int32:
        room: Int32 = self._rows.num_blocks[rows] * np.int32(self._rows.block_size)
        return room

    # One rank's schedule

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
        pooling = item.sampling.pooling
        if pooling is not None and pooling.kind == "mean" and item.num_computed_tokens:
            raise Refused(f"row {item.row}: {item.num_computed_tokens} tokens are computed already; a mean needs all")
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
        if item.adapter and item.adapter not in self._slots:
            raise Refused(f"row {item.row}: adapter {item.adapter} is not loaded")
        adapter = self._slots[item.adapter] if item.adapter else 0
        self._drafting.pop(row, None)
        self._rows.set_up(row, tokens.size, item.num_computed_tokens, blocks + self._first_blocks[rank], adapter)
        return RowSetup(row, 0, tokens, tokens.size - num_output_tokens, item.sampling, adapter)

    def _continue(self, rank: int, item: ContinueRow) -> RowSetup:
        row = self._global_row(rank, item.row)
        length = int(self._rows.lengths[row])
        if length == 0:
            raise Refused(f"row {item.row} is continued but was never set up")
        if row in self._drafting:
            raise Refused(f"row {item.row} is continued before its drafts are judged")
        tokens = self._tokens(item.token_ids, item.row)
        if not 0 <= item.drop <= length:
            raise Refused(f"row {item.row} has {length} tokens, {item.drop} cannot be dropped")
        base, most = length - item.drop, self._limits.max_model_len
        if base + tokens.size > most:
            raise Refused(f"row {item.row}: {base} + {tokens.size} tokens are more than max_model_len {most}")
        self._check_sampling(item)
        if item.sampling.prompt_logprobs is not None or item.sampling.pooling is not None:
            raise Refused(
                f"row {item.row}: prompt_logprobs and pooling are only for a row that is set up with all its tokens"
            )
        self._rows.rewrite(row, base, base + tokens.size)
        return RowSetup(row, base, tokens, base + tokens.size, item.sampling, int(self._rows.adapters[row]))

    def _append_blocks(self, rank: int, schedule: PartialSchedule) -> None:
        local, blocks = unpack_ints(schedule.block_rows), unpack_ints(schedule.block_ids)
        self._check_rows(local)
        self._check_blocks(rank, blocks)
        rows = local + np.int32(self._first_row(rank))
        if np.count_nonzero(self._rows.lengths[rows]) < rows.size:
            row = local[self._rows.lengths[rows].argmin()]
            raise Refused(f"row {row} gets blocks but was never set up")
        num_blocks = self._rows.num_blocks[rows] + np.bincount(local).astype(np.int32)[local]
        if int(num_blocks.max(initial=0)) > self._rows.most_blocks:
            row = local[num_blocks.argmax()]
            raise Refused(f"row {row} gets more than the {self._rows.most_blocks} blocks a row can use")
        self._rows.append_blocks(rows, blocks + self._first_blocks[rank], num_blocks)

    def _advance(self, rank: int, schedule: PartialSchedule, setups: list[RowSetup]) -> Part:
        local = self._rows_again(rank) if schedule.again else unpack_ints(schedule.rows)
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
        if self._drafting and (early := [row for row in rows.tolist() if row in self._drafting]):
            raise Refused(f"row {early[0] - self._first_row(rank)} runs before its drafts are judged")
        has_drafts = schedule.num_drafts.nbytes or schedule.drafts.nbytes
        drafts = self._check_drafts(schedule, local, num_tokens) if has_drafts else None
        known = self._rows.lengths[rows]
        lengths = known if drafts is None else known + drafts.counts
        ends = self._rows.positions[rows] + num_tokens
        too_far = ends > np.minimum(lengths, self._limits.max_model_len)
        if too_far.any():
            self._refuse_too_far(
                int(local[too_far.argmax()]), int(lengths[too_far.argmax()]), int(ends[too_far.argmax()])
            )
        if (uncovered := ends > self._room(rows)).any():
            place = int(uncovered.argmax())
            raise Refused(f"row {local[place]} has no block for position {ends[place] - 1}")
        samples = ends == lengths
        if drafts is None:
            masks = self._masks(schedule, local, samples.astype(np.int32))
            self._rows.advance(rows, ends, known + samples)
            return Part(rank, schedule.step, setups, rows, ends, num_tokens, samples, schedule.again, masks=masks)
        if (short := (drafts.counts > 0) & ~samples).any():
            raise Refused(f"row {local[short.argmax()]} has drafts but does not run up to the last of them")
        masks = self._masks(schedule, local, (1 + drafts.counts) * samples)
        self._rows.advance(rows, ends - drafts.counts, known + samples)  # as if no draft were right
        part = Part(rank, schedule.step, setups, rows, ends, num_tokens, samples, drafts=drafts, masks=masks)
        self._drafting |= dict.fromkeys(rows[drafts.counts > 0].tolist(), part)
        return part

    def _check_drafts(self, schedule: PartialSchedule, local: Int32, num_tokens: Int32) -> Drafts | None:
        """The drafts of a schedule; None if there are none after all."""
        tokens = unpack_ints(schedule.drafts)
        counts = unpack_ints(schedule.num_drafts) if schedule.num_drafts.nbytes else np.zeros_like(local)
        most = self._limits.most_drafts
        if not all_below(counts, most + 1):
            place = int((counts.view(np.uint32) > most).argmax())
            raise Refused(f"row {local[place]} has {counts[place]} drafts; a row may have from 0 to {most}")
        if self._limits.draws_drafts:
            if tokens.size or not np.isin(num_tokens[counts > 0] - counts[counts > 0], 1).all():
                raise Refused("the draft model draws the drafts, for rows that run their last token and nothing else")
        elif counts.sum() != tokens.size:
            raise Refused(f"there are {tokens.size} drafts; the counts of the rows make {counts.sum()}")
        if not all_below(tokens, self._limits.vocab_size):
            self._tokens(schedule.drafts, int(local[counts.argmax()]))
        return Drafts(counts, tokens) if counts.any() else None

    def _masks(self, schedule: PartialSchedule, local: Int32, drawn: Int32) -> Masks:
        """A schedule's masks, by place in the rows `local` [n] that it runs, which draw `drawn` [n] tokens each."""
        if not (schedule.mask_rows.nbytes or schedule.masks.nbytes):
            return NO_MASKS
        rows = unpack_ints(schedule.mask_rows)
        width = -(-self._limits.vocab_size // 32)
        if schedule.masks.nbytes != 4 * rows.size * width:
            raise Refused(f"{rows.size} masks have {schedule.masks.nbytes} bytes; {4 * width} each are needed")
        self._check_rows(rows)
        places = np.full(self._limits.max_num_seqs, -1, np.int32)
        places[local] = np.arange(local.size)
        at = places[rows]
        given = np.bincount(at[at >= 0], minlength=local.size)
        wrong = (at < 0) | (given[at] != drawn[at])
        if wrong.any():
            place = int(wrong.argmax())
            count = int(drawn[at[place]]) if at[place] >= 0 else 0
            raise Refused(
                f"row {rows[place]} has {np.count_nonzero(rows == rows[place])} masks but draws {count} tokens"
            )
        return Masks(at, np.frombuffer(schedule.masks, "<u4").reshape(-1, width))

    def _rows_again(self, rank: int) -> Int32:
        last = self._last.get(rank)
        if last is None:
            raise Refused("it runs the rows of the last schedule again, but there is none")
        if not last.samples.all():
            row = int(last.rows[last.samples.argmin()]) - self._first_row(rank)
            raise Refused(f"row {row} did not come to its last token; only rows that drew one can run again")
        return last.rows - np.int32(self._first_row(rank))

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
        if not all_below(rows, self._limits.max_num_seqs):
            for row in (int(rows.min()), int(rows.max())):
                self._global_row(0, row)

    def _check_blocks(self, rank: int, blocks: Int32) -> None:
        if all_below(blocks, self._limits.blocks_of_rank[rank]):
            return
        for block in (int(blocks.min()), int(blocks.max())):
            if not 0 <= block < self._limits.blocks_of_rank[rank]:
                raise Refused(f"block {block} does not exist; blocks are 0 to {self._limits.blocks_of_rank[rank] - 1}")

    def _tokens(self, token_ids: Ints, row: int) -> Int32:
        tokens = unpack_ints(token_ids)
        if tokens.size == 0:
            raise Refused(f"row {row} gets no tokens")
        if all_below(tokens, self._limits.vocab_size):
            return tokens
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self._limits.vocab_size:
                raise Refused(f"row {row}: token {token} does not exist; tokens are 0 to {self._limits.vocab_size - 1}")
        return tokens

    def _check_sampling(self, item: NewRow | ResumeRow | ContinueRow) -> None:
        if fault := fault_of(item.sampling, self._limits.vocab_size):
            raise Refused(f"row {item.row}: {fault}")


def _drafts_of(parts: list[Part]) -> Drafts | None:
    """The drafts of a step that is merged from `parts`."""
    if all(part.drafts is None for part in parts):
        return None
    drafts = [part.drafts or Drafts(np.zeros_like(part.rows), _NONE) for part in parts]
    return Drafts(np.concatenate([of.counts for of in drafts]), np.concatenate([of.tokens for of in drafts]))
