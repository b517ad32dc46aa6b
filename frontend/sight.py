"""How the engine does, once a second, for people: what the dashboard and ``rankbus top`` show, and some history of it.

A snapshot has totals; whoever shows it makes rates of two of them. It knows nothing of vLLM or HTTP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec

from bus import log
from bus.messages import Load, PauseState
from frontend.seam import StatusUpdate

INTERVAL_S = 1.0
HISTORY = 600
"""Snapshots that are kept."""


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values up to each of `bounds` (the last one is left out: infinity), cumulative; their number, sum."""

    bounds: list[float] = []
    counts: list[float] = []
    count: float = 0.0
    sum: float = 0.0


class RankSight(msgspec.Struct, frozen=True, kw_only=True):
    """A rank. Blocks and tokens are numbers of them; `…_s` are seconds, all from `steps` on totals since its start."""

    rank: int
    up: bool = True
    running: int = 0
    waiting: int = 0
    idle_sessions: int = 0
    prefill_tokens: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    pause_state: PauseState = "unpaused"
    draining: bool = False
    in_flight: int = 0
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    schedule_s: float = 0.0
    update_s: float = 0.0

    @property
    def state(self) -> str:
        """In one word."""
        if not self.up:
            return "down"
        if self.draining:
            return "draining"
        if self.pause_state != "unpaused":
            return "paused"
        return "up" if self.num_blocks else "no executor"


class ExecutorSight(msgspec.Struct, frozen=True, kw_only=True):
    """The executor. All but `in_flight` are totals since its start; `merge_wait_s` was spent waiting for ranks."""

    in_flight: int = 0
    steps: int = 0
    sequences: int = 0
    merge_wait_s: float = 0.0
    merge_s: float = 0.0
    dispatch_s: float = 0.0
    device_s: float = 0.0
    split_s: float = 0.0
    missed: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as one frontend sees it, `at` a wall-clock time.

    `first` has the times to the first token and `between` those between tokens, of the frontend's requests that go
    through vLLM. `errors` are this process's latest warnings and errors.
    """

    at: float
    frontend: int
    model: str
    ready: bool
    ranks: list[RankSight]
    executor: ExecutorSight | None
    unfinished: int = 0
    started: int = 0
    ended: dict[str, int] = {}
    refused: int = 0
    rejected_frames: int = 0
    first: Histogram = Histogram()
    between: Histogram = Histogram()
    errors: list[log.Line] = []


def snapshot(
    at: float, frontend: int, ranks: int, status: StatusUpdate, first: Histogram, between: Histogram
) -> Snapshot:
    """What a frontend's status comes to; `ranks` is how many there should be."""
    own = status.counters
    return Snapshot(
        at=at,
        frontend=frontend,
        model=status.executor.model if status.executor else "",
        ready=status.ready,
        ranks=[_rank(rank, status.loads.get(rank)) for rank in range(ranks)],
        executor=_executor(status.executor.counters) if status.executor else None,
        unfinished=int(own.get("unfinished_requests", 0) + own.get("unfinished_text_requests", 0)),
        started=int(own.get("requests_started", 0)),
        ended={reason: int(count) for reason, count in _labelled(own, "requests_ended")},
        refused=int(sum(count for _, count in _labelled(own, "requests_refused"))),
        rejected_frames=int(sum(count for _, count in _labelled(own, "bus_rejected_frames"))),
        first=first,
        between=between,
        errors=list(log.recent)[-20:],
    )


