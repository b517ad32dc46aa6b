"""Rows that begin, resume or continue: what a schedule says of them is checked, and the table of rows gets it."""

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np

from bus.messages import ContinueRow, NewRow, ResumeRow
from bus.wire import all_below, unpack_ints
from executor.checks import Limits, Refused
from executor.rows import Rows
from executor.step import Int32, RowSetup


class Setups:
    """Sets rows up: all those of a schedule together, so that one more costs little."""

    def __init__(self, rows: Rows, limits: Limits, slots: Mapping[str, int]) -> None:
        """`slots` are those of the adapters that rows may have, by identity, as they are when it is asked."""
        self._rows = rows
        self._limits = limits
        self._slots = slots

    def begin(self, rank: int, new: Sequence[NewRow], resumed: Sequence[ResumeRow]) -> list[RowSetup]:
        """Rows of a rank begin or resume, with all that they have.

        Raises:
            Refused: one of them cannot; then none is written.
        """
        items: list[NewRow | ResumeRow] = [*new, *resumed]
        if not items:
            return []
        token_ids = [item.prompt_token_ids for item in new] + [item.token_ids for item in resumed]
        outputs = [0] * len(new) + [item.num_output_tokens for item in resumed]
        block_ids = [item.block_ids for item in items]
        tokens, blocks = unpack_ints(memoryview(b"".join(token_ids))), unpack_ints(memoryview(b"".join(block_ids)))
        exist = all_below(tokens, self._limits.vocab_size) and all_below(blocks, self._limits.blocks_of_rank[rank])
        lengths, num_blocks = [ints.nbytes // 4 for ints in token_ids], [ints.nbytes // 4 for ints in block_ids]
        first_row = self._limits.first_row(rank)
        setups = []
        parts = zip(items, _parted(tokens, lengths), outputs, _parted(blocks, num_blocks), strict=True)
        for item, own_tokens, output, own_blocks in parts:
            self._check(rank, item, own_tokens, output, own_blocks, exist)
            adapter = self._slots[item.adapter] if item.adapter else 0
            prompt_len = own_tokens.size - output
            setups.append(RowSetup(first_row + item.row, 0, own_tokens, prompt_len, item.sampling, adapter))
        self._rows.set_up(
            rows=np.array([setup.row for setup in setups], np.intp),
            lengths=np.array(lengths, np.int32),
            positions=np.array([item.num_computed_tokens for item in items], np.int32),
            blocks=blocks + np.int32(self._limits.first_block(rank)),
            num_blocks=np.array(num_blocks, np.int32),
            adapters=np.array([setup.adapter for setup in setups], np.int32),
        )
        return setups

    def _check(
        self, rank: int, item: NewRow | ResumeRow, tokens: Int32, output: int, blocks: Int32, exist: bool
    ) -> None:
        """Refuse a row that cannot begin with `tokens` in `blocks`; `exist` says that there are all of these."""
        row, computed, limits = item.row, item.num_computed_tokens, self._limits
        limits.check_row(row)
        if tokens.size == 0:
            raise Refused(f"row {row} gets no tokens")
        if not exist:
            limits.check_tokens(row, tokens)
        if not 0 <= output < tokens.size:
            raise Refused(f"row {row}: {output} of {tokens.size} tokens cannot be output")
        if not 0 <= computed < tokens.size:
            raise Refused(f"row {row}: {computed} of {tokens.size} tokens cannot be computed already")
        pooling = item.sampling.pooling
        if pooling is not None and pooling.kind == "mean" and computed:
            raise Refused(f"row {row}: {computed} tokens are computed already; a mean needs all")
        if tokens.size > limits.max_model_len:
            raise Refused(f"row {row}: {tokens.size} tokens are more than max_model_len {limits.max_model_len}")
        if not exist:
            limits.check_blocks(rank, blocks)
        if blocks.size > self._rows.most_blocks:
            raise Refused(f"row {row}: {blocks.size} blocks are more than the {self._rows.most_blocks} a row can use")
        limits.check_sampling(item)
        if item.adapter and item.adapter not in self._slots:
            raise Refused(f"row {row}: adapter {item.adapter} is not loaded")

    def go_on(self, rank: int, item: ContinueRow, drafting: Container[int]) -> RowSetup:
        """A row of a rank goes on with a session's next turn; `drafting` are those whose drafts are not judged.

        Raises:
            Refused: it cannot.
        """
        limits = self._limits
        limits.check_row(item.row)
        row = limits.first_row(rank) + item.row
        length = int(self._rows.lengths[row])
        if length == 0:
            raise Refused(f"row {item.row} is continued but was never set up")
        if row in drafting:
            raise Refused(f"row {item.row} is continued before its drafts are judged")
        tokens = unpack_ints(item.token_ids)
        if tokens.size == 0:
            raise Refused(f"row {item.row} gets no tokens")
        limits.check_tokens(item.row, tokens)
        if not 0 <= item.drop <= length:
            raise Refused(f"row {item.row} has {length} tokens, {item.drop} cannot be dropped")
        base, most = length - item.drop, limits.max_model_len
        if base + tokens.size > most:
            raise Refused(f"row {item.row}: {base} + {tokens.size} tokens are more than max_model_len {most}")
        limits.check_sampling(item)
        if item.sampling.prompt_logprobs is not None or item.sampling.pooling is not None:
            raise Refused(
                f"row {item.row}: prompt_logprobs and pooling are only for a row that is set up with all its tokens"
            )
        self._rows.rewrite(row, base, base + tokens.size)
        return RowSetup(row, base, tokens, base + tokens.size, item.sampling, int(self._rows.adapters[row]))


def _parted(values: Int32, counts: Sequence[int]) -> Iterator[Int32]:
    """`values` [their sum], so many at a time."""
    end = 0
    for count in counts:
        begin, end = end, end + count
        yield values[begin:end]
