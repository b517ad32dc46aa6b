"""What a rank's scheduler is: the one interface behind which vLLM's scheduler and the native one stand.

A request is known by its key, (frontend index, the frontend's handle). Steps are numbered by the caller, rise by one,
and are answered in the order in which they were made. All calls come from one thread; none of them waits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from bus.messages import (
    AddRequest,
    AppendInput,
    FinishReason,
    Grammar,
    Ints,
    KvPool,
    Outputs,
    PartialSchedule,
    PauseState,
    RequestEnded,
    StandingSchedule,
    StepResult,
    StopTurn,
)


class Refused(Exception):
    """A request, a turn or a single-step command that cannot be taken; the text is the sentence to answer with."""


NOT_A_NUMBER = -2
"""In results: the logits of this row were not numbers."""


class BrokenResult(Exception):
    """A step's result that does not fit the step; the text says how."""


class RefusedTurn(NamedTuple):
    """An input that a session had taken and cannot go on with after all; `sequence` is its message's."""

    frontend: int
    handle: int
    sequence: int
    sentence: str


class Ended(NamedTuple):
    """A request that ended outside of a step, and the frontend that is to be told."""

    frontend: int
    request_id: str
    ended: RequestEnded


StepOutputs = list[tuple[int, Outputs]]
"""What a step gave: at most one message for each frontend, by frontend index, in rising order."""


class LoadFigures(NamedTuple):
    """What routing needs to know of a rank. `waiting` leaves out sessions that wait for input."""

    running: int
    waiting: int
    pending_prefill_tokens: int
    min_remaining_output: int | None
    used_blocks: int
    num_blocks: int


class KvChanges(NamedTuple):
    """Names of blocks (16 bytes each, one after the other) that entered and left the prefix cache."""

    stored: bytes
    removed: bytes
    cleared: bool
    """All was dropped meanwhile: `kv_snapshot` says what there is now."""


