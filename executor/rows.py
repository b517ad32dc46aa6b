"""What the executor's host side knows of every row: where it is, how long it is, and which blocks it has."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from executor.step import Int32


class Rows:
    """The table of all ranks' rows; a global row is rank × `max_num_seqs` + the rank's row.

    `lengths` [rows] counts the tokens of a row that are known or being drawn by a step that was sent; 0 means that
    nothing is known of the row. `positions` [rows] is the first token whose KV is not yet computed by such a step.
    `num_blocks` [rows] counts the blocks of a row, which are the start of its line in `block_tables` [rows, most],
    the rest of which is 0. All int32. `first_blocks` [ranks] is added to the ranks' block numbers in the table.
    """

    def __init__(
        self,
        ranks: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        first_blocks: Sequence[int] | None = None,
    ) -> None:
        count = ranks * max_num_seqs
        self._first_blocks = np.array(first_blocks or [0] * ranks, np.int32)
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
        self.block_tables[row] = 0
        self.block_tables[row, : blocks.size] = blocks + self._first_blocks[row // self.max_num_seqs]

    def rewrite(self, row: int, base: int, length: int) -> None:
        """Replace what stands from position `base` on, so that the row has `length` known tokens."""
        self.lengths[row] = length
        self.positions[row] = min(int(self.positions[row]), base)

    def append_blocks(self, rows: Int32, blocks: Int32, one_each: bool) -> None:
        """Append each of `blocks` [m] to the line of its row in `rows` [m], in order; all are rows of one rank.

        With `one_each` no row comes twice. The caller has seen to it that no line overflows.
        """
        blocks = blocks + self._first_blocks[rows[0] // self.max_num_seqs]
        if one_each:
            places = self.num_blocks[rows]
            self.block_tables[rows, places] = blocks
            self.num_blocks[rows] = places + 1
            return
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

    def tables(self, rows: Int32, longest: int) -> Int32:
        """The block tables of `rows` [n], as wide as it takes to hold `longest` tokens. Shape [n, widest]."""
        return self.block_tables[rows, : -(-longest // self.block_size)]