class Sight:
    """Keeps the snapshots and hands them to whoever follows. All methods are called on the event loop."""

    def __init__(self, frontend: int, ranks: int, histograms: Callable[[], tuple[Histogram, Histogram]]) -> None:
        """`histograms` gives the times to the first token, and between tokens, so far."""
        self._frontend = frontend
        self._ranks = ranks
        self._histograms = histograms
        self._encoder = msgspec.json.Encoder()
        self._history: deque[bytes] = deque(maxlen=HISTORY)
        self._made = 0
        self._next_at = 0.0
        self._changed = asyncio.Event()
        self._closed = False

    def update(self, status: StatusUpdate, at: float) -> None:
        """Take the engine's status; a snapshot is made of it when it is time for one."""
        if at < self._next_at:
            return
        self._next_at = at + INTERVAL_S
        made = snapshot(at, self._frontend, self._ranks, status, *self._histograms())
        self._history.append(self._encoder.encode(made))
        self._made += 1
        self._wake()

    def close(self) -> None:
        """End all that follow."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncGenerator[list[bytes]]:
        """The snapshots so far as JSON, then each new one, until `close`."""
        seen = self._made
        yield list(self._history)
        while not self._closed:
            missed = self._made - seen  # some may have been made while the last was on its way
            if missed:
                seen = self._made
                yield list(self._history)[-missed:]
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def quantile(fraction: float, before: Histogram, after: Histogram) -> float | None:
    """A quantile of what came between two histograms, within its bound by proportion; None if nothing came."""
    if before.bounds != after.bounds or before.count > after.count:
        before = Histogram(after.bounds, [0.0] * len(after.counts))
    total = after.count - before.count
    if total <= 0:
        return None
    wanted, low, below = fraction * total, 0.0, 0.0
    for bound, count, earlier in zip(after.bounds, after.counts, before.counts, strict=True):
        upto = count - earlier
        if upto >= wanted:
            return low + (bound - low) * (wanted - below) / max(upto - below, 1e-9)
        low, below = bound, upto
    return low


def _rank(rank: int, load: Load | None) -> RankSight:
    if load is None:
        return RankSight(rank=rank, up=False)
    counted = load.counters
    return RankSight(
        rank=rank,
        running=load.running,
        waiting=load.waiting,
        idle_sessions=int(counted.get("scheduler_idle_sessions", 0)),
        prefill_tokens=load.pending_prefill_tokens,
        used_blocks=load.used_blocks,
        num_blocks=load.num_blocks,
        pause_state=load.pause_state,
        draining=load.draining,
        in_flight=int(counted.get("rank_steps_in_flight", 0)),
        steps=int(counted.get("scheduler_steps", 0)),
        tokens=int(counted.get("scheduler_generated_tokens", 0)),
        prompt_tokens=int(counted.get("scheduler_prompt_tokens", 0)),
        cached_tokens=int(counted.get("scheduler_cached_prompt_tokens", 0)),
        preemptions=int(counted.get("scheduler_preemptions", 0)),
        draft_tokens=int(counted.get("scheduler_draft_tokens", 0)),
        accepted_tokens=int(counted.get("scheduler_accepted_tokens", 0)),
        schedule_s=counted.get("bus_handling_seconds/Drained", 0.0),
        update_s=counted.get("bus_handling_seconds/StepResult", 0.0),
    )


def _executor(counted: Mapping[str, float]) -> ExecutorSight:
    return ExecutorSight(
        in_flight=int(counted.get("executor_steps_in_flight", 0)),
        steps=int(counted.get("executor_steps", 0)),
        sequences=int(counted.get("executor_sequences", 0)),
        merge_wait_s=counted.get("executor_merge_wait_seconds", 0.0),
        merge_s=counted.get("bus_handling_seconds/Drained", 0.0),
        dispatch_s=counted.get("executor_dispatch_seconds", 0.0),
        device_s=counted.get("executor_device_seconds", 0.0),
        split_s=counted.get("bus_handling_seconds/StepDone", 0.0),
        missed=int(sum(count for _, count in _labelled(counted, "executor_missed_ranks"))),
    )


def _labelled(counters: Mapping[str, float], name: str) -> list[tuple[str, float]]:
    """The label values and totals of a counter."""
    return [(key.partition("/")[2], total) for key, total in counters.items() if key.partition("/")[0] == name]


def decode(data: bytes) -> Snapshot:
    """A snapshot from its JSON.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return _DECODER.decode(data)


_DECODER = msgspec.json.Decoder(Snapshot)
