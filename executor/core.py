"""The executor's core: when a step runs and with whom, and what each rank is told. The model runs behind `RunStep`."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from bus.config import Config
from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.counters import Counters
from bus.log import get_logger
from bus.messages import (
    Adapter,
    AdapterRead,
    AdaptersHeld,
    CommandRequest,
    Error,
    ExecutorStatus,
    Failed,
    KvPool,
    LoadAdapter,
    Message,
    PartialSchedule,
    PlaceAdapter,
    ReadAdapter,
    Ready,
    Recall,
    Recalled,
    Reply,
    Shutdown,
    StandingSchedule,
    UnloadAdapter,
)
from executor.adapters import Adapters
from executor.checks import Limits, Refused
from executor.group import Group
from executor.merge import Merger
from executor.rows import Rows
from executor.split import split
from executor.standing import Standing
from executor.step import MergedStep, Part, SampledStep

log = get_logger()

STATUS_INTERVAL_S = 1.0
GATHERING_S = 0.002
"""How long results of steps that stand may wait for others, where the device takes less than half of that for a step.

To be woken costs a rank more than what a result says. Where steps take longer, each result goes at once.
"""
FEW_STANDING = 4
"""A rank that has no more steps standing than this hears of each at once, so that it says more in time."""


class RunStep(msgspec.Struct, frozen=True):
    """Effect: give a step to the device. Steps are numbered from 1 and run in the order in which they are given.

    `parts` are the schedules it was merged from, as (rank, the rank's own number of the step). `waited_for` are the
    ranks whose schedules were waited for after the first of the parts was there.
    """

    number: int
    step: MergedStep
    parts: list[tuple[int, int]] = []
    waited_for: list[int] = []


class StepDone(msgspec.Struct, frozen=True):
    """Posted: the device has finished a step, at `done_at`, which kept it busy for `device_s`.

    The step was given to the device from `dispatch_at` on for `dispatch_s`. Times are monotonic, in seconds.
    """

    number: int
    sampled: SampledStep
    device_s: float
    dispatch_at: float = 0.0
    dispatch_s: float = 0.0
    done_at: float = 0.0


class DeviceFailed(msgspec.Struct, frozen=True):
    """Posted: the device cannot go on."""

    reason: str


@dataclass(slots=True, eq=False)
class _Rank:
    """One start of a rank that is up.

    `awaited` says that its next schedule is expected: its last one said more, it has all results, and nothing is
    pending. `awaited_since` is the time of that, infinite until the clock is next read, and `work_left` the newest
    step the device had then: a rank is on time if it answers before the device is through with that, or within the
    window.
    """

    peer: Peer
    pending: deque[PartialSchedule] = field(default_factory=deque)
    standing: Standing = field(default_factory=Standing)
    in_flight: int = 0
    last_step: int = -1
    more: bool = False
    awaited: bool = False
    awaited_since: float = math.inf
    work_left: int = 0
    answered: bool = False
    late: bool = False
    adapters_held: AdaptersHeld | None = None
    """What it said of adapters after it had sent what is pending."""


class _InFlight(NamedTuple):
    """A step the device has not finished. `owners` [parts] took part in it; they may be gone by now."""

    number: int
    owners: list[_Rank]
    parts: list[Part]


def _not_larger(last_step: int) -> str:
    return f"its number must be larger than that of the last, {last_step}"


class ExecutorCore:
    """Holds the ranks' schedules, decides when they become a step, and gives each rank what the step drew for it.

    A step runs when the device has room and no rank is worth waiting for. While the device is busy, waiting costs
    nothing; when it is idle, it waits until `batching_window_ms` after the last result went out. Only ranks that said
    more is coming are waited for, and none that was missed, until it is on time again.
    """

    def __init__(
        self, config: Config, model: str, limits: Limits, programs: str = "", adapters: Sequence[Adapter] = ()
    ) -> None:
        """`model` is the name that is served; `programs` see `group.Group`. `adapters` are in the slots from 1 on."""
        self._model = model
        self._group = Group(config.executors - 1, programs)
        self._limits = limits
        self._block_size = config.block_size
        self._depth = config.async_depth
        self._window_s = config.batching_window_ms / 1000
        self._counters = Counters()
        self._bus_counters: dict[str, float] = {}
        rows = Rows(config.ranks, limits.max_num_seqs, limits.max_model_len, config.block_size)
        self._now = 0.0
        self._adapters = Adapters(
            config.max_loras, model, config.executors, config.command_deadline_s, adapters, self._tell_frontends
        )
        self._merger = Merger(rows, limits, self._adapters.slots)
        self._ranks: list[_Rank | None] = [None] * config.ranks
        self._frontends: dict[int, Peer] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._last_number = 0
        self._could_run_since: float | None = None
        self._waited_for: dict[int, None] = {}
        self._next_status = float("-inf")
        self._gathered: list[Effect] = []
        """Results that wait for others."""
        self._gathered_since = 0.0

    def handle(self, event: Event) -> Iterable[Effect]:
        """See `bus.core.Core`."""
        match event:
            case Drained(now):
                self._now = now
                return [*self._schedule(now), *self._tell_gathered(now)]
            case Posted(StepDone() as done):
                return self._finish_step(done)
            case Received(_, StandingSchedule()):
                return self._take(event)
        return [*self._take_gathered(), *self._take(event)]

    def _take(self, event: Event) -> Iterable[Effect]:
        match event:
            case Received(peer, message):
                return self._receive(peer, message)
            case Tick(now, _, bus_counters):
                self._now, self._bus_counters = now, bus_counters
                oldest = self._in_flight[0].number if self._in_flight else None
                told = [*self._report(now), *self._adapters.expire(now)]
                return [*self._schedule(now), *told, *self._group.check(now, oldest)]
            case PeerUp(peer):
                return self._welcome(peer)
            case PeerDown(peer, reason):
                return self._forget(peer, reason)
            case Posted(AdapterRead() as read):
                return self._tell_group(self._adapters.read(0, read, self._now))
            case Posted(DeviceFailed(reason)):
                return [Stop(f"the device failed: {reason}")]
        raise TypeError(f"not an event of the executor: {event!r}")

    # Who is there

    def _welcome(self, peer: Peer) -> list[Effect]:
        if peer.role == "frontend":
            self._frontends[peer.index] = peer
            return [Send(peer, self._status())]
        if peer.role == "executor":
            return self._group.welcome(peer)
        self._ranks[peer.index] = _Rank(peer)
        pool = self._give_pool(peer) if self._group.is_complete else []
        return [*self._adapters.rank_up(peer), *pool]

    def _give_pool(self, peer: Peer) -> list[Effect]:
        """Tell a rank what it may use, and so that it may begin."""
        pool = KvPool(
            num_blocks=self._limits.blocks_of_rank[peer.index],
            block_size=self._block_size,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._limits.vocab_size,
        )
        return [Send(peer, pool)]

    def _forget(self, peer: Peer, reason: str) -> list[Effect]:
        if peer.role == "frontend":
            if self._frontends.get(peer.index) == peer:
                del self._frontends[peer.index]
            return []
        if peer.role == "executor":
            return self._group.lose(peer, reason)
        rank = self._rank_of(peer)
        if rank is not None:
            self._counters.add("executor_dropped_schedules", len(rank.pending))
            self._merger.void(peer.index)
            self._ranks[peer.index] = None
            return self._tell_group(self._adapters.rank_down(peer.index, self._now))
        return []

    def _receive(self, peer: Peer, message: Message) -> list[Effect]:
        match message:
            case PartialSchedule():
                return self._hold(peer, message)
            case StandingSchedule():
                return self._hold_standing(peer, message)
            case Recall():
                return self._recall(peer, message)
            case Ready() | Failed():
                return self._hear(peer, message)
            case AdaptersHeld():
                return self._hear_of_adapters(peer, message)
            case AdapterRead():
                return self._tell_group(self._adapters.read(peer.index, message, self._now))
            case CommandRequest(command_id=command_id, body=LoadAdapter()) if not self._group.is_complete:
                sentence = "the executor's other processes are not ready; try again soon"
                return [Send(peer, Error(code="unavailable", message=sentence, command_id=command_id))]
            case CommandRequest(body=LoadAdapter() | UnloadAdapter()):
                return self._tell_group(self._adapters.ask(peer, message, self._now))
            case CommandRequest(command_id=command_id, body=Shutdown()):
                reply = Send(peer, Reply(command_id=command_id, value=True))
                return [reply, *self._group.end("it was told to shut down")]
            case CommandRequest(command_id=command_id, body=body):
                taken = "the executor takes LoadAdapter, UnloadAdapter and Shutdown only"
                sentence = f"{type(body).__name__} is a command for ranks; {taken}"
                return [Send(peer, Error(code="not_for_executor", message=sentence, command_id=command_id))]
            case Error():
                log.warning("a peer refused a message", peer=str(peer), code=message.code, detail=message.message)
                return []
        sentence = f"{type(message).__name__} is not for the executor; ranks take it"
        return [Send(peer, Error(code="not_for_executor", message=sentence))]

    def _hear(self, peer: Peer, message: Ready | Failed) -> list[Effect]:
        was_complete = self._group.is_complete
        effects = self._group.receive(peer, message)
        if self._group.is_complete and not was_complete:
            for rank in self._ranks:
                effects += self._give_pool(rank.peer) if rank else []
        return effects

    # Adapters

    def _hear_of_adapters(self, peer: Peer, message: AdaptersHeld) -> list[Effect]:
        """What a rank says of adapters counts when all that it sent before is in steps."""
        rank = self._rank_of(peer)
        if rank is None:
            return []
        rank.adapters_held = message
        return self._take_adapters_held([rank])

    def _take_adapters_held(self, ranks: list[_Rank]) -> list[Effect]:
        effects: list[Effect] = []
        for rank in ranks:
            if rank.adapters_held is not None and not rank.pending:
                message, rank.adapters_held = rank.adapters_held, None
                effects += self._adapters.held(rank.peer, message, self._now)
        return self._tell_group(effects)

    def _tell_group(self, effects: list[Effect]) -> list[Effect]:
        """`effects`, and that the executor's other processes do the same with adapters."""
        told = []
        for effect in effects:
            told.append(effect)
            if isinstance(effect, ReadAdapter | PlaceAdapter):
                told += self._group.tell_all(effect)
        return told

    def _tell_frontends(self) -> list[Effect]:
        status = self._status()
        return [Send(peer, status) for peer in self._frontends.values()]

    # When a step runs

    def _hold(self, peer: Peer, schedule: PartialSchedule) -> list[Effect]:
        rank = self._rank_of(peer)
        if rank is None:
            return []
        if rank.standing:
            return self._refuse(rank, [schedule.step], "steps stand; they must be recalled before it")
        if schedule.step <= rank.last_step:
            return self._refuse(rank, [schedule.step], _not_larger(rank.last_step))
        if len(rank.pending) + rank.in_flight >= self._depth:
            rank.last_step = schedule.step
            refused = [*(held.step for held in rank.pending), schedule.step]
            return self._refuse(rank, refused, f"a rank may have {self._depth} without result")
        rank.standing.clear()
        self._append(rank, schedule)
        return []

    def _hold_standing(self, peer: Peer, schedule: StandingSchedule) -> list[Effect]:
        rank = self._rank_of(peer)
        if rank is None:
            return []
        last = rank.standing.last_step if rank.standing else rank.last_step
        fault = rank.standing.fault_of(schedule) if schedule.first_step > last else _not_larger(last)
        if fault:
            return self._refuse(rank, [schedule.first_step], fault)
        rank.standing.add(schedule)
        self._take_standing(rank)
        return []

    def _recall(self, peer: Peer, recall: Recall) -> list[Effect]:
        rank = self._rank_of(peer)
        if rank is None:
            return []
        rank.standing.clear()
        return [Send(peer, Recalled(number=recall.number, next_step=rank.last_step + 1))]

    def _take_standing(self, rank: _Rank) -> None:
        """Count steps that stand as sent, as far as a rank may have steps without result."""
        while rank.standing and len(rank.pending) + rank.in_flight < self._depth:
            self._append(rank, rank.standing.take())

    def _append(self, rank: _Rank, schedule: PartialSchedule) -> None:
        rank.last_step = schedule.step
        rank.pending.append(schedule)
        rank.more = schedule.more
        rank.answered = rank.awaited or rank.answered
        rank.awaited = False

    def _rank_of(self, peer: Peer) -> _Rank | None:
        """The rank that `peer` is a start of, if it is the present one."""
        rank = self._ranks[peer.index]
        return rank if rank is not None and rank.peer == peer else None

    def _schedule(self, now: float) -> list[Effect]:
        """Run what should run now; ask to be woken when time alone would change the answer."""
        effects: list[Effect] = []
        if not self._group.is_complete:
            return effects
        self._read_clock(now)
        while len(self._in_flight) < self._depth and not self._tries_drafts():
            present = [rank for rank in self._ranks if rank and rank.pending]
            if not present:
                self._could_run_since = None
                self._waited_for.clear()
                break
            if self._could_run_since is None:
                self._could_run_since = now
            awaited = [rank for rank in self._ranks if rank and rank.awaited and not rank.late]
            until = max((rank.awaited_since for rank in awaited), default=now) + self._window_s
            if awaited and (self._in_flight or now < until):
                self._waited_for.update(dict.fromkeys(rank.peer.index for rank in awaited))
                if not self._in_flight:
                    effects.append(WakeAt(until))
                break
            for rank in awaited:
                rank.late = True
                self._counters.add(f"executor_missed_ranks/{rank.peer.index}")
            self._counters.add("executor_merge_wait_seconds", now - self._could_run_since)
            self._could_run_since = None
            effects += self._run(present)
        return effects

    def _tries_drafts(self) -> bool:
        """Whether a step with drafts is at the device.

        Its ranks come again when they have its result. Who would go behind it waits to go with them: otherwise ranks
        would take turns for ever, each with a step that takes hardly less time than one for all.
        """
        return any(part.drafts is not None for step in self._in_flight for part in step.parts)

    def _read_clock(self, now: float) -> None:
        """Give a time to what has happened since the clock was last read."""
        for rank in self._ranks:
            if rank is None:
                continue
            if rank.answered:
                busy = bool(self._in_flight) and self._in_flight[0].number <= rank.work_left
                rank.late = not busy and now - rank.awaited_since > self._window_s
                rank.answered = False
            if rank.awaited and rank.awaited_since == math.inf:
                rank.awaited_since = now

    def _run(self, present: list[_Rank]) -> list[Effect]:
        """Make a step of the first schedule of each rank in `present`."""
        schedules = [rank.pending.popleft() for rank in present]
        effects: list[Effect] = []
        merged = self._merger.again([rank.peer.index for rank in present], schedules)
        if merged is None:
            owners, parts, effects = self._apply(present, schedules)
            if not parts:
                return [*effects, *self._take_adapters_held(present)]
            merged = parts, self._merger.merge(parts)
        else:
            owners = present
        parts, step = merged
        for rank in owners:
            rank.in_flight += 1
        self._last_number += 1
        self._in_flight.append(_InFlight(self._last_number, owners, parts))
        self._counters.add("executor_steps")
        self._counters.add("executor_schedules", len(parts))
        self._counters.add("executor_sequences", step.rows.size)
        self._counters.add("executor_tokens", int(np.add.reduce(step.num_tokens)))
        waited_for, self._waited_for = list(self._waited_for), {}
        effects += self._group.tell(self._last_number, step)
        effects.append(RunStep(self._last_number, step, [(part.rank, part.step) for part in parts], waited_for))
        return [*effects, *self._take_adapters_held(present)]

    def _apply(
        self, present: list[_Rank], schedules: list[PartialSchedule]
    ) -> tuple[list[_Rank], list[Part], list[Effect]]:
        """The ranks whose schedules can be run, their parts, and what the others are told."""
        owners, parts, effects = [], [], []
        for rank, schedule in zip(present, schedules, strict=True):
            try:
                parts.append(self._merger.apply(rank.peer.index, schedule))
            except Refused as refused:
                effects += self._refuse(rank, [schedule.step], str(refused))
            else:
                owners.append(rank)
        return owners, parts, effects

    def _refuse(self, rank: _Rank, steps: list[int], sentence: str) -> list[Effect]:
        """Answer schedules that are not run. What the rank thinks its rows are is no longer so: they are void."""
        self._merger.void(rank.peer.index)
        rank.pending = deque(held for held in rank.pending if held.step not in steps)
        rank.standing.clear()
        self._counters.add("executor_refused_schedules", len(steps))
        effects: list[Effect] = []
        for step in steps:
            text = f"schedule {step} was not run: {sentence}"
            log.error("schedule refused", step=step, peer=str(rank.peer), detail=sentence)
            effects.append(Send(rank.peer, Error(code="schedule_refused", message=text, step=step)))
        return effects

    # What a step gave

    def _finish_step(self, done: StepDone) -> list[Effect]:
        number, owners, parts = self._in_flight.popleft()
        if done.number != number:
            raise RuntimeError(f"the device finished step {done.number}; step {number} was to come first")
        effects: list[Effect] = []
        results = split(parts, done.sampled, self._limits.max_num_seqs)
        if done.sampled.counts is not None:
            self._merger.judged(parts, done.sampled.counts)
        present: list[_Rank] = []
        for rank, result in zip(owners, results, strict=True):
            rank.in_flight -= 1
            if self._ranks[rank.peer.index] is not rank:
                self._counters.add("executor_dropped_results")
                continue
            present.append(rank)
            if rank.standing.end_by(result):
                result = structs.replace(result, next_step=rank.last_step + 1)
            effects.append(Send(rank.peer, result))
            self._take_standing(rank)
            if rank.more and not rank.pending:
                rank.awaited, rank.awaited_since, rank.work_left = True, math.inf, self._last_number
        self._counters.add("executor_sampled_tokens", int(np.count_nonzero(done.sampled.tokens >= 0)))
        self._counters.add("executor_nan_rows", int(np.count_nonzero(done.sampled.tokens == -2)))
        self._counters.add("executor_dispatch_seconds", done.dispatch_s)
        self._counters.add("executor_device_seconds", done.device_s)
        if not all(rank.pending for rank in present):
            return [*self._take_gathered(), *effects]
        if not self._gathered:
            self._gathered_since = self._now
        self._gathered += effects
        next_step = self._schedule(self._now)  # the device waits for nobody to hear of its last step
        if done.device_s < GATHERING_S / 2 and all(len(rank.standing) > FEW_STANDING for rank in present):
            return next_step
        return [*next_step, *self._take_gathered()]

    def _tell_gathered(self, now: float) -> list[Effect]:
        """The results that have waited for long enough; if there are others, ask to be woken when they have."""
        if not self._gathered:
            return []
        if self._in_flight and now < self._gathered_since + GATHERING_S:
            return [WakeAt(self._gathered_since + GATHERING_S)]
        return self._take_gathered()

    def _take_gathered(self) -> list[Effect]:
        gathered, self._gathered = self._gathered, []
        return gathered

    # How it does

    def _report(self, now: float) -> list[Effect]:
        if now < self._next_status:
            return []
        self._next_status = now + STATUS_INTERVAL_S
        return self._tell_frontends()

    def _status(self) -> ExecutorStatus:
        self._counters.set("executor_steps_in_flight", len(self._in_flight))
        return ExecutorStatus(
            model=self._model,
            max_model_len=self._limits.max_model_len,
            num_blocks=sum(self._limits.blocks_of_rank),
            block_size=self._block_size,
            counters=self._bus_counters | self._counters.snapshot(),
            adapters=self._adapters.usable,
        )
