"""What ranks' schedules are checked against, and the sentences that refuse them."""

from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import ContinueRow, NewRow, ResumeRow
from bus.sampling import fault_of
from bus.wire import all_below
from executor.step import Int32


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

    def first_row(self, rank: int) -> int:
        """The global row that is a rank's row 0."""
        return rank * self.max_num_seqs

    def first_block(self, rank: int) -> int:
        """What a rank's block 0 is called in the merged step."""
        return self.first_blocks[rank] if self.first_blocks is not None else 0

    def check_row(self, row: int) -> None:
        """Raises: Refused: a rank has no such row."""
        if not 0 <= row < self.max_num_seqs:
            raise Refused(f"row {row} does not exist; rows are 0 to {self.max_num_seqs - 1}")

    def check_rows(self, rows: Int32) -> None:
        """Raises: Refused: a rank does not have all of `rows` [n]."""
        if not all_below(rows, self.max_num_seqs):
            self.check_row(int(rows.min()))
            self.check_row(int(rows.max()))

    def check_blocks(self, rank: int, blocks: Int32) -> None:
        """Raises: Refused: a rank does not have all of `blocks` [n]."""
        count = self.blocks_of_rank[rank]
        if not all_below(blocks, count):
            block = int(blocks.min()) if blocks.min() < 0 else int(blocks.max())
            raise Refused(f"block {block} does not exist; blocks are 0 to {count - 1}")

    def check_tokens(self, row: int, tokens: Int32) -> None:
        """Raises: Refused: `tokens` [n], which are for a row, are not all tokens of the model."""
        if not all_below(tokens, self.vocab_size):
            token = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            raise Refused(f"row {row}: token {token} does not exist; tokens are 0 to {self.vocab_size - 1}")

    def check_sampling(self, item: NewRow | ResumeRow | ContinueRow) -> None:
        """Raises: Refused: a row cannot be sampled as it says."""
        if fault := fault_of(item.sampling, self.vocab_size):
            raise Refused(f"row {item.row}: {fault}")
