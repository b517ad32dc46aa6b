"""A rank's state machine: commands and step results in, schedules and outputs out.

It connects the frontends (command bus), one scheduler and the executor (step bus). Nothing is scheduled before the
executor has said what KV pool there is; when it is lost, all requests end with an error and the pool is void.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from bus.config import Config
from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.counters import Counters
from bus.log import get_logger
from bus.messages import (
    MINOR_OF_SEVERAL,
    AbortRequests,
    Adapters,
    AdaptersHeld,
    AddRequest,
    AddRequests,
    AppendInput,
    Command,
    CommandRequest,
    Drain,
    Error,
    FinishRequests,
    GetPauseState,
    KvEvents,
    KvPool,
    Message,
    Outputs,
    PauseState,
    Recall,
    Recalled,
    Reply,
    RequestEnded,
    Resume,
    Schedule,
    SetPause,
    Shutdown,
    StepResult,
    StopTurn,
    UpdateFromOutput,
)
from ranks.commands import HELD, SIMPLE, SINGLE_STEP
from ranks.compiling import Compile, Compiled
from ranks.output import joined
from ranks.publishing import LoadReports
from ranks.scheduler import BrokenResult, Ended, Refused, Scheduler, StepOutputs
from ranks.standing import Standing

log = get_logger()

MAX_HANDLE = 2**31 - 1
"""Handles travel back as int32."""

KV_INTERVAL_S = 0.01
"""How long names of blocks that came or went may wait for others while there are steps, to go in one message.

