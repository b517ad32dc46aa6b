"""vLLM's own v1 scheduler behind the rank's interface: rows and deltas outside, its requests and schedules inside.

With a depth of two steps it is vLLM's `AsyncScheduler`, otherwise its `Scheduler`. Block 0 is vLLM's null block, so of
a pool's blocks one less is used; a pool smaller than the longest request shortens what a request may have. Block names
in the prefix cache are those of `bus.prefix`: vLLM takes them as they are. The one place where vLLM is steered is how
many requests it may admit: as many as there are free rows.

Sessions are vLLM's own, faults included: appends are passed on, but for those that vLLM would answer with an
assertion. A session gives its row back at the end of a turn and resumes with all its tokens.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState as VllmPauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

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
    NewRow,
    PartialSchedule,
    PauseState,
    Pooled,
    RequestEnded,
    RequestStarted,
    ResumeRow,
    Sampling,
    StepResult,
    StopTurn,
    TurnEnded,
    TurnReason,
)
from bus.prefix import block_hashes, split_hashes
from bus.wire import pack_ints, unpack_ints
from ranks.checks import Checks
from ranks.grammars import NOT_ALLOWED, NOT_ITS_OUTPUT, BadGrammar
from ranks.kv_names import KvNames
from ranks.logprobs import PromptReport, sampling_for_row
from ranks.outbox import Outbox, by_id
from ranks.pooling import POOLED, vectors_of
from ranks.rows import Rows
from ranks.scheduler import NOT_A_NUMBER, BrokenResult, Ended, KvChanges, LoadFigures, Refused, RefusedTurn, StepOutputs
from ranks.vllm_engine import Engine
from ranks.vllm_rendering import render
from ranks.vllm_requests import new_request, next_turn, sampling_of
from ranks.vllm_statistics import Statistics

NO_SAMPLE = -1
_STANDS_FOR_A_VECTOR = [0]
"""The token that vLLM is given in place of a prompt's vector: its last, since `max_tokens` is 1."""

_STATUS = {
    "abort": RequestStatus.FINISHED_ABORTED,
    "closed": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "stop": RequestStatus.FINISHED_STOPPED,
}
_PAUSE = {
    "unpaused": VllmPauseState.UNPAUSED,
    "paused_new": VllmPauseState.PAUSED_NEW,
    "paused_all": VllmPauseState.PAUSED_ALL,
}


@dataclass(slots=True)
class _Entry:
    """A request and vLLM's object for it. `name` is its id in renderings: the request's own, made unique."""

    frontend: int
    handle: int
    request_id: str
    name: str
    vllm: Request
    sampling: Sampling
    added_at: float
    row: int = -1
    entered: bool = False
    """Whether it has been in a row before."""
    turn: int = 1
    num_prompt: int = 0
    """Tokens of a session that are prompt in its turn; as many as vLLM has, but when that is already at the next."""
    num_output: int = 0
    """Tokens of the turn's output."""
    prompt_report: PromptReport | None = None
    """Where log-probabilities of the prompt are asked for: which of them were told."""
    adapter: str = ""
    """The identity of its adapter."""


class _Step(NamedTuple):
    """A step in flight: its requests, their rows and whether they sample, in the order of the schedule."""

    number: int
    output: SchedulerOutput
    entries: list[_Entry]
    rows: list[int]
    samples: list[bool]
    started: list[tuple[_Entry, RequestStarted]]


class _Hooks:
    """What the adapter wants to hear from inside vLLM's scheduler."""

    statistics: Statistics

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> None:
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self.statistics.drafts.take(num_draft_tokens - invalid, num_accepted_tokens)


class _Sync(_Hooks, SyncScheduler): ...


class _Async(_Hooks, AsyncScheduler): ...


