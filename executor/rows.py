"""What the executor's host side knows of every row: where it is, how long it is, and which blocks it has."""

import numpy as np

from executor.step import Index, Int32, largest


class Rows:
    """The table of all ranks' rows; a global row is rank × `max_num_seqs` + the rank's row.

    `lengths` [rows] counts the tokens of a row that are known or being drawn by a step that was sent; 0 means that
    nothing is known of the row. `positions` [rows] is the first token whose KV is not yet computed by such a step.
    `num_blocks` [rows] counts the blocks of a row, which are the start of its line in `block_tables` [rows, most],
    the rest of which is 0. `adapters` [rows] are the slots of their adapters, 0 for none. All int32.
    """

    def __init__(self, ranks: int, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        count = ranks * max_num_seqs
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.lengths: Int32 = np.zeros(count, np.int32)
        self.positions: Int32 = np.zeros(count, np.int32)
        self.num_blocks: Int32 = np.zeros(count, np.int32)
        self.adapters: Int32 = np.zeros(count, np.int32)
        self.block_tables: Int32 = np.zeros((count, -(-max_model_len // block_size)), np.int32)

    @property
    def most_blocks(self) -> int:
        """Blocks that the longest possible row has."""
        return int(self.block_tables.shape[1])

    def void(self, rank: int) -> None:
        """Forget all rows of a rank: it is gone, or its view of them and ours have come apart."""
        self.lengths[rank * self.max_num_seqs : (rank + 1) * self.max_num_seqs] = 0

    def set_up(
        self, rows: Index, lengths: Int32, positions: Int32, blocks: Int32, num_blocks: Int32, adapters: Int32
    ) -> None:
        """Start `rows` [n] afresh, each with `lengths` known tokens of which `positions` are computed.

        `blocks` [m] are those of all of them, one row's after the other's, `num_blocks` each.
        """
        lines = np.zeros((rows.size, self.most_blocks), np.int32)
        most = largest(num_blocks)
        lines[:, :most][np.arange(most) < num_blocks[:, np.newaxis]] = blocks
        self.block_tables[rows] = lines
        self.lengths[rows] = lengths
        self.positions[rows] = positions
        self.num_blocks[rows] = num_blocks
        self.adapters[rows] = adapters

    def rewrite(self, row: int, base: int, length: int) -> None:
        """Replace what stands from position `base` on, so that the row has `length` known tokens."""
        self.lengths[row] = length
        self.positions[row] = min(int(self.positions[row]), base)

    def append_blocks(self, rows: Index, blocks: Int32, num_blocks: Int32) -> None:
        """Append each of `blocks` [m] to the line of its row in `rows` [m], in order; a row may come several times.

        `num_blocks` [m] is how many blocks each row has then. The caller has seen to it that no line overflows.
        """
        before = self.num_blocks[rows]
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        starts = np.flatnonzero(np.diff(sorted_rows, prepend=-1))
        nth = np.arange(rows.size) - np.repeat(starts, np.diff(starts, append=rows.size))
        self.block_tables[sorted_rows, before[order] + nth] = blocks[order]
        self.num_blocks[rows] = num_blocks

    def append_block_each(self, rows: Index, blocks: Int32, num_blocks: Int32) -> None:
        """As `append_blocks`, where no row comes twice."""
        self.block_tables[rows, num_blocks - 1] = blocks
        self.num_blocks[rows] = num_blocks

    def advance(self, rows: Index, ends: Int32, lengths: Int32) -> None:
        """`rows`, each named once, are computed up to `ends`, and have `lengths` tokens then."""
        self.positions[rows] = ends
        self.lengths[rows] = lengths

    def accept(self, row: int, count: int) -> None:
        """So many tokens that a row was not known to have are its own, and computed."""
        self.positions[row] += count
        self.lengths[row] += count

    def tables(self, rows: Index, longest: int) -> Int32:
        """The block tables of `rows` [n], as wide as it takes to hold `longest` tokens. Shape [n, widest]."""
        return self.block_tables[rows, : -(-longest // self.block_size)]
