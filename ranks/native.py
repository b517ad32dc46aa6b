"""The scheduler of our own: exact where it repeats vLLM's decisions (docs/scheduler.md), cheap where nothing changes.

The parts: requests that wait (`ranks.waiting`) get rows (`ranks.batch`) and KV blocks (`ranks.block_pool`, by way of
`ranks.kv_cache`) when a step is planned (`ranks.planning`). Here they are put together, and steps come back.

In steady decode (`ranks.steady`) a step touches arrays by row and no request; requests are looked at when they come,
enter a row, leave it, end, or fill a block.
"""

from collections import deque
from typing import Any, Literal

import numpy as np
from msgspec import structs

from bus.config import Config
from bus.counters import Counters
from bus.messages import (
    EMPTY,
    GRAMMAR_FAULT,
    AddRequest,
    AppendInput,
    FinishReason,
    Floats,
    Grammar,
    Ints,
    KvPool,
    Logprobs,
    PartialSchedule,
    PauseState,
    Pooled,
    RequestStarted,
    Sampling,
    StandingSchedule,
    StepResult,
    StopTurn,
    TurnEnded,
)
from bus.prefix import block_hashes, split_hashes
from bus.wire import all_below, unpack_ints
from ranks import results, schedules
from ranks.batch import NO_ROWS, Batch, Rows
from ranks.block_pool import BlockPool
from ranks.checks import Checks
from ranks.drafts import DraftModel, PromptLookup
from ranks.grammars import NOT_ALLOWED, NOT_ITS_OUTPUT, BadGrammar, Grammars, Matcher
from ranks.kv_cache import KvCache
from ranks.logprobs import part_of
from ranks.members import Members
from ranks.output import outputs
from ranks.planning import Planner, Step
from ranks.pooling import vectors_of
from ranks.request import Int32, new_request
from ranks.scheduler import Ended, KvChanges, LoadFigures, Refused, RefusedTurn, StepOutputs
from ranks.sessions import Sessions
from ranks.single_step import SingleStep
from ranks.statistics import Statistics
from ranks.steady import Steady
from ranks.tickets import Tickets
from ranks.turns import Turns
from ranks.waiting import Waiting