class Scheduler(Protocol):
    """Decides which requests run in a step, in which rows and blocks, and what comes out of it."""

    # Requests

    def add(self, frontend: int, request: AddRequest, now: float) -> None:
        """Take a new request (its handle is not in use). `now` is monotonic time in seconds.

        Raises:
            Refused: it can never be served.
        """
        ...

    def has(self, frontend: int, handle: int) -> bool:
        """Whether the request is known: added, and not ended."""
        ...

    def adapters(self) -> list[str]:
        """The identities of the adapters that unfinished requests have, each once."""
        ...

    def append(self, frontend: int, turn: AppendInput, now: float) -> list[Ended]:
        """Queue a session's next turn, or close it; returns its end if that comes at once. `now` as in `add`.

        Raises:
            Refused: the handle is unknown, not a session, or the turn cannot be served.
        """
        ...

    def stop_turn(self, frontend: int, stop: StopTurn) -> None:
        """Stop a session's turn, and keep the first tokens of its output; `take_turns` has its end.

        Raises:
            Refused: the handle is unknown, not a session, or the turn is over or yet to come.
        """
        ...

    def take_turns(self) -> tuple[StepOutputs, list[RefusedTurn]]:
        """What there is to tell of turns besides the results of steps, since the last call.

        To be called after `schedule`, `render`, `update` and `stop_turn`, so that what happens is told in order.
        """
        ...

    def take_grammars(self) -> list[tuple[int, Grammar]]:
        """The grammars that are to be compiled since the last call, and a number for each, which is not used twice."""
        ...

    def compiled(self, ticket: int, matcher: Any, fault: str) -> list[Ended]:
        """A grammar was compiled (`matcher` None: it was once, see `ranks.compiling`), or cannot be: `fault` says why.

        Whoever asked for it may have ended meanwhile. Returns whom the fault ends; `take_turns` has what it refuses.
        """
        ...

    def finish(self, frontend: int, handles: Ints | None, reason: FinishReason) -> list[Ended]:
        """End requests of a frontend at once, None means all of its; those that were unknown are left out."""
        ...

    def finish_ids(
        self, request_ids: list[str] | None, reason: FinishReason, code: str = "", message: str = ""
    ) -> list[Ended]:
        """End requests by id, of any frontend, at once; None means all. Those that were unknown are left out."""
        ...

    # Steps

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        """Make the next step, None if nothing can run now. The step is in flight until `update`."""
        ...

    def may_stand(self) -> bool:
        """Whether steps may go on as they are, so that they need not be scheduled one by one."""
        ...

    def stand(self, first_step: int, after: int, most: int) -> StandingSchedule | None:
        """Say up to `most` steps from `first_step` on ahead; None if the next is not like the last.

        They follow those in flight and those that stand; `after` is the last step that has come back. Until
        `stand_down` only `update`, `add`, and what changes nothing may be called. A step that stands is in flight when
        it has a result.
        """
        ...

    def stand_down(self, next_step: int) -> None:
        """Of the steps that stand those below `next_step` are in flight, or have come back, and the others are void."""
        ...

    def update(self, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight.

        Raises:
            BrokenResult: it has not one token for each row, or not where the row samples; nothing was changed.
        """
        ...

    def is_steady(self) -> bool:
        """Whether nothing has changed with the last step but for tokens: `load` says what it said before."""
        ...

    def set_pause(self, state: PauseState) -> None:
        """``paused_new`` schedules only what runs already, ``paused_all`` nothing."""
        ...

    # Single-step mode

    def render(self, step: int, now: float) -> dict[str, Any]:
        """Make the next step, even an empty one, as the fields of vLLM's `SchedulerOutput`; it is then in flight."""
        ...

    def update_by_id(self, sampled: dict[str, list[int]]) -> tuple[StepOutputs, dict[str, Any]]:
        """Take the sampled tokens of the step made by `render`; the outputs come by request id as well (`by_id`).

        Raises:
            Refused: they do not fit the step; the text names the request.
        """
        ...

    def bitmask(self) -> tuple[list[str], list[bytes]] | None:
        """Request ids and packed rows of allowed tokens of the structured requests in the step made by `render`."""
        ...

    def set_drafts(self, drafts: dict[str, list[int]]) -> list[str]:
        """Give requests their draft tokens for the next step; returns the ids that took any."""
        ...

    # Probes

    def load(self) -> LoadFigures: ...

    def token_count(self) -> int:
        """Tokens of all requests, prompt and output."""
        ...

    def computed_tokens(self, prompt: Ints, cache_salt: str, adapter: str) -> int:
        """How many tokens of a prompt the prefix cache holds; the last one always has to be computed.

        `adapter` is the identity of an adapter, or empty.
        """
        ...

    def unfinished(self) -> int:
        """Requests that have not ended, without sessions that wait for input."""
        ...

    def request_counts(self) -> tuple[int, int]:
        """Running and waiting requests; sessions that wait for input count as waiting."""
        ...

    def has_finished(self) -> bool:
        """Whether requests have ended whose rows a step in flight still names, or that no schedule has told of yet."""
        ...

    def stats(self) -> dict[str, Any] | None:
        """Statistics since the last call, under vLLM's names; None when they are off."""
        ...

    # Caches

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix cache; fails while blocks are in use, unless `reset_running` preempts what uses them."""
        ...

    def reset_encoder_cache(self) -> bool:
        """Empty the cache of multimodal encoder outputs."""
        ...

    def take_kv_changes(self) -> KvChanges:
        """What changed in the prefix cache since the last call."""
        ...

    def kv_snapshot(self) -> bytes:
        """Names of all blocks in the prefix cache, as of the last `take_kv_changes`."""
        ...


class Schedulers(NamedTuple):
    """What makes a scheduler for a KV pool, and what compiles grammars for it, which may be done in another thread."""

    build: Callable[[KvPool], Scheduler]
    compile: Callable[[Grammar], Any]

    def __call__(self, pool: KvPool) -> Scheduler:
        """A scheduler."""
        return self.build(pool)
