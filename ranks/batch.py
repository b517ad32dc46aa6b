"""The requests that run: their rows, and everything about them that a step may change, in arrays by row."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranks.request import Int32, Request

Rows = npt.NDArray[np.intp]
"""Numbers of rows, as numpy likes its indices."""

NUM_STOPS = 4
"""Stop tokens of a row that are looked at for all rows together."""

NONE = -1
"""Stands in arrays of token ids for no token."""

_NO_STOPS = [NONE] * NUM_STOPS


class Entry(NamedTuple):
    """A request that enters a row: the blocks it has, the length of what is computed, and how many have their names."""

    request: Request
    blocks: Int32
    num_cached: int
    num_named: int


class Batch:
    """Rows 0 … size - 1, each held by a request or by none.

    All arrays are int32 [size] unless said otherwise, and what stands in a row that nobody holds means nothing:

    - `known`: tokens whose ids are here; they stand in `tokens` [size, most × the size of a block].
    - `unseen`: tokens that steps in flight draw.
    - `computed`: tokens whose KV is computed once the steps in flight are done.
    - `limit`: the length at which the request ends.
    - `num_blocks`: KV blocks; their numbers stand in `blocks` [size, most].
    - `num_named`: how many of these have their name, from the first on.
    - `prefilling` (bool): whether the last step it was in did not reach its last token.
    - `constrained` (bool): whether the request has a grammar.
    - `alone` (bool): whether its steps have more to them than a token for it: a grammar, or log-probabilities.
    - `pools` (bool): whether its prompt is pooled when it is computed, and nothing is drawn.
    - `stops` [size, NUM_STOPS]: the tokens it stops at; `NONE` fills the rest. Where there are more, they are in
      `many_stops`.
    - `frontend` and `handle`: its key.

    The wide tables are mapped when they are first written to, so a row takes the memory that its longest request took.
    """

    def __init__(self, size: int, most_blocks: int, block_size: int) -> None:
        self.running: Rows = np.empty(0, np.intp)
        """The rows that are held, in the order in which their requests entered."""
        self.requests: list[Request | None] = [None] * size
        self.known = np.zeros(size, np.int32)
        self.unseen = np.zeros(size, np.int32)
        self.computed = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.num_blocks = np.zeros(size, np.int32)
        self.num_named = np.zeros(size, np.int32)
        self.prefilling = np.zeros(size, np.bool_)
        self.constrained = np.zeros(size, np.bool_)
        self.alone = np.zeros(size, np.bool_)
        self.pools = np.zeros(size, np.bool_)
        self.frontend = np.zeros(size, np.int32)
        self.handle = np.zeros(size, np.int32)
        self.tokens = np.zeros((size, most_blocks * block_size), np.int32)
        self.blocks = np.zeros((size, most_blocks), np.int32)
        self.stops = np.full((size, NUM_STOPS), NONE, np.int32)
        self.many_stops: dict[int, frozenset[int]] = {}
        self.held = np.zeros(size, np.bool_)
        self._free = deque(range(size))
        self._last_step = np.full(size, -1, np.int64)
        self._completed = -1
        self._leaving: deque[tuple[int, Request]] = deque()
        self._kept: dict[int, Request] = {}
        """Free rows, in the order in which they became so, that sessions may return to while nobody else needs them."""
        self._returned: dict[int, int] = {}
        """Rows that a session has entered again, and the last step that was made for its turn before."""

    @property
    def num_free(self) -> int:
        """Rows that any request may enter."""
        return len(self._free) + len(self._kept)

    def has_room_for(self, request: Request) -> bool:
        """Whether the request may enter a row."""
        return self.num_free > 0 or (request.session is not None and request.session.row != NONE)

    @property
    def num_leaving(self) -> int:
        """Rows that nobody holds but steps in flight still name."""
        return len(self._leaving)

    def request(self, row: int) -> Request:
        """Who holds a row."""
        request = self.requests[row]
        assert request is not None
        return request

    def present(self, rows: Rows, step: int) -> npt.NDArray[np.bool_]:
        """Which of the `rows` of a step are still held by those whom it was made for."""
        held: npt.NDArray[np.bool_] = self.held[rows]
        if self._returned:
            held &= np.array([self._returned.get(row, NONE) < step for row in rows.tolist()], np.bool_)
        return held

    def tokens_of(self, row: int) -> Int32:
        """All known tokens of a row; a view that the row's next request overwrites."""
        tokens: Int32 = self.tokens[row, : self.known[row]]
        return tokens

    def append_tokens(self, rows: Rows, table: Int32, lengths: Int32) -> tuple[Int32, list[int]]:
        """Give `rows` [n] new tokens, the first `lengths` [n] of each line of `table` [n, widest], up to their end.

        Returns how many each has got, and the places in `rows` of those that have come to their end, in order.
        """
        places = lengths.nonzero()[0]
        got = lengths.copy()
        over: list[int] = []
        for column in range(table.shape[1]):
            going, drawn = rows[places], table[places, column]
            size = self.known[going]
            self.tokens[going, size] = drawn
            size += 1
            self.known[going] = size
            ended = size >= self.limit[going]
            stopped = drawn[:, None] == self.stops[going]
            if np.count_nonzero(stopped):
                ended |= stopped.any(axis=1)
            if self.many_stops:
                tokens = zip(going.tolist(), drawn.tolist(), strict=True)
                ended |= np.array([token in self.many_stops.get(row, ()) for row, token in tokens], np.bool_)
            if np.count_nonzero(ended):
                done = places[ended]
                got[done] = column + 1
                over += done.tolist()
                places = places[~ended]
            if column + 1 < table.shape[1]:
                places = places[lengths[places] > column + 1]
        return got, sorted(over)

    # Entering and leaving

    def enter(self, entries: list[Entry]) -> None:
        """Fill the rows that `take_row` gave to these requests, which then run after all others, in this order."""
        rows = np.array([entry.request.row for entry in entries], np.intp)
        columns = np.array(
            [
                (
                    request.tokens.size,
                    num_cached,
                    request.limit,
                    blocks.size,
                    num_named,
                    request.matcher is not None,
                    _steps_alone(request),
                    request.sampling.pooling is not None,
                    request.frontend,
                    request.handle,
                    *self._stops_of(request),
                )
                for request, blocks, num_cached, num_named in entries
            ],
            np.int32,
        ).T
        self.known[rows], self.computed[rows], self.limit[rows], self.num_blocks[rows] = columns[:4]
        self.num_named[rows], self.constrained[rows], self.alone[rows], self.pools[rows] = columns[4:8]
        self.frontend[rows], self.handle[rows] = columns[8:10]
        self.stops[rows] = columns[10:].T
        self.unseen[rows] = 0
        self.prefilling[rows] = False
        self.held[rows] = True
        for request, blocks, _, _ in entries:
            self.tokens[request.row, : request.tokens.size] = request.tokens
            self.blocks[request.row, : blocks.size] = blocks
        self.running = np.concatenate((self.running, rows))

    def take_row(self, request: Request) -> int:
        """Give a request a free row, the one that has been free longest, or a session its own, and say which.

        It runs once it has entered.
        """
        row = request.row = self._take_row(request)
        self.requests[row] = request
        return row

    def _take_row(self, request: Request) -> int:
        session = request.session
        if session is not None and session.row != NONE:
            if self._kept.pop(session.row, None) is None:
                self._leaving.remove((session.row, request))
                self._returned[session.row] = int(self._last_step[session.row])
            return session.row
        if self._free:
            return self._free.popleft()
        asleep = (other for other in self._kept.values() if not other.place)
        self.give_up_row(next(asleep, None) or max(self._kept.values(), key=lambda other: other.place))
        return self._free.pop()

    def give_up_row(self, request: Request) -> None:
        """A session that has no row will not return to the one it had."""
        session = request.session
        assert session is not None
        if self._kept.pop(session.row, None) is not None:
            self._free.append(session.row)
        session.row = NONE

    def _stops_of(self, request: Request) -> Sequence[int]:
        """What a request stops at, as in `stops`; where there is more, it is noted for its row."""
        stops = stops_of(request)
        if not stops:
            return _NO_STOPS
        if len(stops) > NUM_STOPS:
            self.many_stops[request.row] = frozenset(stops)
            return _NO_STOPS
        return stops + [NONE] * (NUM_STOPS - len(stops))

    def leave(self, rows: list[int]) -> None:
        """Take these rows from their requests."""
        for row in rows:
            request = self.request(row)
            request.row = NONE
            self.requests[row] = None
            self.many_stops.pop(row, None)
            self._vacate(row, request)
        self.held[rows] = False
        self.running = self.running[self.held[self.running]]

    def _vacate(self, row: int, request: Request) -> None:
        if self._last_step[row] > self._completed:
            self._leaving.append((row, request))
        elif request.session is not None and request.session.row == row:
            self._kept[row] = request
        else:
            self._free.append(row)

    # Steps, which are numbered, and complete in the order in which they were made

    def use(self, rows: Rows, step: int) -> None:
        """Note that a step names these rows."""
        self._last_step[rows] = step

    def ran_in(self, row: int) -> int:
        """The last step that names a row."""
        return int(self._last_step[row])

    def complete(self, step: int) -> None:
        """A step has come back: rows that only it and earlier ones name are free if nobody holds them."""
        self._completed = step
        for _ in range(len(self._leaving)):
            self._vacate(*self._leaving.popleft())
        if self._returned:
            self._returned = {row: last for row, last in self._returned.items() if last > step}

    # Blocks

    def blocks_of(self, row: int) -> list[int]:
        """The numbers of a row's blocks."""
        blocks: list[int] = self.blocks[row, : self.num_blocks[row]].tolist()
        return blocks

    def add_blocks(self, row: int, blocks: list[int]) -> None:
        """Append to the blocks of one row."""
        begin = int(self.num_blocks[row])
        self.blocks[row, begin : begin + len(blocks)] = blocks
        self.num_blocks[row] += len(blocks)

    def add_block_each(self, rows: Rows, blocks: list[int]) -> None:
        """Append one block to each of these rows, which are different."""
        places = self.num_blocks[rows]
        self.blocks[rows, places] = blocks
        self.num_blocks[rows] = places + 1


def stops_of(request: Request) -> list[int]:
    """The tokens a request stops at, each once."""
    eos, others = request.sampling.eos_token_id, request.sampling.stop_token_ids
    if not others:
        return [] if eos is None else [eos]
    return list(dict.fromkeys(others if eos is None else [eos, *others]))


def _steps_alone(request: Request) -> bool:
    sampling = request.sampling
    return request.matcher is not None or sampling.logprobs is not None or sampling.prompt_logprobs is not None