class _KvEventSink:
    """Stands where vLLM publishes its prefix-cache events."""

    def __init__(self, names: KvNames) -> None:
        self._names = names

    def publish(self, batch: Any) -> None:
        self.take(batch.events)

    def take(self, events: list[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                for name in event.block_hashes:
                    self._names.store(name)
            elif kind == "BlockRemoved":
                for name in event.block_hashes:
                    self._names.remove(name)
            else:
                self._names.clear()

    def shutdown(self) -> None:
        """Nothing is held."""


class VllmScheduler:
    """One rank's `ranks.scheduler.Scheduler` on vLLM's."""

    def __init__(self, config: Config, pool: KvPool, engine: Engine, counters: Counters) -> None:
        self._config = config
        self._pool = pool
        self._engine = engine
        self._counters = counters
        self._usable_blocks = pool.num_blocks - 1
        self._checks = Checks(pool, self._usable_blocks, config.most_prompt_logprobs)
        vllm_config, kv_config = engine.for_pool(pool, max(self._checks.max_len, 1))
        self._vllm = (_Async if config.async_depth > 1 else _Sync)(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=engine.grammars(),
            block_size=pool.block_size,
            log_stats=config.log_stats,
        )
        self._names = KvNames()
        self._sink = _KvEventSink(self._names)
        self._vllm.kv_event_publisher = self._sink
        self._statistics = self._vllm.statistics = Statistics()
        self._compiling: dict[int, _Entry] = {}
        """Those for whom a grammar is being compiled, by its ticket; they may have ended."""
        self._asked: list[tuple[int, Grammar]] = []
        """Of these, those that nobody was told to compile yet."""
        self._rows = Rows(config.max_num_seqs)
        self._steps: deque[_Step] = deque()
        self._num_added = 0
        self._by_id: dict[str, _Entry] = {}
        self._by_key: dict[tuple[int, int], _Entry] = {}
        self._by_name: dict[str, _Entry] = {}
        self._finished_names: dict[str, str] = {}
        """Names of requests, by vLLM's id, that no schedule has told of yet."""

    # Requests

    def add(self, frontend: int, request: AddRequest, now: float) -> None:
        self._checks.check(request)
        self._check_grammar(request.sampling, request.resumable)
        if request.prompt_token_ids.nbytes == 0:
            raise Refused("the prompt is empty; a session may only be opened so with scheduler = native")
        if request.mm_features:
            raise Refused("features of other media are only available with scheduler = native; leave mm_features out")
        self._check_pooling(request)
        try:
            vllm = new_request(
                self._num_added,
                frontend,
                request,
                self._pool.block_size,
                self._config.enable_prefix_caching,
            )
        except (ValueError, VLLMClientError) as error:
            raise Refused(f"the sampling parameters cannot be used: {error}") from None
        if request.sampling.grammar is not None and self._config.single_step:
            self._compile_now(vllm, request.sampling.grammar)
        self._num_added += 1
        name = request.request_id
        if name in self._by_name:
            name = f"{name}@{frontend}/{request.handle}"
        entry = _Entry(frontend, request.handle, request.request_id, name, vllm, request.sampling, now)
        entry.turn = request.turn
        entry.prompt_report = PromptReport.for_request(request)
        entry.num_prompt = vllm.num_prompt_tokens
        entry.num_output = vllm.num_output_tokens
        entry.adapter = request.adapter
        self._by_id[vllm.request_id] = self._by_key[frontend, request.handle] = self._by_name[name] = entry
        self._vllm.add_request(vllm)
        if request.sampling.grammar is not None and not self._config.single_step:
            self._compiling[self._num_added] = entry
            self._asked.append((self._num_added, request.sampling.grammar))

    def take_grammars(self) -> list[tuple[int, Grammar]]:
        asked, self._asked = self._asked, []
        return asked

    def compiled(self, ticket: int, matcher: GuidanceGrammar | None, fault: str) -> list[Ended]:
        entry = self._compiling.pop(ticket)
        if not self._is_alive(entry):
            return []
        if matcher is None:
            return self._finish([entry], "error", "invalid", f"{GRAMMAR_FAULT}{fault}")
        if not self._constrain(entry.vllm, matcher):
            return self._finish([entry], "error", "invalid", NOT_ITS_OUTPUT)
        return []

    def has(self, frontend: int, handle: int) -> bool:
        return (frontend, handle) in self._by_key

    def adapters(self) -> list[str]:
        return list(dict.fromkeys(entry.adapter for entry in self._by_key.values() if entry.adapter))

    def append(self, frontend: int, turn: AppendInput, now: float) -> list[Ended]:
        entry = self._by_key.get((frontend, turn.handle))
        if entry is None:
            raise Refused("the session is not known: it has ended, or was never opened")
        if not entry.vllm.resumable:
            raise Refused(f"request {entry.request_id} is no session; open it with resumable to append to it")
        if entry.vllm.streaming_queue and entry.vllm.streaming_queue[-1] is None:
            raise Refused("the session is closed; it takes no more input")
        sampling = turn.sampling or entry.sampling
        if not turn.close:
            num_new = turn.prompt_token_ids.nbytes // 4
            if num_new == 0:
                raise Refused("the input is empty; that is only allowed with scheduler = native")
            if turn.mm_features:
                raise Refused("features of other media are only available with scheduler = native")
            queued = sum(len(update.prompt_token_ids) for update in entry.vllm.streaming_queue if update)
            self._checks.check_turn(turn, sampling, entry.vllm.num_tokens + queued)
            self._check_grammar(sampling, in_session=True)
        self._vllm.add_request(next_turn(entry.vllm, turn, sampling))
        if entry.num_output == 0:
            entry.num_prompt = entry.vllm.num_prompt_tokens
        if entry.vllm.is_finished():
            return [self._forget(entry, "closed")]
        return []

    def stop_turn(self, frontend: int, stop: StopTurn) -> None:
        raise Refused("turns can only be stopped with scheduler = native")

    def take_turns(self) -> tuple[StepOutputs, list[RefusedTurn]]:
        return [], []

    def finish(self, frontend: int, handles: Ints | None, reason: FinishReason) -> list[Ended]:
        if handles is None:
            return self._finish([entry for entry in self._by_key.values() if entry.frontend == frontend], reason)
        keys = dict.fromkeys((frontend, handle) for handle in unpack_ints(handles).tolist())
        return self._finish([self._by_key[key] for key in keys if key in self._by_key], reason)

    def finish_ids(
        self, request_ids: list[str] | None, reason: FinishReason, code: str = "", message: str = ""
    ) -> list[Ended]:
        wanted = None if request_ids is None else frozenset(request_ids)
        entries = [entry for entry in self._by_key.values() if wanted is None or entry.request_id in wanted]
        return self._finish(entries, reason, code, message)

    def _finish(self, entries: list[_Entry], reason: FinishReason, code: str = "", message: str = "") -> list[Ended]:
        if entries:
            self._vllm.finish_requests([entry.vllm.request_id for entry in entries], _STATUS[reason])
        return [self._forget(entry, reason, code=code, message=message) for entry in entries]

    def _forget(
        self, entry: _Entry, reason: FinishReason, stop_reason: int | None = None, code: str = "", message: str = ""
    ) -> Ended:
        """Drop a request that vLLM has finished."""
        del self._by_id[entry.vllm.request_id]
        del self._by_key[entry.frontend, entry.handle]
        del self._by_name[entry.name]
        self._finished_names[entry.vllm.request_id] = entry.name
        self._leave_row(entry)
        ended = RequestEnded(handle=entry.handle, reason=reason, stop_reason=stop_reason, code=code, message=message)
        return Ended(entry.frontend, entry.request_id, ended)

    def _leave_row(self, entry: _Entry) -> None:
        if entry.row >= 0:
            self._rows.leave(entry.row)
            entry.row = -1

    def _check_pooling(self, request: AddRequest) -> None:
        if request.sampling.pooling is None:
            return
        if self._config.single_step:
            raise Refused("pooling is not available in single-step mode, where tokens are given; leave it out")
        self._checks.check_length(request.prompt_token_ids.nbytes // 4)  # vLLM is to see a token that ends the request

    def _check_grammar(self, sampling: Sampling, in_session: bool) -> None:
        if sampling.grammar is not None and in_session:
            raise Refused("a session may only have a grammar with scheduler = native; leave the grammar out")

    def _compile_now(self, vllm: Request, grammar: Grammar) -> None:
        try:
            matcher = self._engine.compile(grammar)
        except BadGrammar as bad:
            raise Refused(f"{GRAMMAR_FAULT}{bad}") from None
        if not self._constrain(vllm, matcher):
            raise Refused(NOT_ITS_OUTPUT)

    def _constrain(self, vllm: Request, matcher: GuidanceGrammar) -> bool:
        """Give a request its grammar, as far as its output is; False if the grammar does not allow that."""
        self._vllm.structured_output_manager.backend = self._engine.backend
        vllm.structured_output_request.grammar = matcher
        output = list(vllm.output_token_ids)
        return not output or bool(matcher.accept_tokens(vllm.request_id, output))

    # Steps

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        output = self._schedule()
        while not output.num_scheduled_tokens and output.preempted_req_ids:
            output = self._schedule()  # vLLM admits nothing in a schedule that preempts; there is room now
        self._finished_names.clear()
        return self._dispatch(step, now, output) if output.num_scheduled_tokens else None

    def may_stand(self) -> bool:
        return False

    def stand(self, first_step: int, after: int, most: int) -> None:
        return None

    def stand_down(self, next_step: int) -> None:
        raise AssertionError("nothing stands")

    def update(self, result: StepResult) -> StepOutputs:
        step = self._steps[0]
        tokens = unpack_ints(result.tokens).tolist()
        if len(tokens) != len(step.rows):
            raise BrokenResult(f"it has {len(tokens)} tokens for {len(step.rows)} rows")
        for row, entry, samples, token in zip(step.rows, step.entries, step.samples, tokens, strict=True):
            given = token == POOLED if entry.sampling.pooling is not None else 0 <= token < self._pool.vocab_size
            if token != NOT_A_NUMBER and not (given if samples else token == NO_SAMPLE):
                raise BrokenResult(f"row {row}, which {'samples' if samples else 'does not sample'}, has token {token}")
        vectors = vectors_of([row for row, token in zip(step.rows, tokens, strict=True) if token == POOLED], result)
        broken = [entry for entry, token in zip(step.entries, tokens, strict=True) if token == NOT_A_NUMBER]
        sampled = [[token] if token >= 0 else _STANDS_FOR_A_VECTOR if token == POOLED else [] for token in tokens]
        return self._update(sampled, broken, result.logprobs, vectors)

    def is_steady(self) -> bool:
        return False

    def set_pause(self, state: PauseState) -> None:
        self._vllm.set_pause_state(_PAUSE[state])

    def _schedule(self) -> SchedulerOutput:
        """Let vLLM schedule, with no more requests running than there are rows for."""
        vllm = self._vllm
        self._hold_constrained()
        vllm.max_num_active_reqs = len(vllm.running) + vllm.num_waiting_for_streaming_input + self._rows.num_free
        output = vllm.schedule()
        for request_id in sorted(output.preempted_req_ids or ()):
            self._counters.add("scheduler_preemptions")
            self._statistics.take_preemption()
            if request_id in self._by_id:
                self._leave_row(self._by_id[request_id])
        return output

    def _hold_constrained(self) -> None:
        """Leave requests with grammars out of the next schedule while the token of one is drawn: masks follow from it.

        They wait all together, so that they run in the same steps.
        """
        vllm = self._vllm
        requests = [request for request in vllm.running if request.use_structured_output]
        if self._config.async_depth > 1 and any(request.num_output_placeholders for request in requests):
            for request in requests:
                if not request.is_prefill_chunk:
                    request.next_decode_eligible_step = vllm.current_step + 2  # the next schedule is + 1

    def _masks(self, output: SchedulerOutput) -> tuple[Ints, Ints]:
        """The rows that draw by a grammar, and what each may draw."""
        made = self._vllm.get_grammar_bitmask(output)
        if made is None:
            return EMPTY, EMPTY
        words = -(-self._pool.vocab_size // 32)
        masks = np.ascontiguousarray(made.grammar_bitmask[:, :words], "<i4")
        return pack_ints([self._by_id[name].row for name in made.structured_output_request_ids]), pack_ints(masks)

    def _dispatch(self, number: int, now: float, output: SchedulerOutput) -> PartialSchedule:
        """Put a schedule in flight and express it in rows."""
        cached = output.scheduled_cached_reqs
        entering = [(data.req_id, data.block_ids, data.num_computed_tokens) for data in output.scheduled_new_reqs]
        block_rows: list[int] = []
        block_ids: list[int] = []
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                entering.append((request_id, blocks, num_computed))
            elif blocks is not None:
                block_rows += [self._by_id[request_id].row] * len(blocks[0])
                block_ids += blocks[0]
        new: list[NewRow] = []
        resumed: list[ResumeRow] = []
        started: list[tuple[_Entry, RequestStarted]] = []
        for request_id, blocks, num_computed in entering:
            entry = self._by_id[request_id]
            entry.row = self._rows.take()
            if entry.entered or entry.vllm.num_output_tokens:
                resumed.append(_resume_row(entry, blocks[0], num_computed))
            else:
                new.append(_new_row(entry, blocks[0], num_computed))
            if not entry.entered:
                entry.entered = True
                started.append((entry, self._start(entry, num_computed, now)))
        entries = [self._by_id[request_id] for request_id in output.num_scheduled_tokens]
        rows = [entry.row for entry in entries]
        for row in rows:
            self._rows.use(row, number)
        samples = [not entry.vllm.is_prefill_chunk for entry in entries]
        self._steps.append(_Step(number, output, entries, rows, samples, started))
        counts = list(output.num_scheduled_tokens.values())
        self._counters.add("scheduler_steps")
        self._counters.add("scheduler_scheduled_tokens", output.total_num_scheduled_tokens)
        mask_rows, masks = (EMPTY, EMPTY) if self._config.single_step else self._masks(output)
        return PartialSchedule(
            step=number,
            rows=pack_ints(rows),
            num_tokens=pack_ints(counts if any(count != 1 for count in counts) else []),
            block_rows=pack_ints(block_rows),
            block_ids=pack_ints(block_ids),
            new=new,
            resumed=resumed,
            more=self._expects_more(),
            mask_rows=mask_rows,
            masks=masks,
        )

    def _start(self, entry: _Entry, num_cached: int, now: float) -> RequestStarted:
        self._counters.add("scheduler_prompt_tokens", entry.vllm.num_prompt_tokens)
        self._counters.add("scheduler_cached_prompt_tokens", num_cached)
        return RequestStarted(handle=entry.handle, queued_s=max(now - entry.added_at, 0.0), cached_tokens=num_cached)

    def _expects_more(self) -> bool:
        """Whether anything is left to run after the steps in flight, unless a stop token ends it."""
        if self._num_waiting():
            return True
        for request in self._vllm.running:
            in_flight = request.num_output_placeholders or (0 if request.is_prefill_chunk else 1)
            if request.num_output_tokens + in_flight < request.max_tokens:
                return True
        return False

    def _update(
        self,
        sampled: list[list[int]],
        broken: list[_Entry],
        logprobs: list[Logprobs],
        vectors: dict[int, Floats],
    ) -> StepOutputs:
        """Give vLLM the oldest step's tokens, in the order of its rows; those in `vectors` have their vectors, too."""
        step = self._steps.popleft()
        self._rows.complete(step.number)
        outbox = Outbox(step.number)
        for entry, started in step.started:
            if self._is_alive(entry):
                outbox.started(entry.frontend, started)
        for entry in broken:
            if self._is_alive(entry):
                self._counters.add("scheduler_nan_requests")
                for ended in self._finish([entry], "error", "nan", "the model produced NaN logits"):
                    outbox.ended(ended)
        place_of = {row: i for i, row in enumerate(step.rows)}
        for item in logprobs:
            if item.prompt_position and item.owner in place_of:
                self._tell_prompt(outbox, step.entries[place_of[item.owner]], item)
        ids = [entry.vllm.request_id for entry in step.entries]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        num_sampled = sum(map(len, sampled))
        delivered: dict[str, list[int]] = {}
        for _, outputs in sorted(self._vllm.update_from_output(step.output, result).items()):
            if outputs.scheduler_stats is not None:
                self._statistics.take_step(outputs.scheduler_stats)
            for output in outputs.outputs:
                entry = self._by_id[output.request_id]
                delivered[output.request_id] = output.new_token_ids
                entry.num_output += len(output.new_token_ids)
                if output.new_token_ids and entry.sampling.pooling is not None:
                    vector = vectors[step.rows[step.entries.index(entry)]]
                    outbox.pooled(entry.frontend, Pooled(owner=entry.handle, vector=vector))
                elif output.new_token_ids:
                    outbox.tokens(entry.frontend, entry.handle, output.new_token_ids)
                if output.finish_reason is not None and entry.vllm.resumable:
                    outbox.turn(entry.frontend, self._end_turn(entry, output))
                if entry.vllm.is_finished() and entry.vllm.resumable:
                    outbox.ended(self._forget(entry, "closed"))
                elif entry.vllm.is_finished():
                    pooled = entry.sampling.pooling is not None
                    reason = "stop" if pooled else cast(FinishReason, str(output.finish_reason))
                    why = ("grammar", NOT_ALLOWED) if reason == "error" else ("", "")
                    outbox.ended(self._forget(entry, reason, output.stop_reason, *why))
                elif output.finish_reason is not None:  # the end of a session's turn
                    self._leave_row(entry)
        num_delivered = sum(map(len, delivered.values()))
        self._counters.add("scheduler_generated_tokens", num_delivered)
        self._counters.add("scheduler_dropped_tokens", num_sampled - num_delivered)
        for item in logprobs:
            i = place_of.get(item.owner)
            if not item.prompt_position and i is not None and delivered.get(ids[i]):
                entry = step.entries[i]
                outbox.logprobs(entry.frontend, msgspec.structs.replace(item, owner=entry.handle))
        return outbox.close()

    def _tell_prompt(self, outbox: Outbox, entry: _Entry, found: Logprobs) -> None:
        """Pass log-probabilities of a prompt on, even if it has been preempted meanwhile: its token may be, too."""
        report = entry.prompt_report if self._is_alive(entry) else None
        rest = report.rest_of(found, entry.handle) if report is not None else None
        if rest is not None:
            outbox.logprobs(entry.frontend, rest)

    def _end_turn(self, entry: _Entry, output: EngineCoreOutput) -> TurnEnded:
        """What vLLM leaves of a turn is its output without the last token; the next one may have begun already."""
        kept = entry.num_output - 1
        ended = TurnEnded(
            handle=entry.handle,
            turn=entry.turn,
            reason=cast(TurnReason, str(output.finish_reason)),
            stop_reason=output.stop_reason,
            kept_tokens=kept,
            context_tokens=entry.num_prompt + kept,
        )
        entry.turn += 1
        entry.num_prompt = entry.vllm.num_prompt_tokens
        entry.num_output = 0
        return ended

    def _is_alive(self, entry: _Entry) -> bool:
        return self._by_id.get(entry.vllm.request_id) is entry

    # Single-step mode

    def render(self, step: int, now: float) -> dict[str, Any]:
        output = self._schedule()
        names, self._finished_names = self._finished_names, {}
        self._dispatch(step, now, output)
        return render(output, lambda request_id: names.get(request_id) or self._by_id[request_id].name)

    def update_by_id(self, sampled: dict[str, list[int]]) -> tuple[StepOutputs, dict[str, Any]]:
        step = self._steps[0]
        unknown = [name for name in sampled if name not in {entry.name for entry in step.entries}]
        if unknown:
            raise Refused(f"request {unknown[0]} is not in the schedule that is held")
        drafts = step.output.scheduled_spec_decode_tokens
        for entry, samples in zip(step.entries, step.samples, strict=True):
            tokens = sampled.get(entry.name, [])
            most = 1 + len(drafts.get(entry.vllm.request_id, ())) if samples else 0
            if self._is_alive(entry) and not min(most, 1) <= len(tokens) <= most:
                raise Refused(
                    f"request {entry.name} has {len(tokens)} sampled tokens; in this schedule it must have "
                    + ("none: its prompt is not complete" if most == 0 else f"from 1 to {most}")
                )
            if any(not 0 <= token < self._pool.vocab_size for token in tokens):
                raise Refused(f"request {entry.name} has a token that is not in 0 … {self._pool.vocab_size - 1}")
        names = {(entry.frontend, entry.handle): entry.name for entry in step.entries}
        outputs = self._update([list(sampled.get(entry.name, [])) for entry in step.entries], [], [], {})
        return outputs, by_id(outputs, names)

    def bitmask(self) -> tuple[list[str], list[bytes]] | None:
        grammar = self._vllm.get_grammar_bitmask(self._steps[0].output)
        if grammar is None:
            return None
        names = [self._by_id[request_id].name for request_id in grammar.structured_output_request_ids]
        return names, [row.astype("<i4").tobytes() for row in grammar.grammar_bitmask]

    def set_drafts(self, drafts: dict[str, list[int]]) -> list[str]:
        known = {name: self._by_name[name].vllm for name in drafts if name in self._by_name}
        ids = [request.request_id for request in known.values()]
        self._vllm.update_draft_token_ids(DraftTokenIds(ids, [list(drafts[name]) for name in known]))
        return [name for name, request in known.items() if request.spec_token_ids]

    # Probes

    def load(self) -> LoadFigures:
        vllm = self._vllm
        remaining = [
            min(request.max_tokens - request.num_output_tokens, self._checks.max_len - request.num_tokens)
            for request in vllm.running
        ]
        return LoadFigures(
            running=len(vllm.running),
            waiting=self._num_waiting(),
            pending_prefill_tokens=sum(map(_pending_prefill, vllm.requests.values())),
            min_remaining_output=min(remaining, default=None),
            used_blocks=self._usable_blocks - vllm.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_blocks=self._usable_blocks,
        )

    def token_count(self) -> int:
        return sum(request.num_tokens for request in self._vllm.requests.values())

    def computed_tokens(self, prompt: Ints, cache_salt: str, adapter: str) -> int:
        self._take_events()
        size = self._pool.block_size
        names = split_hashes(block_hashes(prompt, size, cache_salt, adapter=adapter))
        names = names[: max(prompt.nbytes // 4 - 1, 0) // size]
        cached = 0
        while cached < len(names) and names[cached] in self._names:
            cached += 1
        return cached * size

    def unfinished(self) -> int:
        return len(self._vllm.running) + self._num_waiting()

    def request_counts(self) -> tuple[int, int]:
        running, waiting = self._vllm.get_request_counts()
        return running, waiting

    def has_finished(self) -> bool:
        return self._rows.num_leaving > 0 or bool(self._vllm.has_finished_requests())

    def stats(self) -> dict[str, Any] | None:
        stats = self._vllm.make_stats()
        return None if stats is None else self._statistics.report(stats)

    def _num_waiting(self) -> int:
        return self.request_counts()[1] - self._vllm.num_waiting_for_streaming_input

    # Caches

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        try:
            done = self._vllm.reset_prefix_cache(reset_running)
        except RuntimeError:  # sessions that wait for input hold blocks
            done = False
        for entry in self._by_key.values():
            if entry.vllm.status == RequestStatus.PREEMPTED:
                self._leave_row(entry)
        return bool(done)

    def reset_encoder_cache(self) -> bool:
        self._vllm.reset_encoder_cache()
        return True

    def take_kv_changes(self) -> KvChanges:
        self._take_events()
        return self._names.take_changes()

    def kv_snapshot(self) -> bytes:
        return self._names.snapshot()

    def _take_events(self) -> None:
        self._sink.take(self._vllm.kv_cache_manager.take_events())


def _new_row(entry: _Entry, blocks: list[int], num_computed: int) -> NewRow:
    return NewRow(
        row=entry.row,
        request_id=entry.request_id,
        prompt_token_ids=pack_ints(entry.vllm.prompt_token_ids),
        block_ids=pack_ints(blocks),
        sampling=sampling_of(entry.vllm),
        num_computed_tokens=num_computed,
        adapter=entry.adapter,
    )


def _resume_row(entry: _Entry, blocks: list[int], num_computed: int) -> ResumeRow:
    return ResumeRow(
        row=entry.row,
        request_id=entry.request_id,
        token_ids=pack_ints(entry.vllm._all_token_ids),
        num_output_tokens=entry.vllm.num_output_tokens,
        block_ids=pack_ints(blocks),
        sampling=sampling_for_row(sampling_of(entry.vllm), entry.prompt_report),
        num_computed_tokens=num_computed,
        adapter=entry.adapter,
    )


def _pending_prefill(request: Request) -> int:
    """Tokens of a request that are to be prefilled yet: none while it decodes, or waits for a session's input."""
    if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        return 0
    if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
        return 0
    return int(request.num_tokens - request.num_computed_tokens)
