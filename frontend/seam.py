"""What crosses the seam between the HTTP side (vLLM's AsyncLLM, asyncio) and the bus side (the frontend's core).

Calls go down as `Posted` events of the bus thread; deliveries come up as effects of the core. Calls and deliveries are
plain data, so that the core can be replayed without vLLM.
"""

from typing import Any

import msgspec

from bus.core import Peer
from bus.messages import (
    Abort,
    AnyCommand,
    Append,
    Delta,
    Embed,
    EndTurn,
    ExecutorStatus,
    Finished,
    Floats,
    Generate,
    Ints,
    Load,
    Logprobs,
    Message,
    RequestEnded,
    RequestStarted,
    Sampling,
    SessionResumed,
    TurnFinished,
)

# Calls, from the HTTP side to the core


class AddCall(msgspec.Struct, frozen=True, kw_only=True):
    """Start a request. `rank` pins it. Refused by an ended `Delivery` with reason error if it cannot be served.

    `adapter` is the name of an adapter, or empty.
    """

    request_id: str
    prompt_token_ids: Ints
    sampling: Sampling
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    rank: int | None = None
    adapter: str = ""


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


class TextRendered(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `RenderText` of an embedding: the request with its prompt as tokens, to be served as it is."""

    peer: Peer
    request: Embed


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


class SessionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A WebSocket connection, numbered by the HTTP side, says what a client would say on the client bus."""

    connection: int
    message: Generate | Append | EndTurn | Abort


class ConnectionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """A WebSocket connection is gone, and with it the sessions it has opened."""

    connection: int


class InputRendered(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `RenderInput`: its tokens as int32, or `code` and `message` as in `Error`."""

    session: int
    input: int
    token_ids: Ints = memoryview(b"")
    code: str = ""
    message: str = ""


class SessionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a session of the client bus with its text, to be sent on (see `BeginTurn`)."""

    session: int
    message: Delta | TurnFinished | Finished | SessionResumed


Call = (
    AddCall
    | AbortCall
    | CommandCall
    | TextOutput
    | TextRendered
    | TextRefused
    | Detokenised
    | SessionCall
    | ConnectionClosed
    | InputRendered
    | SessionOutput
)

# Effects, from the core to the HTTP side


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """New output of one request: tokens as int32, and its end if it has ended.

    A session has `messages` instead of an end: what its client is to be told after these tokens. `prompt_logprobs` are
    of the part of the prompt after that told before; the last come with the first token. A `vector` is the prompt's,
    float32, and comes with the end.
    """

    request_id: str
    token_ids: Ints
    logprobs: Logprobs | None = None
    started: RequestStarted | None = None
    ended: RequestEnded | None = None
    messages: tuple[TurnFinished | Finished | SessionResumed, ...] = ()
    prompt_logprobs: Logprobs | None = None
    vector: Floats | None = None


class Deliver(msgspec.Struct, frozen=True):
    """Effect: what one rank's step gave the HTTP side's requests. `step` is 0 where it is of no step."""

    rank: int
    outputs: list[Delivery]
    step: int = 0


class CommandResult(msgspec.Struct, frozen=True):
    """Effect: answer to a `CommandCall`. `error` is a sentence, or empty; `missing` as in `Reply`.

    `code` is that of an executor's refusal, as in `Error`.
    """

    call_id: int
    value: Any
    missing: list[int]
    error: str
    code: str = ""


class RenderText(msgspec.Struct, frozen=True):
    """Effect: a client asked for generation from or to text. The HTTP side tokenises, generates and detokenises.

    Of an embedding it only tokenises, and answers with `TextRendered`.
    """

    peer: Peer
    request: Generate | Embed


class AbortText(msgspec.Struct, frozen=True):
    """Effect: stop working on a client's text request."""

    peer: Peer
    request_id: str


class RenderInput(msgspec.Struct, frozen=True):
    """Effect: a session's input is not tokens yet: `text`, or `messages`. `opening` if nothing is before it.

    Answered by one `InputRendered` with the same numbers.
    """

    session: int
    input: int
    text: str | None
    messages: list[dict[str, Any]] | None
    opening: bool


class BeginTurn(msgspec.Struct, frozen=True):
    """Effect: what is delivered under the name `delivery` from now on is a turn of a session, from its first token.

    `turn` is its number, `request_id` the client's name of the session, `token_ids` the last tokens before the turn's
    first. The HTTP side makes the client's messages of it, with text if `text_output`, for the `connection`, or else
    to be sent by the core (`SessionOutput`).
    """

    session: int
    turn: int
    delivery: str
    connection: int | None
    request_id: str
    text_output: bool
    token_ids: Ints


class ToConnection(msgspec.Struct, frozen=True):
    """Effect: tell a WebSocket connection something that need not pass the detokenizer."""

    connection: int
    message: Message


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
