"""Steps as they travel from executor 0 to the others: whole, or if the step before runs again, what has changed."""

import numpy as np

from bus import messages
from bus.messages import EMPTY
from bus.wire import pack_ints, unpack_ints
from executor.step import NO_MASKS, Drafts, Int32, Masks, MergedStep, RowSetup


class Teller:
    """Makes messages of steps, in the order in which they run."""

    def __init__(self) -> None:
        self._last: MergedStep | None = None

    def tell(self, number: int, step: MergedStep) -> messages.MergedStep:
        """The message for those who have been told all steps before."""
        last, self._last = self._last, step
        width = step.block_tables.shape[1]
        if last is not None and _runs_again(last, step):
            places = np.flatnonzero(step.block_tables != _widened(last.block_tables, width)).astype(np.int32)
            return messages.MergedStep(
                number=number,
                table_width=width,
                again=True,
                block_places=pack_ints(places),
                block_ids=pack_ints(step.block_tables.ravel()[places]),
            )
        return messages.MergedStep(
            number=number,
            table_width=width,
            setups=[
                messages.RowSetup(
                    row=setup.row,
                    start=setup.start,
                    token_ids=pack_ints(setup.tokens),
                    prompt_len=setup.prompt_len,
                    sampling=setup.sampling,
                    adapter=setup.adapter,
                )
                for setup in step.setups
            ],
            rows=pack_ints(step.rows),
            positions=pack_ints(step.positions),
            num_tokens=pack_ints(step.num_tokens),
            samples=pack_ints(step.samples),
            num_drafts=EMPTY if step.drafts is None else pack_ints(step.drafts.counts),
            drafts=EMPTY if step.drafts is None else pack_ints(step.drafts.tokens),
            mask_places=pack_ints(step.masks.at),
            masks=pack_ints(step.masks.words.view(np.int32).ravel()),
            block_ids=pack_ints(step.block_tables.ravel()),
        )


class Listener:
    """Makes steps of messages again, in the same order."""

    def __init__(self, max_num_seqs: int) -> None:
        """`max_num_seqs` is that of a rank."""
        self._max_num_seqs = np.int32(max_num_seqs)
        self._last: MergedStep | None = None
        self._number = 0

    def hear(self, message: messages.MergedStep) -> MergedStep:
        """The step that was told.

        Raises:
            ValueError: the step before it was not, or it is told as a change of something else.
        """
        if message.number != self._number + 1:
            raise ValueError(f"step {message.number} was told after step {self._number}")
        self._number = message.number
        self._last = self._changed(message) if message.again else self._whole(message)
        return self._last

    def _whole(self, message: messages.MergedStep) -> MergedStep:
        rows = unpack_ints(message.rows)
        return MergedStep(
            setups=[
                RowSetup(one.row, one.start, unpack_ints(one.token_ids), one.prompt_len, one.sampling, one.adapter)
                for one in message.setups
            ],
            ranks=rows // self._max_num_seqs,
            rows=rows,
            positions=unpack_ints(message.positions),
            num_tokens=unpack_ints(message.num_tokens),
            samples=unpack_ints(message.samples).astype(np.bool_),
            block_tables=unpack_ints(message.block_ids).reshape(rows.size, message.table_width),
            drafts=Drafts(unpack_ints(message.num_drafts), unpack_ints(message.drafts)) if message.num_drafts else None,
            masks=_masks(message),
        )

    def _changed(self, message: messages.MergedStep) -> MergedStep:
        last = self._last
        if last is None:
            raise ValueError("there is no step before it that could run again")
        tables = _widened(last.block_tables, message.table_width)
        tables.ravel()[unpack_ints(message.block_places)] = unpack_ints(message.block_ids)
        positions = last.positions + last.num_tokens
        return MergedStep([], last.ranks, last.rows, positions, last.num_tokens, last.samples, tables)


def _masks(message: messages.MergedStep) -> Masks:
    at = unpack_ints(message.mask_places)
    return Masks(at, np.frombuffer(message.masks, "<u4").reshape(at.size, -1)) if at.size else NO_MASKS


def _runs_again(last: MergedStep, step: MergedStep) -> bool:
    """Whether `step` has the sequences of `last`, as many tokens of each, and goes on where it ended."""
    return (
        not step.setups
        and step.masks.at.size == 0
        and step.drafts is last.drafts is None
        and step.rows is last.rows
        and step.num_tokens is last.num_tokens
        and step.samples is last.samples
        and step.block_tables.shape[1] >= last.block_tables.shape[1]
        and np.array_equal(step.positions, last.positions + last.num_tokens)
    )


def _widened(tables: Int32, width: int) -> Int32:
    """A copy of block tables [n, …] that is [n, width], with 0 where there was nothing."""
    wide = np.zeros((tables.shape[0], width), np.int32)
    wide[:, : tables.shape[1]] = tables
    return wide
