"""What runs in a step: first those that run already, then those that wait, as far as tokens, rows and blocks go.

Each request has a number of tokens that are computed and a number that are known (or being drawn); a step brings the
first closer to the second. There is no other difference between prefill, its chunks, and decode.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bus.config import Config
from bus.messages import PauseState, RequestStarted
from ranks.batch import NO_ROWS, Batch, Entry, Rows
from ranks.kv_cache import KvCache
from ranks.request import Int32, Request
from ranks.sessions import Sessions
from ranks.statistics import Statistics
from ranks.waiting import Waiting


@dataclass(slots=True)
class Step:
    """What a step does, and, while it is in flight, what is needed when it comes back.

    `rows` [n] run `counts` [n] tokens each, those where `samples` [n] is true draw one. `block_ids` [m] were given to
    `block_rows` [m] that ran before. `entered` has those that got a row in this step. `drafts` has the draft tokens at
    the end of a row's count.
    """

    number: int
    rows: Rows
    counts: Int32
    samples: npt.NDArray[np.bool_]
    block_rows: Rows
    block_ids: list[int]
    entered: list[Entry]
    preempted: list[Request]
    drafts: dict[int, list[int]]
    started: list[tuple[Request, int, RequestStarted]] = field(default_factory=list)
    """What is to be told of requests with the step's result, if they, and these turns of theirs, have not ended."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in it."""
        return int(np.add.reduce(self.counts))

    @property
    def num_drafts(self) -> Int32:
        """How many of each row's tokens are drafts; int32 [n]."""
        if not self.drafts:
            return np.zeros(self.rows.size, np.int32)
        return np.array([len(self.drafts.get(row, ())) for row in self.rows.tolist()], np.int32)

    @property
    def tried(self) -> list[int]:
        """The drafts of all rows, one after the other."""
        return [token for row in self.rows.tolist() for token in self.drafts.get(row, ())] if self.drafts else []

    @property
    def all_sample(self) -> bool:
        """Whether each row comes to its last token."""
        return int(np.count_nonzero(self.samples)) == self.rows.size

    @property
    def is_plain(self) -> bool:
        """Whether each row draws one token, and there is nothing else to be told of it."""
        return self.all_sample and not self.drafts and not self.started and not self.preempted