A prompt that begins as one just computed is soon sent where that was.
"""
STEADY_KV_INTERVAL_S = 0.05
"""The same for names of what is decoded: of a prompt that goes on from there, all but the last have been told."""

_PAUSE_STATE: dict[str, PauseState] = {"keep": "paused_all", "wait": "paused_new", "abort": "paused_new"}


@dataclass(slots=True)
class _Frontend:
    """A frontend that is up. `acknowledged` is the last number it gave its work for this rank."""

    peer: Peer
    acknowledged: int = 0


@dataclass(slots=True)
class _Deferred:
    """A command that is answered later: when `value` gives something, or with an error at `deadline`."""

    peer: Peer
    command_id: int
    deadline: float
    value: Callable[[], Any]


class RankCore:
    """One rank. `build` makes a scheduler for a KV pool."""

    def __init__(self, index: int, config: Config, build: Callable[[KvPool], Scheduler], counters: Counters) -> None:
        self._name = f"rank {index}"
        self._config = config
        self._build = build
        self._counters = counters
        self._now = 0.0
        self._frontends: dict[int, _Frontend] = {}
        self._executor: Peer | None = None
        self._pool: KvPool | None = None
        self._scheduler: Scheduler | None = None
        self._num_schedulers = 0
        self._next_step = 0
        self._in_flight: deque[int] = deque()
        """Steps without result that were scheduled, or that stand."""
        self._standing = Standing()
        self._may_stand = False
        """Whether the executor takes steps that stand."""
        self._may_schedule = False
        """Something has happened since the scheduler last had nothing to run."""
        self._pause_state: PauseState = "unpaused"
        self._pause_waits_for_running = False
        self._draining = False
        self._deferred: list[_Deferred] = []
        self._adapters = Adapters(number=0)
        """What requests may have, as the executor said last."""
        self._adapters_held: list[str] = []
        """Others that unfinished requests have, as the executor was told last."""
        self._loads = LoadReports(counters)
        self._kv_number = 0
        self._kv_told = float("-inf")
        self._effects: list[Effect] = []
        self._held: StepOutputs = []
        """Of steps of steady decode: they wait for the next schedule, since the executor is idle until it has that, and
        for results that are here already, to go with theirs."""
        self._on_message: dict[type[Message], Callable[[Peer, Any], None]] = {
            AddRequest: self._add,
            AddRequests: self._add_several,
            AppendInput: self._append,
            StopTurn: self._stop_turn,
            AbortRequests: self._abort,
            CommandRequest: self._command,
            Adapters: self._new_adapters,
            KvPool: self._new_pool,
            StepResult: self._step_result,
            Recalled: self._recalled,
            Error: self._error,
        }
        self._on_command: dict[type[Command], Callable[[Peer, int, Any, float], None]] = {
            FinishRequests: self._finish_requests,
            SetPause: self._set_pause,
            Resume: self._resume,
            GetPauseState: self._get_pause_state,
            Drain: self._drain,
            Shutdown: self._shutdown,
            Schedule: self._single_step_schedule,
            UpdateFromOutput: self._single_step_update,
        }

    def handle(self, event: Event) -> list[Effect]:
        """Take an event; see `bus.core.Core`."""
        if self._standing.must_end_before(event):
            self._standing.events.append(event)
            self._recall()
        else:
            self._take(event)
        while self._standing.events and self._standing.last_step is None:
            self._take(self._standing.events.popleft())
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: Event) -> None:
        if self._held and not _is_of_steps(event):
            self._release()
        match event:
            case Received(peer, message):
                self._on_message[type(message)](peer, message)
            case Drained(now):
                self._now = now
                self._drained()
            case Posted(Compiled() as done):
                self._compiled(done)
            case Tick(now, _, bus_counters):
                self._now = now
                self._expire()
                self._loads.refresh(now, bus_counters)
            case PeerUp(peer, minor):
                self._peer_up(peer, minor)
            case PeerDown(peer, reason):
                self._peer_down(peer, reason)

    def _send(self, peer: Peer, message: Message) -> None:
        self._effects.append(Send(peer, message))

    # Peers

    def _peer_up(self, peer: Peer, minor: int) -> None:
        if peer.role == "executor":
            self._executor = peer
            self._may_stand = minor >= MINOR_OF_SEVERAL and self._config.standing_steps > 0
            return
        self._tell_kv()  # the others are told of what the snapshot has on top
        self._frontends[peer.index] = _Frontend(peer)
        self._send(peer, self._kv_snapshot())

    def _peer_down(self, peer: Peer, reason: str) -> None:
        if peer.role == "executor":
            self._executor = self._pool = None
            self._adapters, self._adapters_held = Adapters(number=0), []
            self._end_all(f"the executor was lost ({reason}) while the request ran on {self._name}; send it again")
            return
        del self._frontends[peer.index]
        self._loads.forget(peer.index)
        self._deferred = [deferred for deferred in self._deferred if deferred.peer != peer]
        if self._scheduler is not None:
            lost = self._scheduler.finish(peer.index, None, "abort")
            self._counters.add("rank_orphaned_requests", len(lost))
            self._woken()

    def _error(self, peer: Peer, error: Error) -> None:
        self._counters.add(f"rank_errors_received/{peer.role}")
        log.warning("a peer reports an error", peer=str(peer), code=error.code, detail=error.message)
        if error.code == "schedule_refused" and peer.role == "executor":
            if error.step in self._in_flight:
                self._begin_anew(f"{error.message}; send the request again")
            else:
                self._counters.add("rank_stale_results")

    # Adapters

    def _new_adapters(self, _peer: Peer, adapters: Adapters) -> None:
        self._adapters = adapters
        self._tell_adapters()

    def _tell_adapters(self) -> None:
        self._adapters_held = self._held_adapters()
        if self._executor is not None:
            held = AdaptersHeld(number=self._adapters.number, identities=self._adapters_held)
            self._send(self._executor, held)

    def _held_adapters(self) -> list[str]:
        """Those that unfinished requests have, and new ones may not."""
        if self._scheduler is None:
            return []
        return [held for held in self._scheduler.adapters() if held not in self._adapters.identities]

    # The KV pool and steps

    def _new_pool(self, peer: Peer, pool: KvPool) -> None:
        self._end_all(f"the executor began anew while the request ran on {self._name}; send it again")
        if min(pool.num_blocks, pool.block_size, pool.max_model_len, pool.vocab_size) < 1:
            log.error("the executor's KV pool cannot be used", pool=msgspec.structs.asdict(pool))
            return
        self._use_pool(pool)
        log.info(
            "kv pool received",
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_model_len=pool.max_model_len,
        )

    def _use_pool(self, pool: KvPool) -> None:
        self._pool = pool
        self._scheduler = self._build(pool)
        self._num_schedulers += 1
        self._scheduler.set_pause(self._pause_state)
        self._woken()

    def _end_all(self, message: str) -> None:
        """All requests end with an error and the scheduler goes, with its KV blocks and prefix cache."""
        if self._scheduler is None:
            return
        ended = self._scheduler.finish_ids(None, "error", "unavailable", message)
        if ended:
            log.warning("unfinished requests end", count=len(ended), detail=message)
        self._tell(ended)
        self._scheduler = None
        self._in_flight.clear()
        self._standing.end()
        self._broadcast_kv_snapshot()
        self._loads.changed = True

    def _drained(self) -> None:
        if self._scheduler is not None and self._executor is not None and not self._config.single_step:
            self._make_steps(self._scheduler, self._executor)
        self._release()
        self._tell_turns()
        self._settle()
        if self._adapters_held and self._held_adapters() != self._adapters_held:
            self._tell_adapters()
        self._publish_kv()
        self._publish_load()

    def _make_steps(self, scheduler: Scheduler, executor: Peer) -> None:
        stands = self._standing.last_step is not None
        most = self._config.standing_steps // 2 if stands else self._config.async_depth
        while self._may_schedule and len(self._in_flight) < most:
            if self._let_stand(scheduler, executor) or stands:
                return
            schedule = scheduler.schedule(self._next_step, self._now)
            if schedule is None:
                self._may_schedule = False
                return
            self._begin_step()
            self._send(executor, schedule)

    def _let_stand(self, scheduler: Scheduler, executor: Peer) -> bool:
        """Say steps ahead, if it is known what they will be; whether some were said."""
        last_result = (self._in_flight[0] if self._in_flight else self._next_step) - 1
        if not (self._may_stand and self._standing.may_grow(last_result)):
            return False
        room = self._config.standing_steps - len(self._in_flight)
        ahead = scheduler.stand(self._next_step, last_result, room)
        if ahead is None:
            return False
        self._in_flight += range(self._next_step, self._next_step + ahead.num_steps)
        self._next_step += ahead.num_steps
        self._standing.begin(ahead)
        self._send(executor, ahead)
        return True

    def _recall(self) -> None:
        """Have what stands taken back; `_stand_down` comes when it is known how far the executor went."""
        standing = self._standing
        if standing.last_step is not None and not standing.is_recalled and self._executor is not None:
            standing.is_recalled = True
            standing.num_recalls += 1
            self._counters.add("rank_recalls")
            self._send(self._executor, Recall(number=standing.num_recalls))

    def _recalled(self, _peer: Peer, recalled: Recalled) -> None:
        if self._standing.is_recalled and recalled.number == self._standing.num_recalls:
            self._stand_down(recalled.next_step)

    def _stand_down(self, next_step: int) -> None:
        """Nothing stands any more: the executor takes no step from `next_step` on without another schedule."""
        if self._standing.last_step is None or self._scheduler is None:
            return
        self._scheduler.stand_down(next_step)
        while self._in_flight and self._in_flight[-1] >= next_step:
            self._in_flight.pop()
        self._next_step = next_step
        self._standing.end()
        self._may_schedule = True

    def _begin_step(self) -> None:
        self._in_flight.append(self._next_step)
        self._next_step += 1

    def _step_result(self, peer: Peer, result: StepResult) -> None:
        if self._scheduler is None or self._config.single_step or result.step not in self._in_flight:
            self._counters.add("rank_stale_results")
            return
        next_step = self._standing.next_step(result, self._config.async_depth)
        if next_step is not None:
            self._stand_down(next_step)
        try:
            if result.step != self._in_flight[0]:
                raise BrokenResult(f"step {self._in_flight[0]} comes before it")
            outputs = self._scheduler.update(result)
        except BrokenResult as broken:
            self._counters.add("rank_broken_results")
            self._begin_anew(f"the executor's result of step {result.step} did not fit ({broken}); send it again")
            return
        self._in_flight.popleft()
        self._may_schedule = True
        if self._scheduler.is_steady():
            self._held += outputs
            return
        self._release()
        self._tell_outputs(outputs)
        self._tell_turns()
        self._loads.changed = True

    def _release(self) -> None:
        self._tell_outputs(joined(self._held))
        self._held = []

    def _begin_anew(self, message: str) -> None:
        """What the executor holds for this rank is no longer what the scheduler thinks: all requests end."""
        log.error("the rank begins anew", detail=message)
        pool = self._pool
        assert pool is not None  # there were steps in flight
        self._end_all(message)
        self._use_pool(pool)

    def _woken(self) -> None:
        self._may_schedule = True
        self._loads.changed = True

    # Requests

    def _add_several(self, peer: Peer, several: AddRequests) -> None:
        for request in several.requests:
            self._add(peer, request)

    def _add(self, peer: Peer, request: AddRequest) -> None:
        self._frontends[peer.index].acknowledged = request.sequence
        self._loads.changed = True
        scheduler = self._scheduler
        if not 0 <= request.handle <= MAX_HANDLE:
            message = f"handle {request.handle} is not allowed; it must be from 0 to {MAX_HANDLE}"
            self._send(peer, Error(code="invalid", message=message, request_id=request.request_id))
        elif scheduler is not None and scheduler.has(peer.index, request.handle):
            message = f"handle {request.handle} is in use; handles of unfinished requests must differ"
            self._send(peer, Error(code="handle_in_use", message=message, request_id=request.request_id))
        elif scheduler is None:
            self._refuse(peer, request.handle, "unavailable", f"{self._name} has no executor to run requests on")
        elif request.adapter and request.adapter not in self._adapters.identities:
            self._refuse(peer, request.handle, "unavailable", f"{self._name} has not the adapter, or has it no more")
        elif self._draining:
            self._refuse(peer, request.handle, "unavailable", f"{self._name} is draining; it takes no new requests")
        else:
            try:
                scheduler.add(peer.index, request, self._now)
            except Refused as refused:
                self._refuse(peer, request.handle, "invalid", str(refused))
            else:
                self._ask_for_grammars(scheduler)
                self._woken()
                if not scheduler.may_stand():
                    self._recall()

    def _ask_for_grammars(self, scheduler: Scheduler) -> None:
        self._effects += [Compile(self._num_schedulers, *asked) for asked in scheduler.take_grammars()]

    def _compiled(self, done: Compiled) -> None:
        if self._scheduler is None or done.scheduler != self._num_schedulers:
            self._counters.add("rank_stale_grammars")
            return
        self._tell(self._scheduler.compiled(done.ticket, done.matcher, done.grammar_error))
        self._tell_turns()
        self._woken()

    def _refuse(self, peer: Peer, handle: int, code: str, message: str) -> None:
        self._counters.add(f"rank_refused_requests/{code}")
        ended = RequestEnded(handle=handle, reason="error", code=code, message=message)
        self._send(peer, Outputs(ended=[ended]))

    def _append(self, peer: Peer, turn: AppendInput) -> None:
        self._change_session(peer, turn, lambda scheduler: self._tell(scheduler.append(peer.index, turn, self._now)))

    def _stop_turn(self, peer: Peer, stop: StopTurn) -> None:
        self._change_session(peer, stop, lambda scheduler: scheduler.stop_turn(peer.index, stop))

    def _change_session(self, peer: Peer, message: AppendInput | StopTurn, change: Callable[[Scheduler], None]) -> None:
        self._frontends[peer.index].acknowledged = message.sequence
        self._woken()
        if self._scheduler is None:
            sentence = f"{self._name} has no executor to run requests on"
            self._refuse_turn(peer, message.handle, message.sequence, "unavailable", sentence)
            return
        try:
            change(self._scheduler)
        except Refused as refused:
            self._refuse_turn(peer, message.handle, message.sequence, "invalid", str(refused))
        self._ask_for_grammars(self._scheduler)
        self._tell_turns()

    def _refuse_turn(self, peer: Peer, handle: int, sequence: int, code: str, sentence: str) -> None:
        self._counters.add("rank_refused_turns")
        self._send(peer, Error(code=code, message=sentence, handle=handle, sequence=sequence))

    def _abort(self, peer: Peer, abort: AbortRequests) -> None:
        if self._scheduler is not None:
            self._tell(self._scheduler.finish(peer.index, abort.handles, "abort"))
            self._woken()

    def _tell(self, ended: list[Ended]) -> None:
        """Tell frontends of requests that ended outside of a step, each in one message."""
        by_frontend: dict[int, list[RequestEnded]] = {}
        for item in ended:
            by_frontend.setdefault(item.frontend, []).append(item.ended)
        for frontend, items in by_frontend.items():
            self._send(self._frontends[frontend].peer, Outputs(ended=items))

    def _tell_turns(self) -> None:
        """Tell frontends of turns that ended outside of a step, and of inputs that turned out to have no room."""
        if self._scheduler is None:
            return
        outputs, refused = self._scheduler.take_turns()
        self._tell_outputs(outputs)
        for turn in refused:
            peer = self._frontends[turn.frontend].peer
            self._refuse_turn(peer, turn.handle, turn.sequence, "invalid", turn.sentence)

    def _tell_outputs(self, outputs: StepOutputs) -> None:
        for frontend, message in outputs:
            self._send(self._frontends[frontend].peer, message)

    # Commands

    def _command(self, peer: Peer, request: CommandRequest) -> None:
        body = request.body
        command_id = request.command_id
        special = self._on_command.get(type(body))
        if special is not None:
            seconds = self._config.command_deadline_s if request.deadline_s is None else request.deadline_s
            special(peer, command_id, body, self._now + seconds)
            return
        code, message = self._why_not(type(body))
        if code:
            self._fail(peer, command_id, code, message)
            return
        assert self._scheduler is not None  # or there would be a code
        try:
            value = SIMPLE[type(body)](self._scheduler, body)
        except Refused as refused:
            self._fail(peer, command_id, "invalid", str(refused))
            return
        self._reply(peer, command_id, value)
        self._woken()  # there may be room now: caches may have been reset

    def _why_not(self, command: type[Command]) -> tuple[str, str]:
        """Code and sentence of what a command lacks, empty if nothing."""
        if command not in SIMPLE and command not in self._on_command:
            return "not_for_ranks", f"{command.__name__} is not for ranks"
        if command in SINGLE_STEP and not self._config.single_step:
            return "not_single_step", f"{command.__name__} is for single-step mode; set single_step = true"
        if self._scheduler is None:
            return "unavailable", f"{self._name} has no KV pool yet; the executor gives it one"
        if command in HELD and not self._in_flight:
            return "not_held", "no schedule is held; Schedule must come first"
        if command is Schedule and self._in_flight:
            return "held", "a schedule is held; UpdateFromOutput must come first"
        return "", ""

    def _reply(self, peer: Peer, command_id: int, value: Any) -> None:
        self._send(peer, Reply(command_id=command_id, value=value))

    def _fail(self, peer: Peer, command_id: int, code: str, message: str) -> None:
        self._send(peer, Error(code=code, message=message, command_id=command_id))

    def _finish_requests(self, peer: Peer, command_id: int, body: FinishRequests, _deadline: float) -> None:
        ended = [] if self._scheduler is None else self._scheduler.finish_ids(body.request_ids, "abort")
        self._tell(ended)
        self._reply(peer, command_id, [item.request_id for item in ended])
        self._woken()

    def _set_pause(self, peer: Peer, command_id: int, body: SetPause, deadline: float) -> None:
        if body.mode == "abort" and self._scheduler is not None:
            message = f"{self._name} was paused, and all requests with it"
            self._tell(self._scheduler.finish_ids(None, "abort", "", message))
        self._change_pause(_PAUSE_STATE[body.mode])
        self._pause_waits_for_running = body.mode == "wait"
        self._deferred.append(_Deferred(peer, command_id, deadline, self._reached_pause))

    def _reached_pause(self) -> PauseState | None:
        """The pause state once it holds: nothing runs that must not; None before that."""
        if self._pause_state != "unpaused":
            if self._in_flight:
                return None
            if self._pause_waits_for_running and self._scheduler is not None and self._scheduler.load().running:
                return None
        return self._pause_state

    def _resume(self, peer: Peer, command_id: int, _body: Resume, _deadline: float) -> None:
        self._draining = False
        self._change_pause("unpaused")
        self._reply(peer, command_id, self._pause_state)

    def _change_pause(self, state: PauseState) -> None:
        self._pause_state = state
        if self._scheduler is not None:
            self._scheduler.set_pause(state)
        self._woken()

    def _get_pause_state(self, peer: Peer, command_id: int, _body: GetPauseState, _deadline: float) -> None:
        self._reply(peer, command_id, self._pause_state)

    def _drain(self, peer: Peer, command_id: int, _body: Drain, deadline: float) -> None:
        self._draining = True
        self._loads.changed = True
        self._deferred.append(_Deferred(peer, command_id, deadline, self._is_drained))

    def _is_drained(self) -> bool | None:
        """True when the last request has ended, False when a Resume came in between, None while there are some."""
        if not self._draining:
            return False
        if self._scheduler is not None and self._scheduler.unfinished():
            return None
        return True

    def _shutdown(self, peer: Peer, command_id: int, _body: Shutdown, _deadline: float) -> None:
        self._reply(peer, command_id, True)
        self._effects.append(Stop("a frontend asked it to shut down"))

    def _settle(self) -> None:
        """Answer the commands that can be answered now."""
        waiting = []
        for deferred in self._deferred:
            value = deferred.value()
            if value is None:
                waiting.append(deferred)
            else:
                self._reply(deferred.peer, deferred.command_id, value)
        self._deferred = waiting

    def _expire(self) -> None:
        waiting = []
        for deferred in self._deferred:
            if deferred.deadline > self._now:
                waiting.append(deferred)
            else:
                self._fail(deferred.peer, deferred.command_id, "deadline", f"{self._name} did not get there in time")
        self._deferred = waiting

    # Single-step mode

    def _single_step_schedule(self, peer: Peer, command_id: int, _body: Schedule, _deadline: float) -> None:
        code, message = self._why_not(Schedule)
        if self._scheduler is None or code:
            self._fail(peer, command_id, code, message)
            return
        value = self._scheduler.render(self._next_step, self._now)
        self._begin_step()
        self._tell_turns()
        self._woken()
        self._reply(peer, command_id, value)

    def _single_step_update(self, peer: Peer, command_id: int, body: UpdateFromOutput, _deadline: float) -> None:
        code, message = self._why_not(UpdateFromOutput)
        if self._scheduler is None or code:
            self._fail(peer, command_id, code, message)
            return
        try:
            outputs, emitted = self._scheduler.update_by_id(body.sampled_token_ids)
        except Refused as refused:
            self._fail(peer, command_id, "invalid", str(refused))
            return
        self._in_flight.popleft()
        self._tell_outputs(outputs)
        self._tell_turns()
        self._woken()
        self._reply(peer, command_id, emitted)

    # What frontends are told without asking

    def _publish_load(self) -> None:
        self._counters.set("rank_steps_in_flight", min(len(self._in_flight), self._config.async_depth))
        due, later = self._loads.due(self._frontends, self._now)
        if later is not None:
            self._effects.append(WakeAt(later))
        if not due:
            return
        figures = self._scheduler.load() if self._scheduler is not None else None
        for index in due:
            frontend = self._frontends[index]
            load = self._loads.make(index, figures, frontend.acknowledged, self._pause_state, self._draining)
            if load is not None:
                self._send(frontend.peer, load)

    def _publish_kv(self) -> None:
        steady = self._scheduler is not None and self._scheduler.is_steady()
        interval = STEADY_KV_INTERVAL_S if steady else KV_INTERVAL_S
        if self._now - self._kv_told >= interval or not self._in_flight:  # with a step's result comes another chance
            self._tell_kv()

    def _tell_kv(self) -> None:
        if self._scheduler is None:
            return
        self._kv_told = self._now
        changes = self._scheduler.take_kv_changes()
        if changes.cleared:
            self._broadcast_kv_snapshot()
        elif changes.stored or changes.removed:
            self._kv_number += 1
            events = KvEvents(
                number=self._kv_number, stored=memoryview(changes.stored), removed=memoryview(changes.removed)
            )
            for frontend in self._frontends.values():
                self._send(frontend.peer, events)

    def _broadcast_kv_snapshot(self) -> None:
        self._kv_number += 1
        snapshot = self._kv_snapshot()
        for frontend in self._frontends.values():
            self._send(frontend.peer, snapshot)

    def _kv_snapshot(self) -> KvEvents:
        stored = b"" if self._scheduler is None else self._scheduler.kv_snapshot()
        return KvEvents(number=self._kv_number, snapshot=True, stored=memoryview(stored))


def _is_of_steps(event: Event) -> bool:
    return isinstance(event, Drained) or (isinstance(event, Received) and isinstance(event.message, StepResult))