class NativeScheduler:
    """One rank's `ranks.scheduler.Scheduler`."""

    def __init__(self, config: Config, pool: KvPool, counters: Counters, grammars: Grammars | None = None) -> None:
        """`grammars` None are those of the served model."""
        self._config = config
        self._grammars = grammars or Grammars(config)
        self._pool = pool
        self._checks = Checks(pool, pool.num_blocks, config.most_prompt_logprobs)
        max_len = self._checks.max_len
        self._blocks = BlockPool(pool.num_blocks, config.enable_prefix_caching)
        self._batch = Batch(config.max_num_seqs, -(-max_len // pool.block_size), pool.block_size)
        self._kv = KvCache(self._batch, self._blocks, pool.block_size)
        self._waiting = Waiting(by_priority=config.policy == "priority")
        self._statistics = Statistics(counters)
        self._sessions = Sessions(self._batch, self._waiting, self._kv, self._statistics, max_len)
        self._planner = Planner(config, max_len, self._batch, self._waiting, self._kv, self._sessions, self._statistics)
        self._drafts = _drafts(config)
        self._steps: deque[Step] = deque()
        self._steady: Steady | None = None
        """In charge of all rows while it is there; see `_unsettle`."""
        self._standing: deque[int] = deque()
        """Steps that stand, of which it is not known here that they were sent."""
        self._last_rows = NO_ROWS
        """Those of the step made last."""
        self._num_added = 0
        self._tickets = Tickets()
        batch, sessions, drafts = self._batch, self._sessions, self._planner.drafts
        self._members = Members(batch, self._kv, self._waiting, sessions, drafts, self._unsettle)
        self._turns = Turns(
            sessions, self._members, self._checks, self._tickets, drafts, self._compiled_now, self._unsettle
        )
        self._single_step = SingleStep(batch, self._members, self._steps, drafts, pool.vocab_size, self._unsettle)

    # Requests

    def add(self, frontend: int, request: AddRequest, now: float) -> None:
        self._checks.check(request)
        if request.sampling.pooling is not None and self._config.single_step:
            raise Refused("pooling is not available in single-step mode, where tokens are given; leave it out")
        matcher = self._compiled_now(request.sampling, request.output_token_ids)
        name = request.request_id
        if self._members.named(name) is not None:
            name = f"{name}@{frontend}/{request.handle}"
        entry = new_request(
            frontend,
            request,
            name=name,
            number=self._num_added,
            now=now,
            max_len=self._checks.max_len,
            block_size=self._pool.block_size,
        )
        self._num_added += 1
        if matcher is not None:
            entry.matcher = matcher
        elif entry.tokens.size:  # or else its turn ends at once
            entry.ticket = self._tickets.draw(entry, request.sampling)
        self._members.add(entry)
        if entry.session is None:
            self._waiting.add(entry)
        else:
            self._sessions.open(entry)

    def _compiled_now(self, sampling: Sampling, output: Ints = EMPTY) -> Matcher | None:
        """In single-step mode, the grammar asked for, as far as the output there is already; None if there is none."""
        grammar = sampling.grammar
        if grammar is None or not self._config.single_step:
            return None
        try:
            matcher = self._grammars.compile(grammar)
        except BadGrammar as bad:
            raise Refused(f"{GRAMMAR_FAULT}{bad}") from None
        if not matcher.accept(unpack_ints(output).tolist()):
            raise Refused(NOT_ITS_OUTPUT)
        return matcher

    def take_grammars(self) -> list[tuple[int, Grammar]]:
        return self._tickets.take()

    def compiled(self, ticket: int, matcher: Matcher | None, fault: str) -> list[Ended]:
        request, grammar = self._tickets.redeem(ticket)
        sentence = f"{GRAMMAR_FAULT}{fault}" if fault else ""
        matcher = matcher or self._grammars.matcher(grammar)
        if not self._members.has(request):
            return []
        if request.ticket != ticket:
            self._turns.compiled(request, ticket, matcher, sentence)
            return []
        if not sentence and not matcher.accept(request.tokens[request.num_prompt :].tolist()):
            sentence = NOT_ITS_OUTPUT
        if not sentence:
            request.matcher, request.ticket = matcher, 0
            self._members.constrained[request.number] = request
            self._waiting.offer(request)
        elif request.session is None or request.session.taken is None:
            return self._members.finish([request], "error", "invalid", sentence)
        else:
            self._turns.refuse_taken(request, sentence)
        return []

    def has(self, frontend: int, handle: int) -> bool:
        return self._members.get(frontend, handle) is not None

    def adapters(self) -> list[str]:
        return list(dict.fromkeys(request.adapter for request in self._members if request.adapter))

    def append(self, frontend: int, turn: AppendInput, now: float) -> list[Ended]:
        return self._turns.append(frontend, turn, now)

    def stop_turn(self, frontend: int, stop: StopTurn) -> None:
        self._turns.stop(frontend, stop)

    def take_turns(self) -> tuple[StepOutputs, list[RefusedTurn]]:
        if not self._turns.has_news:
            return [], []
        turns, closed, refused = self._turns.take_news()
        nothing = np.empty(0, np.int32)
        told = outputs(0, nothing, nothing, nothing, None, [], turns, closed, []) if turns or closed else []
        return told, refused

    def finish(self, frontend: int, handles: Ints | None, reason: FinishReason) -> list[Ended]:
        if handles is None:
            return self._members.finish([request for request in self._members if request.frontend == frontend], reason)
        found = [self._members.get(frontend, handle) for handle in dict.fromkeys(unpack_ints(handles).tolist())]
        return self._members.finish([request for request in found if request is not None], reason)

    def finish_ids(
        self, request_ids: list[str] | None, reason: FinishReason, code: str = "", message: str = ""
    ) -> list[Ended]:
        wanted = None if request_ids is None else frozenset(request_ids)
        requests = [item for item in self._members if wanted is None or item.request_id in wanted]
        return self._members.finish(requests, reason, code, message)

    # Steps

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        return self._again(step) or self._schedule(step, now)

    def _again(self, step: int) -> PartialSchedule | None:
        """The same rows once more, if they are steady and nobody can join them."""
        steady = self._steady
        if steady is None or not self.may_stand():
            return None
        plan = steady.plan(step)
        if plan is None:
            return None
        self._begin_again(steady, plan)
        return schedules.again(plan, steady.expects_more() or self._others_come())

    def _begin_again(self, steady: Steady, plan: Step) -> None:
        self._members.gone.clear()
        self._statistics.scheduled(steady.size)
        self._steps.append(plan)

    def _others_come(self) -> bool:
        return len(self._waiting) > 0 or self._sessions.num_queued > 0

    def may_stand(self) -> bool:
        if self._steady is None or self._planner.pause_state == "paused_all" or self._planner.drafts:
            return False
        waits = self._sessions.num_empty or (self._batch.num_free and self._waiting.offers_any)
        return not (self._planner.admits and waits)

    def stand(self, first_step: int, after: int, most: int) -> StandingSchedule | None:
        steady = self._steady
        if steady is None or not self.may_stand():
            return None
        self._catch_up(steady)
        standing = steady.foresee(first_step, after, len(self._standing), most)
        if standing is None:
            return None
        self._standing += range(first_step, first_step + standing.num_steps)
        return standing if standing.more or not self._others_come() else structs.replace(standing, more=True)

    def stand_down(self, next_step: int) -> None:
        while self._standing and self._standing[0] < next_step:
            self._begin_standing()
        self._standing.clear()

    def _begin_standing(self) -> None:
        """Make the oldest step that stands: it was sent."""
        steady = self._steady
        assert steady is not None  # whatever else is done, what stands was taken back before
        self._catch_up(steady)
        plan = steady.plan(self._standing.popleft())
        assert plan is not None  # as it was foreseen
        self._begin_again(steady, plan)

    def _catch_up(self, steady: Steady) -> None:
        """Do what is still to be done for steps that stood and have come back."""
        if count := steady.catch_up():
            self._statistics.steady(count, steady.size)

    def _schedule(self, step: int, now: float) -> PartialSchedule | None:
        plan = self._plan(step, now)
        while plan.rows.size == 0 and (plan.preempted or (self._sessions.num_empty and self._planner.admits)):
            plan = self._plan(step, now)  # the first that ran gave way to others, which nothing keeps from running now
        if plan.rows.size == 0:
            return None
        self._steps.append(plan)
        self._watch(plan)
        if self._drafts is not None:
            for entry in plan.entered:
                self._drafts.begin(entry.request.row)
        known = self._drafts is not None and self._drafts.are_known
        schedule = schedules.of_plan(plan, self._batch, with_drafts=known, more=self._planner.expects_more())
        for _ in schedule.continued:
            self._statistics.turn_continued()
        return schedule

    def _watch(self, plan: Step) -> None:
        """Look whether decode is steady from `plan` on: the last step had the same rows, and they all draw."""
        same = not plan.entered and np.array_equal(plan.rows, self._last_rows)
        self._last_rows = plan.rows
        if (
            same
            and plan.rows.size == self._batch.running.size <= self._config.max_num_batched_tokens
            and not self._batch.alone[plan.rows].any()
            and self._drafts is None
            and self._batch.num_leaving == 0
            and all(step.is_plain and np.array_equal(step.rows, plan.rows) for step in self._steps)
        ):
            self._steady = Steady(self._batch, self._kv, self._steps, names_early=self._config.async_depth > 1)

    def _unsettle(self) -> None:
        """Something else than steady decode is to come: the batch is in charge again."""
        self._bring_up_to_date()
        self._steady = None

    def is_steady(self) -> bool:
        return self._steady is not None

    def _plan(self, number: int, now: float) -> Step:
        self._unsettle()
        self._members.gone.clear()
        if self._sessions.num_empty and self._planner.admits:
            for request in self._sessions.take_empty():
                self._turns.end(request, "empty")
        plan = self._planner.plan(number)
        for request, _, cached, _ in plan.entered:
            if not request.has_run:
                request.has_run = True
                queued = max(now - request.added_at, 0.0)
                started = RequestStarted(handle=request.handle, queued_s=queued, cached_tokens=cached)
                plan.started.append((request, request.turn, started))
        if plan.started:
            self._statistics.started(
                sum(request.num_prompt for request, _, _ in plan.started),
                sum(started.cached_tokens for _, _, started in plan.started),
            )
        if plan.rows.size:
            self._statistics.scheduled(plan.num_tokens)
        return plan

    def update(self, result: StepResult) -> StepOutputs:
        tokens = unpack_ints(result.tokens)
        steady = self._steady
        if steady is not None and self._is_plain(result, tokens, steady.size) and steady.goes_on(tokens):
            return steady.outputs(self._go_on_steadily(steady, tokens), tokens)
        if not self._steps:
            self._begin_standing()
        step = self._steps[0]
        drawn = results.read(result, step, self._batch.pools[step.rows], self._pool.vocab_size)
        pooled = vectors_of(step.rows[drawn.pooled].tolist(), result) if drawn.pooled.size else {}
        return self._take(drawn, result.logprobs, pooled)

    def _go_on_steadily(self, steady: Steady, tokens: Int32) -> int:
        """Give the rows of the oldest step their tokens, with which all goes on; which step that is."""
        if not self._steps:
            self._members.gone.clear()
            number = self._standing.popleft()
            steady.passes(number, tokens)
            return number
        number = self._steps.popleft().number
        steady.take(tokens)
        self._batch.complete(number)
        self._statistics.generated(steady.size, 0)
        return number

    def _is_plain(self, result: StepResult, tokens: Int32, num_rows: int) -> bool:
        """Whether a result has a token of the vocabulary for each row, and nothing else."""
        return tokens.size == num_rows and not result.logprobs and all_below(tokens, self._pool.vocab_size)

    def _take(self, drawn: results.Drawn, logprobs: list[Logprobs], vectors: dict[int, Floats]) -> StepOutputs:
        """Give the oldest step's rows what they got; `vectors` has those of the rows that were pooled."""
        self._unsettle()
        step = self._steps.popleft()
        batch = self._batch
        rows = step.rows
        held = batch.present(rows, step.number)
        batch.unseen[rows] -= step.samples & held
        batch.complete(step.number)
        started = [
            (request.frontend, told)
            for request, turn, told in step.started
            if self._members.has(request) and request.turn == turn
        ]
        ended = []
        if drawn.broken.size:
            ended = self._end_broken(rows[drawn.broken[held[drawn.broken]]])
            held &= batch.held[rows]
        pooled: list[tuple[int, Pooled]] = []
        if vectors:
            pooled, done = self._end_pooled([row for row in rows[held].tolist() if row in vectors], vectors)
            ended += done
            held &= batch.held[rows]
        own = self._own_prompt_logprobs(rows[held], logprobs) if logprobs else []
        for row, drafts in step.drafts.items():
            place = int(np.flatnonzero(rows == row)[0])
            if held[place]:
                self._judge(row, drafts, int(drawn.lengths[place]))
        table = drawn.table
        delivered, over = batch.append_tokens(rows, table, drawn.lengths * held)
        told = delivered.nonzero()[0]
        if self._config.async_depth > 1:
            going = rows[told]
            self._kv.name_full(going, np.minimum(batch.known[going], batch.computed[going]))
        left = rows[over].tolist()
        rejected = self._accept(rows, table, delivered, left) if self._members.constrained else {}
        ended += self._end([row for row in left if row not in rejected])
        for row, sentence in rejected.items():
            ended += self._members.finish([batch.request(row)], "error", "grammar", sentence)
        if self._drafts is not None:
            self._look_up(self._drafts, rows[told])
        width = table.shape[1]
        tokens = table[:, 0][told] if width == 1 else table[np.arange(width) < delivered[:, None]]
        self._statistics.generated(tokens.size, int(np.add.reduce(drawn.lengths)) - tokens.size)
        if logprobs:
            own += self._own_logprobs(step, delivered, logprobs)
        turns, closed = self._turns.take_ended()
        return self._tell(step.number, rows[told], tokens, delivered[told], started, turns, ended + closed, own, pooled)

    def _judge(self, row: int, drafts: list[int], num_tokens: int) -> None:
        """A row with drafts has `num_tokens` tokens: all but the last are drafts that were right."""
        if num_tokens:
            self._batch.computed[row] -= len(drafts) + 1 - num_tokens
            self._statistics.drafted(len(drafts), num_tokens - 1)
            if self._drafts is not None:
                self._drafts.judged(row, num_tokens - 1)

    def _look_up(self, source: PromptLookup | DraftModel, rows: Rows) -> None:
        """Find drafts for those of the `rows`, which have new tokens, that go on."""
        batch, drafts = self._batch, self._planner.drafts
        left = batch.limit[rows] - batch.known[rows] - 1
        for row, room, goes_on in zip(rows.tolist(), left.tolist(), batch.held[rows].tolist(), strict=True):
            found = source.drafts(row, batch.tokens_of(row), room) if goes_on else []
            if found and (matcher := batch.request(row).matcher) is not None:
                found = matcher.allowed_of(found) if source.are_known else []  # its masks follow from its drafts
            if found:
                drafts[row] = found
            else:
                drafts.pop(row, None)

    def _accept(self, rows: Rows, table: Int32, delivered: Int32, left: list[int]) -> dict[int, str]:
        """Let grammars go on by what their rows got; those that cannot, and why. For rows in `left` it was the last."""
        places = {row: place for place, row in enumerate(rows.tolist())}
        rejected = {}
        for request in self._members.constrained.values():
            place = places.get(request.row)
            if place is not None and request.matcher is not None:
                tokens = table[place, : delivered[place]].tolist()
                if tokens and not request.matcher.accept(tokens):
                    fault = request.matcher.fault
                    if fault:
                        rejected[request.row] = f"{GRAMMAR_FAULT}{fault}"
                    elif request.row not in left:
                        rejected[request.row] = NOT_ALLOWED
        return rejected

    def _end_broken(self, rows: Rows) -> list[Ended]:
        requests = [self._batch.request(row) for row in rows.tolist()]
        for _ in requests:
            self._statistics.not_a_number()
        return self._members.finish(requests, "error", "nan", "the model produced NaN logits")

    def _end_pooled(self, rows: list[int], vectors: dict[int, Floats]) -> tuple[list[tuple[int, Pooled]], list[Ended]]:
        """End the requests in `rows`, which have all they asked for: their vectors, with the frontends they go to."""
        requests = [self._batch.request(row) for row in rows]
        told = [
            (request.frontend, Pooled(owner=request.handle, vector=vectors[row]))
            for row, request in zip(rows, requests, strict=True)
        ]
        return told, self._members.finish(requests, "stop")

    def _end(self, rows: list[int]) -> list[Ended]:
        """The last token of each of these rows is the last of its request, or of its session's turn."""
        if not rows:
            return []
        batch = self._batch
        ended = []
        gone = []
        for row, token in zip(rows, batch.last_tokens(rows), strict=True):
            request = batch.request(row)
            reason, stop_reason = _why(token, request.sampling)
            if request.session is None:
                ended.append(self._members.forget(request, reason, stop_reason))
                gone.append(row)
            else:
                self._members.leave(gone)  # blocks become free in the order of the rows
                gone = []
                self._turns.end(request, reason, stop_reason)
        self._members.leave(gone)
        return ended

    def _own_prompt_logprobs(self, rows: Rows, logprobs: list[Logprobs]) -> list[tuple[int, Logprobs]]:
        """Those of prompts that requests in `rows` were not told yet, with the frontend they go to."""
        own = []
        held = frozenset(rows.tolist())
        for item in logprobs:
            if item.prompt_position and item.owner in held:
                request = self._batch.request(item.owner)
                rest = request.prompt_report.rest_of(item, request.handle) if request.prompt_report else None
                if rest is not None:
                    own.append((request.frontend, rest))
        return own

    def _own_logprobs(self, step: Step, delivered: Int32, logprobs: list[Logprobs]) -> list[tuple[int, Logprobs]]:
        """Those of the tokens that requests get, with the frontend they go to."""
        batch = self._batch
        own = []
        places = {row: place for place, row in enumerate(step.rows.tolist())}
        for item in logprobs:
            place = places.get(item.owner)
            if place is not None and delivered[place] and not item.prompt_position:
                part = part_of(item, int(batch.handle[item.owner]), 0, int(delivered[place]))
                own.append((int(batch.frontend[item.owner]), part))
        return own

    def _tell(
        self,
        number: int,
        rows: Rows,
        tokens: Int32,
        counts: Int32,
        started: list[tuple[int, RequestStarted]],
        turns: list[tuple[int, TurnEnded]],
        ended: list[Ended],
        logprobs: list[tuple[int, Logprobs]],
        pooled: list[tuple[int, Pooled]],
    ) -> StepOutputs:
        """What frontends are told: `rows` got `tokens`, so many each as `counts` says."""
        frontends, handles = self._batch.frontend[rows], self._batch.handle[rows]
        several = counts if tokens.size > rows.size else None
        return outputs(number, frontends, handles, tokens, several, started, turns, ended, logprobs, pooled)

    def set_pause(self, state: PauseState) -> None:
        self._planner.pause_state = state

    # Single-step mode

    def render(self, step: int, now: float) -> dict[str, Any]:
        gone = list(self._members.gone)
        plan = self._plan(step, now)
        self._steps.append(plan)
        return self._single_step.render(plan, gone)

    def update_by_id(self, sampled: dict[str, list[int]]) -> tuple[StepOutputs, dict[str, Any]]:
        given = self._take(self._single_step.read(sampled), [], {})
        return given, self._single_step.by_id(given)

    def bitmask(self) -> tuple[list[str], list[bytes]] | None:
        return self._single_step.bitmask()

    def set_drafts(self, drafts: dict[str, list[int]]) -> list[str]:
        return self._single_step.set_drafts(drafts)

    # Probes

    def _bring_up_to_date(self) -> None:
        if self._steady is not None:
            self._catch_up(self._steady)
            self._steady.settle()

    def load(self) -> LoadFigures:
        self._bring_up_to_date()
        self._statistics.idle_sessions(self._sessions.num_idle)
        batch = self._batch
        rows = batch.running
        lengths = batch.known[rows]
        prefill = int(((lengths - batch.computed[rows]) * batch.prefilling[rows]).sum())
        return LoadFigures(
            running=rows.size,
            waiting=len(self._waiting) + self._sessions.num_empty,
            pending_prefill_tokens=self._waiting.num_tokens - self._waiting.num_computed + prefill,
            min_remaining_output=int((batch.limit[rows] - lengths).min()) if rows.size else None,
            used_blocks=self._blocks.num_blocks - self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
        )

    def token_count(self) -> int:
        self._bring_up_to_date()
        running = int(self._batch.known[self._batch.running].sum())
        return self._waiting.num_tokens + self._sessions.num_tokens + running

    def computed_tokens(self, prompt: Ints, cache_salt: str, adapter: str) -> int:
        self._bring_up_to_date()
        size = self._pool.block_size
        names = split_hashes(block_hashes(prompt, size, cache_salt, adapter=adapter))
        return len(self._blocks.find(names[: max(prompt.nbytes // 4 - 1, 0) // size])) * size

    def unfinished(self) -> int:
        return len(self._members) - self._sessions.num_idle

    def request_counts(self) -> tuple[int, int]:
        return self._batch.running.size, len(self._waiting) + self._sessions.num_idle + self._sessions.num_empty

    def has_finished(self) -> bool:
        return self._batch.num_leaving > 0 or bool(self._members.gone)

    def stats(self) -> dict[str, Any] | None:
        if not self._config.log_stats:
            return None
        self._bring_up_to_date()
        usage = 1 - self._blocks.num_free / self._blocks.num_blocks
        return self._statistics.report(*self.request_counts(), usage)

    # Caches

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        if reset_running:
            self._unsettle()
            for row in self._batch.running[::-1].tolist():
                self._planner.preempt(row)
        if self._batch.running.size == 0:
            self._sessions.give_up_all_blocks()
        return self._blocks.clear()

    def reset_encoder_cache(self) -> bool:
        return True

    def take_kv_changes(self) -> KvChanges:
        return self._blocks.take_changes()

    def kv_snapshot(self) -> bytes:
        return self._blocks.names()


def _why(token: int, sampling: Sampling) -> tuple[Literal["stop", "length"], int | None]:
    """Why a request ends with this token, its last; and the token, if that is why."""
    if token == sampling.eos_token_id:
        return "stop", None
    if token in sampling.stop_token_ids:
        return "stop", token
    return "length", None


def _drafts(config: Config) -> PromptLookup | DraftModel | None:
    """Where drafts come from; nowhere in single-step mode, where they are given."""
    if config.speculation == "off" or config.single_step:
        return None
    return PromptLookup(config) if config.speculation == "ngram" else DraftModel(config)
