"""What the executor's host side knows of every row: where it is, how long it is, and which blocks it has."""

import numpy as np
import numpy.typing as npt

from executor.step import Int32


class Rows:
    """The table of all ranks' rows; a global row is rank × `max_num_seqs` + the rank's row.

    `lengths` [rows] counts the tokens of a row that are known or being drawn by a step that was sent; 0 means that
    nothing is known of the row. `positions` [rows] is the first token whose KV is not yet computed by such a step.
    `num_blocks` [rows] counts the blocks of a row, which are the start of its line in `block_tables` [rows, most];
    what stands in a line after them is left over from earlier and means nothing. All int32.
    """

    def __init__(self, ranks: int, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        count = ranks * max_num_seqs
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.lengths: Int32 = np.zeros(count, np.int32)
        self.positions: Int32 = np.zeros(count, np.int32)
        self.num_blocks: Int32 = np.zeros(count, np.int32)
        self.block_tables: Int32 = np.zeros((count, -(-max_model_len // block_size)), np.int32)

    @property
    def most_blocks(self) -> int:
        """Blocks that the longest possible row has."""
        return int(self.block_tables.shape[1])

    def void(self, rank: int) -> None:
        """Forget all rows of a rank: it is gone, or its view of them and ours have come apart."""
        self.lengths[rank * self.max_num_seqs : (rank + 1) * self.max_num_seqs] = 0

    def set_up(self, row: int, length: int, position: int, blocks: Int32) -> None:
        """Start a row afresh with `length` known tokens, of which `position` are computed in `blocks`."""
        self.lengths[row] = length
        self.positions[row] = position
        self.num_blocks[row] = blocks.size
        self.block_tables[row, : blocks.size] = blocks

    def rewrite(self, row: int, base: int, length: int) -> None:
        """Replace what stands from position `base` on, so that the row has `length` known tokens."""
        self.lengths[row] = length
        self.positions[row] = min(int(self.positions[row]), base)

    def append_blocks(self, rows: Int32, blocks: Int32) -> None:
        """Append each of `blocks` [m] to the line of its row in `rows` [m], in order; a row may come several times.

        The caller has seen to it that no line overflows.
        """
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        starts = np.flatnonzero(np.diff(sorted_rows, prepend=-1))
        repeats = np.diff(starts, append=rows.size)
        nth = np.arange(rows.size) - np.repeat(starts, repeats)
        self.block_tables[sorted_rows, self.num_blocks[sorted_rows] + nth] = blocks[order]
        self.num_blocks[sorted_rows[starts]] += repeats.astype(np.int32)

    def advance(self, rows: Int32, ends: Int32, samples: npt.NDArray[np.bool_]) -> None:
        """`rows`, each named once, are computed up to `ends`, and those that sample have a token more."""
        self.positions[rows] = ends
        self.lengths[rows] += samples

    def tables(self, rows: Int32, ends: Int32) -> Int32:
        """The blocks of `rows` [n] that hold positions below `ends` [n]. Shape [n, widest], the rest of a line 0."""
        used = -(-ends // self.block_size)
        columns = np.arange(used.max(), dtype=np.int32)
        return np.where(columns < used[:, None], self.block_tables[rows, : columns.size], np.int32(0))
