"""What crosses the seam between the HTTP side (vLLM's AsyncLLM, asyncio) and the bus side (the frontend's core).

Calls go down as `Posted` events of the bus thread; deliveries come up as effects of the core. Calls and deliveries are
plain data, so that the core can be replayed without vLLM.
"""

from typing import Any

import msgspec

from bus.core import Peer
from bus.messages import (
    AnyCommand,
    Delta,
    ExecutorStatus,
    Finished,
    Generate,
    Ints,
    Load,
    Logprobs,
    RequestEnded,
    RequestStarted,
    Sampling,
)

# Calls, from the HTTP side to the core


class AddCall(msgspec.Struct, frozen=True, kw_only=True):
    """Start a request. `rank` pins it. Refused by an ended `Delivery` with reason error if it cannot be served."""

    request_id: str
    prompt_token_ids: Ints
    sampling: Sampling
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    rank: int | None = None


class AbortCall(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side has no more use for these requests; nothing more is delivered for them."""

    request_ids: list[str]


class CommandCall(msgspec.Struct, frozen=True, kw_only=True):
    """Run a command; answered by one `CommandResult` with the same id."""

    call_id: int
    body: AnyCommand
    deadline_s: float | None = None
    ranks: list[int] | None = None


class TextOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a client's text request (see `RenderText`), to be sent on to it."""

    peer: Peer
    message: Delta | Finished


class TextRefused(msgspec.Struct, frozen=True, kw_only=True):
    """A client's text request could not be started, or failed: `code` and `message` as in `Error`."""

    peer: Peer
    request_id: str
    code: str
    message: str


class Detokenised(msgspec.Struct, frozen=True, kw_only=True):
    """Word for the journal, and nothing the core acts on: what a step of a rank gave was processed and is on its way.

    `begun` is a monotonic time in seconds, as `Deliver` has `rank` and `step`.
    """

    rank: int
    step: int
    begun: float
    seconds: float


Call = AddCall | AbortCall | CommandCall | TextOutput | TextRefused | Detokenised

# Effects, from the core to the HTTP side


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """New output of one request: tokens as int32, and its end if it has ended."""

    request_id: str
    token_ids: Ints
    logprobs: Logprobs | None = None
    started: RequestStarted | None = None
    ended: RequestEnded | None = None


class Deliver(msgspec.Struct, frozen=True):
    """Effect: what one rank's step gave the HTTP side's requests. `step` is 0 where it is of no step."""

    rank: int
    outputs: list[Delivery]
    step: int = 0


class CommandResult(msgspec.Struct, frozen=True):
    """Effect: answer to a `CommandCall`. `error` is a sentence, or empty; `missing` as in `Reply`."""

    call_id: int
    value: Any
    missing: list[int]
    error: str


class RenderText(msgspec.Struct, frozen=True):
    """Effect: a client asked for generation from or to text. The HTTP side tokenises, generates and detokenises."""

    peer: Peer
    request: Generate


class AbortText(msgspec.Struct, frozen=True):
    """Effect: stop working on a client's text request."""

    peer: Peer
    request_id: str


class StatusUpdate(msgspec.Struct, frozen=True):
    """Effect: how the engine does, at most about ten times a second, and at once when `ready` changes.

    `ready` is whether a request could be served now: an executor and at least one rank are up. `loads` has the last
    `Load` of each rank that is up, by rank. `counters` are this frontend's totals since its start: what its buses
    counted (`bus_…`), and the rest of its own.
    """

    ready: bool
    loads: dict[int, Load]
    executor: ExecutorStatus | None
    counters: dict[str, float]
