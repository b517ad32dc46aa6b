"""The requests that run: their rows, and everything about them that a step may change, in arrays by row."""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranks.request import Int32, Request

Rows = npt.NDArray[np.intp]
"""Numbers of rows, as numpy likes its indices."""

NO_ROWS: Rows = np.empty(0, np.intp)

NUM_STOPS = 4
"""Stop tokens of a row that are looked at for all rows together."""

NONE = -1
"""Stands in arrays of token ids for no token."""


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
        self.running = NO_ROWS
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
        self._most_stops = 0
        """So many a row has had at most, without those in `many_stops`."""
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

    def last_tokens(self, rows: list[int]) -> list[int]:
        """The last known token of each of these rows."""
        held = np.array(rows, np.intp)
        last: list[int] = _flat(self.tokens)[held * self.tokens.shape[1] + self.known[held] - 1].tolist()
        return last

    def next_to_name(self, rows: Rows, block_size: int) -> tuple[list[int], bytes]:
        """The first block without a name of each of `rows`: the numbers, and the tokens, raw, one after the other."""
        places = rows * self.blocks.shape[1] + self.num_named[rows]
        blocks: list[int] = _flat(self.blocks)[places].tolist()
        return blocks, self.tokens.reshape(-1, block_size)[places].tobytes()

    def append_tokens(self, rows: Rows, table: Int32, lengths: Int32) -> tuple[Int32, list[int]]:
        """Give `rows` [n] new tokens, the first `lengths` [n] of each line of `table` [n, widest], up to their end.

        Returns how many each has got, and the places in `rows` of those that have come to their end, in order.
        """
        places = lengths.nonzero()[0]
        got = lengths.copy()
        over: list[int] = []
        for column in range(table.shape[1]):
            going, drawn = rows[places], table[:, column][places]
            size = self.known[going]
            _flat(self.tokens)[going * self.tokens.shape[1] + size] = drawn
            size += 1
            self.known[going] = size
            ended = size >= self.limit[going]
            for stop in range(self._most_stops):
                ended |= drawn == self.stops[:, stop][going]
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
        self.unseen[rows] = 0
        self.prefilling[rows] = False
        self.stops[rows] = NONE
        self.held[rows] = True
        for request, blocks, num_cached, num_named in entries:
            row, tokens = request.row, request.tokens
            self.tokens[row, : tokens.size] = tokens
            self.known[row] = tokens.size
            self.computed[row] = num_cached
            self.limit[row] = request.limit
            self.blocks[row, : blocks.size] = blocks
            self.num_blocks[row] = blocks.size
            self.num_named[row] = num_named
            self.constrained[row] = request.matcher is not None
            self.alone[row] = _steps_alone(request)
            self.pools[row] = request.sampling.pooling is not None
            self.frontend[row] = request.frontend
            self.handle[row] = request.handle
            self._set_stops(row, request)
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

    def _set_stops(self, row: int, request: Request) -> None:
        """Note what a row stops at; its `stops` are blank."""
        stops = stops_of(request)
        if not stops:
            return
        if len(stops) <= NUM_STOPS:
            self.stops[row, : len(stops)] = stops
            self._most_stops = max(self._most_stops, len(stops))
        else:
            self.many_stops[row] = frozenset(stops)

    def leave(self, rows: list[int]) -> None:
        """Take these rows from their requests."""
        for row in rows:
            request = self.request(row)
            request.row = NONE
            self.requests[row] = None
            self.held[row] = False
            self.many_stops.pop(row, None)
            self._vacate(row, request)
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
        _flat(self.blocks)[rows * self.blocks.shape[1] + places] = blocks
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


def _flat(table: Int32) -> Int32:
    """The same numbers in one line: numpy finds scattered ones by one index in a third of the time it takes by two."""
    return table.reshape(-1)
