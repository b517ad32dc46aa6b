"""Which KV blocks the rows have, and which of these can be found again by their name."""

import numpy as np

from bus.prefix import chain_hash
from ranks.batch import Batch, Rows
from ranks.block_pool import BlockPool
from ranks.request import Int32, Request, Session

ALL = 2**31 - 1
"""Stands for the number of named blocks of a session's row whose prompt has all its names."""


class KvCache:
    """Gives the rows of a batch blocks of a pool, and the blocks their names."""

    def __init__(self, batch: Batch, pool: BlockPool, block_size: int) -> None:
        self._batch = batch
        self.pool = pool
        self._shift = block_size.bit_length() - 1
        assert block_size == 1 << self._shift
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens >> self._shift)

    def lacking(self, rows: Rows, ends: Int32) -> Int32:
        """How many blocks each of `rows` lacks to hold tokens up to `ends`."""
        lacking: Int32 = np.maximum(((ends + (self.block_size - 1)) >> self._shift) - self._batch.num_blocks[rows], 0)
        return lacking

    def grow(self, rows: Rows, lacking: Int32) -> tuple[Rows, list[int]]:
        """Give `rows` the blocks they lack; returns the row of each block given, and the blocks, in order.

        The caller knows that there are as many free ones.
        """
        some = lacking > 0
        rows = rows[some]
        numbers = lacking[some]
        blocks = self.pool.take(int(numbers.sum()))
        if len(blocks) == rows.size:
            self._batch.add_block_each(rows, blocks)
            return rows, blocks
        begin = 0
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            self._batch.add_blocks(row, blocks[begin : begin + number])
            begin += number
        return np.repeat(rows, numbers), blocks

    def find(self, request: Request) -> list[int]:
        """The blocks in the prefix cache that a waiting request can begin with: its last token has to be computed.

        Those of a session's output may be written to again, so they must be its own.
        """
        if not (self.pool.caching and request.reads_cache):
            return []
        most = (request.tokens.size - 1) >> self._shift
        if request.session is not None:
            most = min(most, request.num_prompt >> self._shift)
        names = request.names
        if len(names) < most:
            names = request.name_blocks(most, request.tokens, self.block_size)
        return self.pool.find(names[:most])

    def name_full(self, rows: Rows, ends: Int32) -> None:
        """Let the blocks of `rows` that are full at `ends`, none of which is past a row's known tokens, be found."""
        if not self.pool.caching:
            return
        full = ends >> self._shift
        some = (full > self._batch.num_named[rows]).nonzero()[0]
        if some.size:
            self._name(rows[some], full[some])

    def _name(self, rows: Rows, full: Int32) -> None:
        """Give the blocks of `rows` their names up to the first `full` ones; each row has one without at least."""
        batch = self._batch
        named = batch.num_named[rows]
        nexts, tokens = batch.next_to_name(rows, self.block_size)  # in decode each row has filled just that one
        batch.num_named[rows] = full
        width = 4 * self.block_size
        requests = batch.requests
        blocks: list[int] = []
        names: list[bytes] = []
        at = 0
        for row, begin, end, block in zip(rows.tolist(), named.tolist(), full.tolist(), nexts, strict=True):
            request = requests[row]
            assert request is not None
            own = request.names
            if end == begin + 1 == len(own) + 1 and request.session is None and not request.features:
                name = chain_hash(own[-1] if own else request.root, tokens[at : at + width])
                own.append(name)
                names.append(name)
                blocks.append(block)
            else:
                stop, batch.num_named[row] = self._due(request, end)
                blocks += batch.blocks[row, begin:stop].tolist()
                names += request.name_blocks(stop, batch.tokens[row], self.block_size)[begin:stop]
            at += width
        self.pool.name(blocks, names)

    def name_entering(self, request: Request, blocks: list[int], named: int, end: int) -> int:
        """Let the `blocks` of a request that enters a row be found that are full at `end`; the first `named` are.

        Returns how many of them the row is to count as named.
        """
        full = end >> self._shift
        if full <= named or not self.pool.caching:
            return named
        stop, counted = self._due(request, full)
        self.pool.name(blocks[named:stop], request.name_blocks(stop, request.tokens, self.block_size)[named:stop])
        return counted

    def _due(self, request: Request, full: int) -> tuple[int, int]:
        """Where, in a row whose first `full` blocks are full, those end that may be found, and what it counts as named.

        Of a session only the prompt's may: as long as its turn's output goes on, it may be cut short.
        """
        if request.session is None:
            return full, full
        in_prompt = request.num_prompt >> self._shift
        return (full, full) if full < in_prompt else (in_prompt, ALL)

    def _name_blocks(self, request: Request, row: int, begin: int, end: int) -> None:
        """Give the blocks of a row from `begin` to `end`, which may be none, their names."""
        if begin < end:
            names = request.name_blocks(end, self._batch.tokens[row], self.block_size)
            self.pool.name(self._batch.blocks[row, begin:end].tolist(), names[begin:end])

    def settle(self, row: int, context: int) -> None:
        """Move a row's blocks to the session it belongs to, whose turn has ended: `context` of its tokens stay.

        These are named as far as they are computed, for they can be dropped no more.
        """
        batch = self._batch
        request = batch.request(row)
        session = request.session
        assert session is not None
        session.blocks = batch.blocks_of(row)
        session.computed = min(int(batch.computed[row]), context)
        session.num_named = 0
        if self.pool.caching:
            named = int(batch.num_named[row])
            named = request.num_prompt >> self._shift if named == ALL else named
            full = session.computed >> self._shift
            self._name_blocks(request, row, named, full)
            session.num_named = full
        del request.names[context >> self._shift :]

    def give_up(self, session: Session, count: int) -> None:
        """Take from a session without a row its last `count` blocks; all, where they can be found again by name."""
        number = len(session.blocks) if self.pool.caching else min(count, len(session.blocks))
        kept = len(session.blocks) - number
        self.pool.release(session.blocks[kept:])
        del session.blocks[kept:]
        session.computed = min(session.computed, kept * self.block_size)
        session.num_named = min(session.num_named, kept)

    def release(self, row: int, computed: int | None = None) -> None:
        """Take a row's blocks back. Of those that are not full at `computed`, where given, none can be found again."""
        blocks = self._batch.blocks_of(row)
        if computed is not None:
            for block in blocks[computed >> self._shift : int(self._batch.num_named[row])]:
                self.pool.forget(block)
        self.pool.release(blocks)
