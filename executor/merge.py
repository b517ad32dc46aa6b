"""From the ranks' partial schedules to one merged step, with nothing taken on trust."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from bus.messages import PartialSchedule
from bus.wire import all_below, unpack_ints
from executor.checks import Limits, Refused
from executor.rows import Rows
from executor.setups import Setups
from executor.steady import Steady
from executor.step import NO_MASKS, Drafts, Int32, Masks, MergedStep, Part, RowSetup, firsts, largest

_MOST_STEADY = 8
"""So many sets of ranks that run again are remembered, for the case that ranks run in turns."""


def _put_together(parts: list[Part]) -> Masks:
    """The masks of parts, by place in the step that is made of them."""
    if not any(part.masks.at.size for part in parts):
        return NO_MASKS
    masked = [(begin, part.masks) for begin, part in zip(firsts(parts), parts, strict=True) if part.masks.at.size]
    return Masks(
        np.concatenate([masks.at + np.int32(begin) for begin, masks in masked]),
        np.concatenate([masks.words for _, masks in masked]),
    )


class Merger:
    """Applies schedules to the rows, in the order in which they are to run, and puts parts together."""

    def __init__(self, rows: Rows, limits: Limits, slots: Mapping[str, int] = MappingProxyType({})) -> None:
        """`slots` are those of the adapters that rows may have, by identity, as they are when it is asked."""
        self._rows = rows
        self._setups = Setups(rows, limits, slots)
        self._limits = limits
        self._last: dict[int, Part] = {}
        """What each rank ran last."""
        self._steady: dict[tuple[int, ...], Steady] = {}
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
        for first, part in zip(firsts(parts), parts, strict=True):
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
            block_tables=self._rows.tables(rows.astype(np.intp), largest(ends)),
            drafts=_drafts_of(parts),
            masks=_put_together(parts),
        )
        if all(part.again for part in parts):
            if len(self._steady) >= _MOST_STEADY:
                self._steady.clear()
            self._steady[tuple(part.rank for part in parts)] = Steady(parts, step, self._rows, self._limits)
        return step

    # Rows that run again

    def again(self, ranks: list[int], schedules: list[PartialSchedule]) -> tuple[list[Part], MergedStep] | None:
        """What `apply` to each of the ranks and `merge` would give, if they run the same rows again and all is well.

        None if it is not so, and then nothing was changed.
        """
        steady = self._steady.get(tuple(ranks))
        if steady is None or not steady.goes_on(self._last, schedules):
            return None
        merged = steady.run(schedules)
        for part in merged[0] if merged is not None else ():
            self._last[part.rank] = part
        return merged

    # One rank's schedule

    def _set_up(self, rank: int, schedule: PartialSchedule) -> list[RowSetup]:
        count = len(schedule.new) + len(schedule.resumed) + len(schedule.continued)
        if count == 0:
            return []
        if count > self._limits.max_num_seqs:
            raise Refused(f"{count} rows are set up; there are {self._limits.max_num_seqs}")
        setups = self._setups.begin(rank, schedule.new, schedule.resumed)
        if self._drafting:
            for setup in setups:
                self._drafting.pop(setup.row, None)
        setups += [self._setups.go_on(rank, item, self._drafting) for item in schedule.continued]
        rows = [setup.row for setup in setups]
        if len(set(rows)) != len(rows):
            twice = next(row for place, row in enumerate(rows) if row in rows[:place])
            raise Refused(f"row {twice - self._limits.first_row(rank)} is set up twice")
        return setups

    def _append_blocks(self, rank: int, schedule: PartialSchedule) -> None:
        local, blocks = unpack_ints(schedule.block_rows), unpack_ints(schedule.block_ids)
        self._limits.check_rows(local)
        self._limits.check_blocks(rank, blocks)
        rows = local + np.intp(self._limits.first_row(rank))
        if np.count_nonzero(self._rows.lengths[rows]) < rows.size:
            row = local[self._rows.lengths[rows].argmin()]
            raise Refused(f"row {row} gets blocks but was never set up")
        times = np.bincount(local)
        num_blocks = self._rows.num_blocks[rows] + times.astype(np.int32)[local]
        if largest(num_blocks) > self._rows.most_blocks:
            row = local[num_blocks.argmax()]
            raise Refused(f"row {row} gets more than the {self._rows.most_blocks} blocks a row can use")
        append = self._rows.append_block_each if largest(times) == 1 else self._rows.append_blocks
        append(rows, blocks + np.int32(self._limits.first_block(rank)), num_blocks)

    def _advance(self, rank: int, schedule: PartialSchedule, setups: list[RowSetup]) -> Part:
        rows, num_tokens = self._rows_again(rank) if schedule.again else self._rows_named(rank, schedule)
        local = rows - np.int32(self._limits.first_row(rank))
        if self._drafting and (early := [row for row in rows.tolist() if row in self._drafting]):
            raise Refused(f"row {early[0] - self._limits.first_row(rank)} runs before its drafts are judged")
        has_drafts = schedule.num_drafts.nbytes or schedule.drafts.nbytes
        drafts = self._check_drafts(schedule, local, num_tokens) if has_drafts else None
        index = rows.astype(np.intp)
        known = self._rows.lengths[index]
        lengths = known if drafts is None else known + drafts.counts
        ends = self._rows.positions[index] + num_tokens
        too_far = ends > np.minimum(lengths, self._limits.max_model_len)
        if np.count_nonzero(too_far):
            place = int(too_far.argmax())
            self._refuse_too_far(int(local[place]), int(lengths[place]), int(ends[place]))
        uncovered = ends > self._rows.num_blocks[index] * np.int32(self._rows.block_size)
        if np.count_nonzero(uncovered):
            place = int(uncovered.argmax())
            raise Refused(f"row {local[place]} has no block for position {ends[place] - 1}")
        samples = ends == lengths
        if drafts is None:
            masks = self._masks(schedule, local, samples.astype(np.int32))
            self._rows.advance(index, ends, known + samples)
            return Part(rank, schedule.step, setups, rows, ends, num_tokens, samples, schedule.again, masks=masks)
        if (short := (drafts.counts > 0) & ~samples).any():
            raise Refused(f"row {local[short.argmax()]} has drafts but does not run up to the last of them")
        masks = self._masks(schedule, local, (1 + drafts.counts) * samples)
        self._rows.advance(index, ends - drafts.counts, known + samples)  # as if no draft were right
        part = Part(rank, schedule.step, setups, rows, ends, num_tokens, samples, drafts=drafts, masks=masks)
        self._drafting |= dict.fromkeys(rows[drafts.counts > 0].tolist(), part)
        return part

    def _rows_named(self, rank: int, schedule: PartialSchedule) -> tuple[Int32, Int32]:
        """The global rows that a schedule names, and how many tokens each runs."""
        local = unpack_ints(schedule.rows)
        if local.size == 0:
            raise Refused("no row runs")
        self._limits.check_rows(local)
        times = np.bincount(local)
        if largest(times) > 1:
            raise Refused(f"row {times.argmax()} runs twice")
        num_tokens = unpack_ints(schedule.num_tokens) if schedule.num_tokens.nbytes else np.ones_like(local)
        # Each is positive and their int64 sum is small, so that no number of tokens or positions overflows.
        if num_tokens[few := num_tokens.argmin()] < 1:
            raise Refused(f"row {local[few]} runs {num_tokens[few]} tokens; it must be at least 1")
        if (total := int(np.add.reduce(num_tokens, dtype=np.int64))) > self._limits.max_num_batched_tokens:
            raise Refused(f"{total} tokens are more than max_num_batched_tokens {self._limits.max_num_batched_tokens}")
        return local + np.int32(self._limits.first_row(rank)), num_tokens

    def _rows_again(self, rank: int) -> tuple[Int32, Int32]:
        """The global rows of a rank's last schedule, and one token for each."""
        last = self._last.get(rank)
        if last is None:
            raise Refused("it runs the rows of the last schedule again, but there is none")
        if not last.samples.all():
            row = int(last.rows[last.samples.argmin()]) - self._limits.first_row(rank)
            raise Refused(f"row {row} did not come to its last token; only rows that drew one can run again")
        return last.rows, last.num_tokens if last.again else np.ones_like(last.rows)

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
        if tokens.size:
            self._limits.check_tokens(int(local[counts.argmax()]), tokens)
        return Drafts(counts, tokens) if counts.any() else None

    def _masks(self, schedule: PartialSchedule, local: Int32, drawn: Int32) -> Masks:
        """A schedule's masks, by place in the rows `local` [n] that it runs, which draw `drawn` [n] tokens each."""
        if not (schedule.mask_rows.nbytes or schedule.masks.nbytes):
            return NO_MASKS
        rows = unpack_ints(schedule.mask_rows)
        width = -(-self._limits.vocab_size // 32)
        if schedule.masks.nbytes != 4 * rows.size * width:
            raise Refused(f"{rows.size} masks have {schedule.masks.nbytes} bytes; {4 * width} each are needed")
        self._limits.check_rows(rows)
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

    def _refuse_too_far(self, row: int, length: int, end: int) -> NoReturn:
        if length == 0:
            raise Refused(f"row {row} runs but was never set up")
        if end > length:
            raise Refused(f"row {row} has {length} tokens but would be computed up to {end}")
        raise Refused(f"row {row} would be computed up to {end}, past max_model_len {self._limits.max_model_len}")


def _drafts_of(parts: list[Part]) -> Drafts | None:
    """The drafts of a step that is merged from `parts`."""
    if all(part.drafts is None for part in parts):
        return None
    drafts = [part.drafts or Drafts(np.zeros_like(part.rows), np.empty(0, np.int32)) for part in parts]
    return Drafts(np.concatenate([of.counts for of in drafts]), np.concatenate([of.tokens for of in drafts]))
