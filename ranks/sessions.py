"""Sessions: requests whose input keeps coming (docs/sessions.md has the rules).

Everything here happens when a turn begins or ends; while it runs, a session is a request like any other.
"""

import numpy as np

from bus.messages import MultimodalFeature, TurnEnded, TurnReason
from ranks.batch import NONE, Batch
from ranks.kv_cache import KvCache
from ranks.request import Request, Turn
from ranks.statistics import Statistics
from ranks.waiting import Waiting


class Sessions:
    """The sessions that have no row: those that wait for input, for a row, and those with nothing to compute."""

    def __init__(self, batch: Batch, waiting: Waiting, kv: KvCache, statistics: Statistics, max_len: int) -> None:
        self._batch = batch
        self._waiting = waiting
        self._kv = kv
        self._statistics = statistics
        self._max_len = max_len
        self._idle: dict[int, Request] = {}
        """Those that wait for input, by number, the one that has done so longest first."""
        self._keeping: dict[int, Request] = {}
        """Those of them that have blocks, in the same order."""
        self._empty: dict[int, Request] = {}
        """Those whose turn has brought nothing, so that it ends with the next schedule."""
        self._ready: dict[int, Request] = {}
        """Those that wait for a row and have blocks."""
        self._num_idle_tokens = 0
        self.num_queued = 0
        """Turns that wait for the one before to end."""

    @property
    def num_idle(self) -> int:
        """How many wait for input."""
        return len(self._idle)

    @property
    def num_empty(self) -> int:
        """How many have a turn that ends with the next schedule."""
        return len(self._empty)

    @property
    def num_tokens(self) -> int:
        """Tokens of those that do not wait for a row."""
        return self._num_idle_tokens + sum(request.num_prompt for request in self._empty.values())

    # Turns begin

    def open(self, request: Request) -> None:
        """Take a new session; its first turn begins."""
        assert request.session is not None
        request.session.order = self._waiting.next_place()
        self._begin(request, request.tokens.size)

    def take(self, request: Request, turn: Turn) -> None:
        """Let a session that waits for input go on with one that there is room for."""
        size = request.num_prompt + turn.tokens.size
        assert request.session is not None
        request.session.taken = turn
        self._rouse(request)
        request.features = [*request.features, *shifted(turn.features, request.num_prompt)]
        request.tokens = np.concatenate([request.tokens, turn.tokens])
        request.num_prompt = size
        request.sampling = turn.sampling
        request.limit = min(size + turn.sampling.max_tokens, self._max_len)
        request.matcher, request.ticket = turn.matcher, turn.ticket
        request.added_at = turn.added_at
        request.has_run = False
        request.num_preemptions = 0
        self._begin(request, turn.tokens.size)

    def _begin(self, request: Request, num_new: int) -> None:
        session = request.session
        assert session is not None
        if num_new == 0:
            self._empty[request.number] = request
            return
        self._waiting.add_at(request, session.order)
        if session.blocks:
            self._ready[request.number] = request

    def entered(self, request: Request) -> None:
        """A session that waited has got a row, and its blocks have gone there."""
        session = request.session
        assert session is not None
        self._ready.pop(request.number, None)
        session.blocks = []
        session.computed = session.num_named = 0

    def left(self, request: Request) -> None:
        """A request, session or not, leaves its row for good."""
        if request.session is not None:
            self._batch.give_up_row(request)

    # Turns end

    def end_turn(
        self, request: Request, reason: TurnReason, stop_reason: int | None = None, keep: int | None = None
    ) -> TurnEnded:
        """Fix what a turn leaves, of its output the first `keep` tokens (None is all but the last), and let it wait."""
        session = request.session
        assert session is not None
        batch, row = self._batch, request.row
        if row != NONE:
            num_output = int(batch.known[row]) - request.num_prompt
            kept = num_output - 1 if keep is None else min(keep, num_output)
            context = request.num_prompt + kept
            self._kv.settle(row, context)
            request.tokens = batch.tokens[row, :context].copy()
            coming, computed = int(batch.known[row] + batch.unseen[row]), int(batch.computed[row])
            if batch.unseen[row] and computed >= coming:
                batch.give_up_row(request)  # how many tokens the executor comes to hold depends on drafts in flight
            else:  # drafts that were right, but came after the turn's end, are there as well
                session.row, session.row_tokens = row, max(coming, computed + 1)
            session.row_kept = context
            batch.leave([row])
        else:
            self._leave_line(request)
            num_output = request.tokens.size - request.num_prompt
            kept = min(num_output, keep or 0)
            context = request.num_prompt + kept
            request.tokens = request.tokens[:context]
            del request.names[context // self._kv.block_size :]
        session.order = self._waiting.next_place()
        self._rest(request, context)
        self._statistics.turn_ended()
        request.turn += 1
        return TurnEnded(
            handle=request.handle,
            turn=request.turn - 1,
            reason=reason,
            stop_reason=stop_reason,
            kept_tokens=kept,
            context_tokens=context,
        )

    def give_back(self, request: Request) -> None:
        """Take out again what a turn brought of which nothing was computed, as if it had not been taken."""
        session = request.session
        assert session is not None
        turn = session.taken
        assert turn is not None
        self._leave_line(request)
        context = request.num_prompt - turn.tokens.size
        request.tokens = request.tokens[:context]
        del request.names[context // self._kv.block_size :]
        request.features = request.features[: len(request.features) - len(turn.features)]
        self._rest(request, context)

    def _rest(self, request: Request, context: int) -> None:
        """A session of `context` tokens waits for input."""
        request.num_prompt = context
        request.matcher, request.ticket = None, 0
        self._idle[request.number] = request
        if request.session is not None and request.session.blocks:
            self._keeping[request.number] = request
        self._num_idle_tokens += context

    def take_empty(self) -> list[Request]:
        """Those whose turn ends with this schedule, for it brought nothing."""
        return list(self._empty.values())

    # Ends

    def waits_for_input(self, request: Request) -> bool:
        """Whether a session is between turns."""
        return request.number in self._idle

    def remove(self, request: Request) -> None:
        """A session without a row has ended."""
        session = request.session
        assert session is not None
        self.num_queued -= len(session.turns)
        if request.number in self._idle:
            self._rouse(request)
        else:
            self._leave_line(request)
        self._kv.pool.release(session.blocks)
        session.blocks = []
        self._batch.give_up_row(request)

    def _rouse(self, request: Request) -> None:
        del self._idle[request.number]
        self._keeping.pop(request.number, None)
        self._num_idle_tokens -= request.num_prompt

    def _leave_line(self, request: Request) -> None:
        if self._empty.pop(request.number, None) is None:
            self._waiting.remove(request)
            self._ready.pop(request.number, None)

    # Blocks

    def give_up_blocks(self, count: int, other_than: Request | None, ready_too: bool) -> bool:
        """Take blocks from one session, at least one of `count`; False if none has any.

        First from who has waited longest for input; with `ready_too`, then from who would get a row last.
        """
        request = next(iter(self._keeping.values()), None)
        if request is None and ready_too:
            others = [request for request in self._ready.values() if request is not other_than]
            request = max(others, key=lambda request: request.place, default=None)
        if request is None or request.session is None:
            return False
        before = request.session.computed
        self._kv.give_up(request.session, count)
        if request.number in self._ready:
            self._waiting.num_computed += request.session.computed - before
        if not request.session.blocks:
            self._keeping.pop(request.number, None)
            self._ready.pop(request.number, None)
        self._batch.give_up_row(request)
        self._statistics.reclaimed()
        return True

    def give_up_all_blocks(self) -> None:
        """Take all blocks from all sessions without a row."""
        while self.give_up_blocks(self._kv.pool.num_blocks, None, ready_too=True):
            pass


def shifted(features: list[MultimodalFeature], base: int) -> list[MultimodalFeature]:
    """The features of an input that comes after `base` tokens, at their places in all of it."""
    return [
        MultimodalFeature(hash=feature.hash, offset=feature.offset + base, length=feature.length)
        for feature in features
    ]