class Planner:
    """Moves requests between the batch and those that wait, and makes steps of the batch."""

    def __init__(
        self,
        config: Config,
        max_len: int,
        batch: Batch,
        waiting: Waiting,
        kv: KvCache,
        sessions: Sessions,
        statistics: Statistics,
    ) -> None:
        self._config = config
        self._max_len = max_len
        self._batch = batch
        self._waiting = waiting
        self._kv = kv
        self._sessions = sessions
        self._statistics = statistics
        self._planned = np.zeros(config.max_num_seqs, np.int32)
        """Tokens of each row in the step being made."""
        self._block_rows: list[Rows] = []
        self._block_ids: list[int] = []
        self._preempted: list[Request] = []
        """Since the last step was made."""
        self._entered: list[Entry] = []
        self._speculates = config.most_drafts > 0 and not config.single_step
        self.pause_state: PauseState = "unpaused"
        self.drafts: dict[int, list[int]] = {}
        """Draft tokens by row, for the next step it is in. A row that has any waits until no step in flight draws for
        it: these stand for those that will be found then."""

    def plan(self, number: int) -> Step:
        """Make the step with this number; it may be empty."""
        batch = self._batch
        self._block_rows, self._block_ids, self._entered = [], [], []
        num_preempted = len(self._preempted)
        budget = 0 if self.pause_state == "paused_all" else self._config.max_num_batched_tokens
        longest = self._config.long_prefill_token_threshold
        if longest == 0 or batch.running.size + len(self._waiting) == 1:
            longest = budget
        self._planned[batch.running] = 0
        budget = self._run_on(budget, longest)
        if self.admits and len(self._preempted) == num_preempted:
            self._admit(budget, longest)
        return self._close(number)

    @property
    def admits(self) -> bool:
        """Whether who waits may begin."""
        return self.pause_state == "unpaused"

    def expects_more(self) -> bool:
        """Whether anything is left to run after the steps in flight, unless a stop token ends it."""
        batch = self._batch
        rows = batch.running
        if len(self._waiting) or self._sessions.num_queued:
            return True
        return bool((batch.known[rows] + batch.unseen[rows] < batch.limit[rows]).any())

    # Those that run already

    def _run_on(self, budget: int, longest: int) -> int:
        """Plan tokens for the running rows, preempting the last of them where blocks run out; returns what is left."""
        batch, pool = self._batch, self._kv.pool
        first = 0
        while first < batch.running.size and budget > 0:
            rows = batch.running[first:]
            counts = self._counts(rows, budget, longest)
            ends = batch.computed[rows] + counts
            lacking = self._kv.lacking(rows, ends)
            needed = int(np.add.reduce(lacking))
            while (missing := needed - pool.num_free) > 0:
                if not self._sessions.give_up_blocks(missing, None, ready_too=True):
                    break
            if missing <= 0:
                return budget - self._give(rows, counts, ends, lacking)
            fit = int(np.searchsorted(np.cumsum(lacking), pool.num_free, side="right"))
            budget -= self._give(rows[:fit], counts[:fit], ends[:fit], lacking[:fit])
            row = int(rows[fit])
            budget += self._make_room(row, int(lacking[fit]))
            if not batch.held[row]:
                break
            place = slice(fit, fit + 1)
            budget -= self._give(rows[place], counts[place], ends[place], lacking[place])
            first = int(np.flatnonzero(batch.running == row)[0]) + 1
        return budget

    def _counts(self, rows: Rows, budget: int, longest: int) -> Int32:
        """How many tokens each row could run, were there blocks enough."""
        batch = self._batch
        computed = batch.computed[rows]
        unseen = batch.unseen[rows]
        coming = batch.known[rows] + unseen
        counts: Int32 = (coming - computed) * (coming < batch.limit[rows])
        tried = _NO_DRAFTS
        if self.drafts:
            tried = np.array([len(self.drafts.get(row, ())) for row in rows.tolist()], np.int32)
            counts += tried
            np.minimum(counts, self._max_len - 1 - computed, out=counts)
        constrained = batch.constrained[rows]
        if np.count_nonzero(constrained) and (constrained & (unseen > 0)).any():
            # Their masks follow from the tokens in flight. They wait all together, so that they run in the same steps.
            counts[constrained & ~batch.prefilling[rows]] = 0
        if self._speculates and ((unseen > 0) & ((computed >= coming) | (tried > 0))).any():
            # What a row tries follows from its tokens, and where it goes on from what was right of it. All others wait
            # with it: a step that has them all takes hardly longer than one that has some.
            counts[~batch.prefilling[rows]] = 0
        if longest < budget:
            np.minimum(counts, longest, out=counts)
        if np.add.reduce(counts) > budget:
            np.clip(budget - (np.cumsum(counts, dtype=np.int32) - counts), 0, counts, out=counts)
        return counts

    def _give(self, rows: Rows, counts: Int32, ends: Int32, lacking: Int32) -> int:
        """Plan `counts` tokens for `rows`, with the blocks they lack; returns how many these are together."""
        self._planned[rows] = counts
        if np.count_nonzero(lacking):
            block_rows, block_ids = self._kv.grow(rows, lacking)
            self._block_rows.append(block_rows)
            self._block_ids += block_ids
        num_tokens = int(np.add.reduce(counts))
        if np.count_nonzero(counts) < counts.size:
            rows, ends = rows[counts > 0], ends[counts > 0]  # accepted drafts may have filled blocks of the others
        self._kv.name_full(rows, np.minimum(ends, self._batch.known[rows]))
        return num_tokens

    def _make_room(self, row: int, lacking: int) -> int:
        """Preempt until `lacking` blocks are free or `row` itself is gone; returns the tokens the others had."""
        restored = 0
        while self._kv.pool.num_free < lacking and self._batch.held[row]:
            victim = self._victim()
            restored += int(self._planned[victim])
            self._planned[victim] = 0
            self.preempt(victim)
        return restored

    def _victim(self) -> int:
        """The row to preempt: the last that came, or the last by (priority, arrival time)."""
        running = self._batch.running
        if self._config.policy == "fcfs":
            return int(running[-1])
        return max(running.tolist(), key=self._place)

    def _place(self, row: int) -> tuple[int, float, int]:
        request = self._batch.request(row)
        return request.priority, request.arrival_time, request.number

    def preempt(self, row: int) -> None:
        """Send a running request back to those that wait; its KV is lost but for what the prefix cache keeps."""
        batch = self._batch
        request = batch.request(row)
        self._kv.release(row, computed=int(batch.computed[row]))
        request.tokens = batch.tokens_of(row).copy()
        request.num_preemptions += 1
        self.drafts.pop(row, None)
        if request.session is not None:
            batch.give_up_row(request)
        batch.leave([row])
        self._waiting.add_first(request)
        self._preempted.append(request)
        self._statistics.preempted()

    # Those that wait

    def _admit(self, budget: int, longest: int) -> None:
        """Give rows to those that wait, in their order, up to the first for which something does not suffice."""
        batch, kv, pool = self._batch, self._kv, self._kv.pool
        entered = self._entered
        counts: list[int] = []
        while budget > 0 and (request := self._waiting.first()) is not None and batch.has_room_for(request):
            session = request.session
            if session is not None and session.blocks:
                found, cached, num_named = session.blocks, session.computed, session.num_named
            else:
                found = kv.find(request)
                cached, num_named = len(found) * kv.block_size, len(found)
            if not self._fits(request, found, nothing_runs=batch.running.size == 0 and not entered):
                break
            count = min(request.tokens.size - cached, longest, budget)
            if session is None or not session.blocks:
                pool.share(found)
                self._statistics.looked_up(request, cached)
            more = pool.take(max(kv.blocks_for(cached + count) - len(found), 0))
            self._waiting.remove(request)
            row = batch.take_row(request)
            if session is not None:
                self._sessions.entered(request)
                if session.row == row:
                    self._block_rows.append(np.full(len(more), row, np.intp))
                    self._block_ids += more
            blocks = found + more
            num_named = kv.name_entering(request, blocks, num_named, cached + count)
            entered.append(Entry(request, np.array(blocks, np.int32), cached, num_named))
            counts.append(count)
            budget -= count
        if entered:
            batch.enter(entered)
            self._planned[batch.running[-len(counts) :]] = counts

    def _fits(self, request: Request, found: list[int], nothing_runs: bool) -> bool:
        """Whether there is room for all of a request that has `found`, once sessions have made some where they can.

        Those that wait for a row lose their blocks only when there is nothing that will give any back.
        """
        pool = self._kv.pool
        needed = self._kv.blocks_for(request.tokens.size)
        if needed <= pool.num_free:
            return True
        while True:
            lacking = needed - len(found)
            if request.session is None or found is not request.session.blocks:
                lacking += pool.count_free(found)
            if lacking <= pool.num_free:
                return True
            if not self._sessions.give_up_blocks(lacking - pool.num_free, request, ready_too=nothing_runs):
                return False

    # The step

    def _close(self, number: int) -> Step:
        batch = self._batch
        rows = batch.running
        counts = self._planned[rows]
        if np.count_nonzero(counts) < counts.size:
            rows = rows[counts > 0]
            counts = self._planned[rows]
        given = self._block_rows
        block_rows = given[0] if len(given) == 1 else np.concatenate([NO_ROWS, *given])
        block_ids = self._block_ids
        if self._preempted:
            kept = batch.held[block_rows]
            block_rows = block_rows[kept]
            block_ids = [block for block, keep in zip(block_ids, kept.tolist(), strict=True) if keep]
        drafts = self._take_drafts(rows, counts) if self.drafts else {}
        unseen = batch.unseen[rows]
        computed = batch.computed[rows] + counts
        samples = computed >= batch.known[rows] + unseen
        batch.computed[rows] = computed
        batch.unseen[rows] = unseen + samples
        batch.prefilling[rows] = ~samples
        batch.use(rows, number)
        preempted, self._preempted = self._preempted, []
        return Step(number, rows, counts, samples, block_rows, block_ids, self._entered, preempted, drafts)

    def _take_drafts(self, rows: Rows, counts: Int32) -> dict[int, list[int]]:
        """The drafts that the counts of this step have room for; the others of these rows are void."""
        taken = {}
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            drafts = self.drafts.pop(row, None)
            room = int(self._batch.computed[row]) + count - int(self._batch.known[row])
            if drafts and room > 0:
                taken[row] = drafts[:room]
        return taken


_NO_DRAFTS = np.zeros(1, np.int32)
