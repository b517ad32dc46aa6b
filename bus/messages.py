"""Every message of every bus, and the one place where their shapes are defined.

A message is a ``msgspec.Struct``, encoded as a MessagePack map with its class name under ``type`` and fields that hold
their default left out. Integer arrays travel as raw little-endian int32 bytes (``Ints``), float arrays as raw
little-endian float32 (``Floats``); see `bus.wire`. Within a major protocol version fields are only added.

What clients send is strict (an unknown field is refused with a sentence, so that a misspelt parameter is never
ignored); what the engine's own processes send each other tolerates fields it does not know.
"""

from typing import Any, Literal

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1

MINOR_OF_SEVERAL = 1
"""Who knows this minor version knows `AddRequests`, `StandingSchedule`, and `finished` of `TokenDeltas`; others are not
sent them."""

MOST_STANDING_STEPS = 64
"""Most steps that a rank lets stand at once."""

Ints = memoryview
"""Raw little-endian int32, one after the other."""

Floats = memoryview
"""Raw little-endian float32, one after the other."""

Role = Literal["client", "frontend", "rank", "executor"]
FinishReason = Literal["stop", "length", "abort", "error", "closed"]
"""Why a request ended; "closed" is a session that its client closed."""

TurnReason = Literal["stop", "length", "interrupted", "empty"]
"""Why a session's turn ended; "interrupted" by its client, "empty" for want of anything to compute."""

PauseMode = Literal["keep", "wait", "abort"]
PauseState = Literal["unpaused", "paused_new", "paused_all"]
EMPTY = memoryview(b"")


def _check_words(**arrays: memoryview) -> None:
    """Refuse arrays that are no whole number of 4-byte words; msgspec turns it into a ValidationError with the path."""
    for name, array in arrays.items():
        if array.nbytes % 4:
            raise ValueError(f"`{name}` has {array.nbytes} bytes, which is no whole number of 4-byte values")


def _check_lengths(count: int, **arrays: memoryview) -> None:
    """Refuse 4-byte arrays that do not have `count` elements."""
    for name, array in arrays.items():
        if array.nbytes != 4 * count:
            raise ValueError(f"`{name}` has {array.nbytes} bytes; {count} values of 4 bytes are expected")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of all messages between the engine's processes, and from the engine to clients."""


class ClientMessage(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages a client sends: fields that are not in the definition are refused."""


# ---------------------------------------------------------------------------------------------------------------------
# Link: on every bus, before and beside everything else


class Hello(Message, frozen=True, kw_only=True):
    """First frame from the connecting side; answered by `Welcome` or `Error`. Nothing else is sent before that.

    `index` tells peers of one role apart (rank 0, rank 1, …; clients choose any number of their own).
    `incarnation` is unique to this start of the process and larger than that of any earlier start of it.
    `attempt` counts how often this start has lost this peer and begun again: what either side held about the other
    is void when it changes. Hello is repeated, with the same attempt, until it is answered.
    """

    role: Role
    index: int
    incarnation: int
    major: int
    minor: int
    attempt: int = 0
    schema: str = ""


class Welcome(Message, frozen=True, kw_only=True):
    """Answer of the binding side to `Hello`: fields as there, `attempt` the one that is answered."""

    role: Role
    index: int
    incarnation: int
    major: int
    minor: int
    attempt: int = 0
    schema: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent when nothing else was for `heartbeat_interval_s`; a peer silent for `heartbeat_timeout_s` is lost."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The sender is ending in an orderly way; it is lost as of this frame."""

    reason: str = ""


class Error(Message, frozen=True, kw_only=True):
    """Something that was sent could not be served. `message` is a sentence for people, `code` a word for programs.

    `request_id`, `command_id` or `step` name what it answers, where that could be read from the frame. An input that a
    session refuses is named by the `turn` it would have been; the session goes on, and the inputs after it are one turn
    earlier than they would have been. Between rank and frontend it is named by `handle` and its message's `sequence`.
    """

    code: str
    message: str
    request_id: str = ""
    command_id: int = 0
    step: int = 0
    turn: int = 0
    handle: int = 0
    sequence: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output text. `spec` is the schema (JSON text), pattern, grammar, or JSON list of choices."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    spec: str = ""


GRAMMAR_FAULT = "the grammar cannot be used: "
"""Begins the sentence that refuses a grammar; what follows may quote it."""


PoolingKind = Literal["last", "mean"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt becomes one vector, in float32, of its tokens' hidden states, as they are after the last norm.

    `last` is that of the last token, `mean` the mean of all. With `normalize` it is scaled to a length of 1.
    """

    kind: PoolingKind
    normalize: bool = True


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled and when it stops, as ranks and executor need it: complete, seeded, in token ids.

    Field meanings are vLLM's `SamplingParams`'; `temperature` 0 is greedy, `top_k` 0 is off, `logprobs` -1 is the
    whole vocabulary. `max_tokens` and `min_tokens` count output tokens. `eos_token_id` stops with no stop reason,
    a token of `stop_token_ids` stops with itself as the reason.

    With `pooling` nothing is sampled: the prompt's vector is all there is. `max_tokens` is 1 then, and all else is left
    out.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_id: int | None = None
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None


class GenerateParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters as a client writes them: vLLM's names and defaults; unknown names are refused.

    Unset `max_tokens` means as many as the context holds; unset `seed` means one drawn by the frontend.
    """

    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities at `positions` consecutive positions of one sequence.

    `owner` is the row on the step bus, the request's handle on the command bus, and the child's index on the client
    bus. `token_ids` and `values` are [positions, k + 1]: first the sampled (or prompt) token, then the k most likely.
    `ranks` is [positions]: the rank of that first token, 1 for the most likely.

    With `prompt_position` 0 they are of sampled tokens. Otherwise they are of the prompt's tokens, from the one at this
    position on: the first token, at position 0, has none. They are of the logits as the model gave them.
    """

    owner: int
    positions: int
    token_ids: Ints
    values: Floats
    ranks: Ints
    prompt_position: int = 0

    def __post_init__(self) -> None:
        width = self.token_ids.nbytes // 4 // max(self.positions, 1)
        _check_lengths(self.positions * width, token_ids=self.token_ids, values=self.values)
        _check_lengths(self.positions, ranks=self.ranks)


class Pooled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The vector that a prompt was pooled to. `owner` is the row on the step bus, the handle on the command bus."""

    owner: int
    vector: Floats

    def __post_init__(self) -> None:
        _check_words(vector=self.vector)


class MultimodalFeature(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something other than text in a prompt: what fills the `length` tokens from `offset` on, by its content's `hash`.

    `offset` counts from the first token of the prompt, or of the appended input, that it comes with.
    """

    hash: str
    offset: int
    length: int


# ---------------------------------------------------------------------------------------------------------------------
# Commands: the same on the client bus and the command bus


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True, forbid_unknown_fields=True):
    """Base of what a `CommandRequest` can ask for. How the ranks' answers are folded into one: `bus.folds`."""


class FinishRequests(Command, frozen=True, kw_only=True):
    """Abort requests by id, whoever owns them; None means all. Value: the ids that really were unfinished."""

    request_ids: list[str] | None = None


class UpdateDraftTokens(Command, frozen=True, kw_only=True):
    """Give requests their next draft tokens. Value: the ids that took them."""

    drafts: dict[str, list[int]]


class TokenCount(Command, frozen=True, kw_only=True):
    """Tokens of all requests a rank holds, prompt and output. Value: one per rank."""


class PendingPrefillTokens(Command, frozen=True, kw_only=True):
    """Tokens a rank has yet to prefill, running and waiting requests. Value: one per rank."""


class ComputedBlocks(Command, frozen=True, kw_only=True):
    """How many tokens of a prompt a rank's prefix cache holds. Value: one per rank.

    `adapter` is the name of an adapter, and to ranks its identity.
    """

    prompt_token_ids: list[int]
    cache_salt: str = ""
    adapter: str = ""


class MinRemainingOutput(Command, frozen=True, kw_only=True):
    """Least number of output tokens any running request may still produce, None if none runs. Value: one per rank."""


class UnfinishedRequests(Command, frozen=True, kw_only=True):
    """Number of unfinished requests. Value: the sum."""


class RequestCounts(Command, frozen=True, kw_only=True):
    """Value: the sums [running, waiting]."""


class HasFinishedRequests(Command, frozen=True, kw_only=True):
    """Whether requests have finished whose row is not yet free. Value: whether any rank says so."""


class ResetPrefixCache(Command, frozen=True, kw_only=True):
    """Empty the prefix cache; with `reset_running_requests`, preempt what runs so that every block can go.

    Value: whether it succeeded on all ranks.
    """

    reset_running_requests: bool = False


class ResetEncoderCache(Command, frozen=True, kw_only=True):
    """Empty the cache of multimodal encoder outputs. Value: whether it succeeded on all ranks."""


class MakeStats(Command, frozen=True, kw_only=True):
    """Scheduler statistics since the last time; None when statistics are off. Counts add up, KV usage is averaged."""


class GrammarBitmask(Command, frozen=True, kw_only=True):
    """Allowed tokens of the structured requests in the schedule last made in single-step mode.

    Value: [request ids, packed rows of ceil(vocabulary / 32) int32 each], in rank order; None if there are none.
    """


class Schedule(Command, frozen=True, kw_only=True):
    """Single-step mode: make one schedule and hold it. Value: as the fields of vLLM's `SchedulerOutput`, merged."""


class UpdateFromOutput(Command, frozen=True, kw_only=True):
    """Single-step mode: give the held schedule its sampled tokens by request id. Value: what the requests emit."""

    sampled_token_ids: dict[str, list[int]]


class SetPause(Command, frozen=True, kw_only=True):
    """Stop scheduling: `keep` freezes requests, `wait` lets running ones finish, `abort` ends them and tells clients.

    Value: the pause state, once reached.
    """

    mode: PauseMode


class Resume(Command, frozen=True, kw_only=True):
    """End a pause or a drain. Value: the pause state."""


class GetPauseState(Command, frozen=True, kw_only=True):
    """Value: the pause state, the same on all ranks, or a list of one per rank if they differ."""


class Drain(Command, frozen=True, kw_only=True):
    """Take no new requests and answer when the last one has finished. Value: whether all ranks are drained.

    With `rank`, only that rank; its new requests go to the others.
    """

    rank: int | None = None


class LoadAdapter(Command, frozen=True, kw_only=True):
    """Load the LoRA adapter in the folder `path`, which the executor's hosts have, to be called `name`.

    With `replace` it may have the name of one that is loaded: new requests have the new one, and those that run keep
    the old one until they end. Value: the adapter's identity, once requests may have it.
    """

    name: str
    path: str
    replace: bool = False


class UnloadAdapter(Command, frozen=True, kw_only=True):
    """Unload an adapter: new requests that name it are refused from now on. Value: True, once none is left that has it.

    Those that run, and sessions, go on to their ends. Where that takes longer than the deadline, the answer is an
    error, and the adapter is unloaded later all the same. Without `wait` the answer comes at once.
    """

    name: str
    wait: bool = True


class ListAdapters(Command, frozen=True, kw_only=True):
    """Value: the adapters that requests may name, each as a map with the fields of `Adapter`."""


class Shutdown(Command, frozen=True, kw_only=True):
    """End all processes in an orderly way: ranks, executor, then the frontend that was asked. Value: True."""


AnyCommand = (
    FinishRequests
    | UpdateDraftTokens
    | TokenCount
    | PendingPrefillTokens
    | ComputedBlocks
    | MinRemainingOutput
    | UnfinishedRequests
    | RequestCounts
    | HasFinishedRequests
    | ResetPrefixCache
    | ResetEncoderCache
    | MakeStats
    | GrammarBitmask
    | Schedule
    | UpdateFromOutput
    | SetPause
    | Resume
    | GetPauseState
    | Drain
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Shutdown
)


class CommandRequest(ClientMessage, frozen=True, kw_only=True):
    """Ask for something other than tokens. Answered by exactly one `Reply` or `Error` with the same id.

    `command_id` is any positive number the sender has not used for a command still unanswered. `deadline_s` bounds
    the answer; None is the engine's setting. `ranks` limits who is asked (client bus only); None is all.
    """

    command_id: int
    body: AnyCommand
    deadline_s: float | None = None
    ranks: list[int] | None = None


class Reply(Message, frozen=True, kw_only=True):
    """Answer to a command. `missing` names the ranks that did not answer within the deadline."""

    command_id: int
    value: Any = None
    missing: list[int] = []


# ---------------------------------------------------------------------------------------------------------------------
# Client bus: client → frontend


class Generate(ClientMessage, frozen=True, kw_only=True):
    """Start a request. Exactly one of `text`, `messages` (chat, OpenAI form) and `prompt_token_ids` is the prompt.

    `request_id` is unique among the client's unfinished requests. `text_output` false leaves detokenisation out
    (only with `prompt_token_ids`, and without stop strings). `rank` pins the request to a rank. `resumable` opens a
    session; the prompt is its first turn, and may be empty. `adapter` is the name of a LoRA adapter; empty is none.
    """

    request_id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | Ints | None = None
    params: GenerateParams = GenerateParams()
    text_output: bool = True
    priority: int = 0
    cache_salt: str = ""
    rank: int | None = None
    resumable: bool = False
    mm_features: list[MultimodalFeature] = []
    adapter: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.prompt_token_ids, memoryview):
            _check_words(prompt_token_ids=self.prompt_token_ids)

    @property
    def num_sequences(self) -> int:
        """How many ends it comes to."""
        return max(self.params.n, 1)


class Embed(ClientMessage, frozen=True, kw_only=True):
    """Ask for the embedding of a prompt; nothing is generated. Fields that `Generate` has too mean the same here.

    The prompt is pooled as `pooling` says, or by the setting of that name; see `Pooling`. A chat is not made to end
    where an answer would begin. Answered by one `Embedding`, or by `Error`, or, when it is aborted or fails, by
    `Finished`.
    """

    request_id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | Ints | None = None
    pooling: PoolingKind | None = None
    normalize: bool = True
    priority: int = 0
    cache_salt: str = ""
    rank: int | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.prompt_token_ids, memoryview):
            _check_words(prompt_token_ids=self.prompt_token_ids)

    @property
    def num_sequences(self) -> int:
        """As of `Generate`."""
        return 1


class Append(ClientMessage, frozen=True, kw_only=True):
    """Next input of a session (a request opened with `resumable`); `resumable` false closes it.

    At most one of `text`, `messages` and `prompt_token_ids` is the input; none is an empty one. `messages` (chat,
    OpenAI form) follow the answer of the turn before: what the chat template writes after an answer comes first, such
    as the end-of-message token, which was not kept.

    `params` replace the session's whole for this turn; None are those that it was opened with. The tokens and
    parameters of a closing one are ignored.
    """

    request_id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | Ints | None = None
    params: GenerateParams | None = None
    resumable: bool = True
    mm_features: list[MultimodalFeature] = []

    def __post_init__(self) -> None:
        if isinstance(self.prompt_token_ids, memoryview):
            _check_words(prompt_token_ids=self.prompt_token_ids)


class EndTurn(ClientMessage, frozen=True, kw_only=True):
    """Stop a session's running turn and keep its first `n` output tokens. Turns count from 1, the opening one."""

    request_id: str
    turn: int
    n: int


class Abort(ClientMessage, frozen=True, kw_only=True):
    """End a request; answered by its `Finished` with reason abort, or by `Error` if the id is unknown."""

    request_id: str


# Client bus: frontend → client


class Delta(Message, frozen=True, kw_only=True):
    """New output of a request with text or logprobs: tokens as int32, and the text. `index` is the child of `n`.

    Log-probabilities of a prompt (see `prompt_position` of `Logprobs`) come in messages of their own, without tokens:
    for each child all of them, in order, before its first token.
    """

    request_id: str
    index: int = 0
    token_ids: Ints = EMPTY
    text: str = ""
    logprobs: Logprobs | None = None

    def __post_init__(self) -> None:
        _check_words(token_ids=self.token_ids)


class Finished(Message, frozen=True, kw_only=True):
    """Last message of child `index` of a request. `stop_reason` is the stop token or stop string that ended it."""

    request_id: str
    index: int = 0
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class TokenDeltas(Message, frozen=True, kw_only=True):
    """New tokens of several requests of one client, of one step of a rank or of several: for requests without text.

    `request_ids` [n]; `tokens` one after the other; `counts` [n] tokens of each, left out when each has one; `indices`
    [n] of the children of `n`, left out when all are 0. A request with logprobs has a `Delta` instead.

    The requests in `finished` have ended, those with tokens here after them. Clients whose `Hello` says minor version 0
    have each `Finished` as a message of its own instead, and others may.
    """

    request_ids: list[str]
    tokens: Ints
    counts: Ints = EMPTY
    indices: Ints = EMPTY
    finished: list[Finished] = []

    def __post_init__(self) -> None:
        _check_words(tokens=self.tokens)
        for name, array in (("counts", self.counts), ("indices", self.indices)):
            if array.nbytes:
                _check_lengths(len(self.request_ids), **{name: array})


class Embedding(Message, frozen=True, kw_only=True):
    """Answer to `Embed`, and the last message of it. The `vector` is as long as the model's hidden size."""

    request_id: str
    vector: Floats
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        _check_words(vector=self.vector)


class TurnFinished(Message, frozen=True, kw_only=True):
    """A turn of a session has ended and all its tokens were sent; the session goes on.

    `output_tokens` were sent in this turn, and the first `kept_tokens` of them stay: `context_tokens` is all that the
    session now holds, what the next input is appended to. When the turn began it held `prompt_tokens`, of which
    `cached_tokens` were in the KV cache.
    """

    request_id: str
    turn: int
    reason: TurnReason
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    kept_tokens: int = 0
    context_tokens: int = 0
    cached_tokens: int = 0


class SessionResumed(Message, frozen=True, kw_only=True):
    """The client of a session was lost and is back, as another start or on another connection.

    What comes next begins with the first token of turn `turn`, the last that ended before the client was lost, or the
    first; all that was received of this turn or later ones is void. Logprobs do not come again. `inputs` turns were
    received so far, with those that are refused by an `Error` that follows; later ones have to be sent again.
    """

    request_id: str
    turn: int
    inputs: int


# ---------------------------------------------------------------------------------------------------------------------
# Command bus: frontend → rank


class AddRequest(Message, frozen=True, kw_only=True):
    """Give a rank a request. `handle` is the frontend's number for it and its key there, with the frontend's index.

    `sequence` numbers this frontend's messages about work to this rank, from 1; `Load.acknowledged` answers it.
    `block_hashes` is the chain over the full prompt blocks (see `bus.prefix`), 16 bytes each.
    `output_token_ids` are tokens already sent to the client: output that is continued, not prompt.
    `resumable` opens a session, or takes up one that was lost in its turn `turn`: the prompt is then all its context.
    `adapter` is the identity of its LoRA adapter (see `Adapter`); empty is none.
    """

    handle: int
    sequence: int
    request_id: str
    prompt_token_ids: Ints
    sampling: Sampling
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    block_hashes: memoryview = EMPTY
    output_token_ids: Ints = EMPTY
    resumable: bool = False
    turn: int = 1
    mm_features: list[MultimodalFeature] = []
    adapter: str = ""

    def __post_init__(self) -> None:
        _check_words(prompt_token_ids=self.prompt_token_ids, output_token_ids=self.output_token_ids)


class AddRequests(Message, frozen=True, kw_only=True):
    """Several requests for a rank, as if each came by itself, in this order. Not for ranks of minor version 0."""

    requests: list[AddRequest]


class AppendInput(Message, frozen=True, kw_only=True):
    """Next turn of a session, or with `close` its end.

    It is taken when the turns before it have ended. `sampling` replaces the session's whole for this turn; None is that
    of its `AddRequest`. A close waits for the turn that runs; what else it holds is ignored. Refused with `Error`.
    """

    handle: int
    sequence: int
    prompt_token_ids: Ints = EMPTY
    sampling: Sampling | None = None
    close: bool = False
    mm_features: list[MultimodalFeature] = []

    def __post_init__(self) -> None:
        _check_words(prompt_token_ids=self.prompt_token_ids)


class StopTurn(Message, frozen=True, kw_only=True):
    """Stop a session's turn `turn` if it has not ended, and keep its first `n` output tokens, or all if it has fewer.

    Answered by its `TurnEnded` with reason interrupted, or by `Error`. Tokens of it that come later are dropped.
    """

    handle: int
    sequence: int
    turn: int
    n: int


class AbortRequests(Message, frozen=True, kw_only=True):
    """End requests of this frontend; each is confirmed by its end in `Outputs` if it was still known."""

    handles: Ints

    def __post_init__(self) -> None:
        _check_words(handles=self.handles)


# Command bus: rank → frontend


class RequestStarted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request was scheduled for the first time, after `queued_s`, with `cached_tokens` from the prefix cache.

    Of a session, every turn is told: its `queued_s`, and how many tokens of the context had not to be computed.
    """

    handle: int
    queued_s: float = 0.0
    cached_tokens: int = 0


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request has ended; its handle is forgotten. When `reason` is error, `code` and `message` are as in `Error`.

    Of the codes, `invalid` says that the request can never be served, `unavailable` that it may be tried again.
    """

    handle: int
    reason: FinishReason
    stop_reason: int | None = None
    code: str = ""
    message: str = ""


class TurnEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session's turn has ended: the `turn`th, from 1. The session waits for input, or goes on with what it has.

    Of the turn's output the first `kept_tokens` stay, all but the last token unless the client stopped the turn;
    `context_tokens` is all that the session holds, and what the next input is appended to.
    """

    handle: int
    turn: int
    reason: TurnReason
    stop_reason: int | None = None
    kept_tokens: int = 0
    context_tokens: int = 0


class Outputs(Message, frozen=True, kw_only=True):
    """What one step gave the requests of one frontend.

    `handles` [n]; `tokens` one after the other; `counts` [n] tokens of each, left out when each has one.
    A request in `turns` or `ended` may also have its last tokens here: tokens come first, then `turns`, then `ended`.
    In `logprobs` a request may be twice, first those of its prompt, then those of its tokens. Those of its prompt are
    all told before its first token or with it, in order, each once. A request in `pooled` is in `ended`, too.
    """

    step: int = 0
    handles: Ints = EMPTY
    tokens: Ints = EMPTY
    counts: Ints = EMPTY
    logprobs: list[Logprobs] = []
    started: list[RequestStarted] = []
    turns: list[TurnEnded] = []
    ended: list[RequestEnded] = []
    pooled: list[Pooled] = []

    def __post_init__(self) -> None:
        _check_words(handles=self.handles, tokens=self.tokens)
        if self.counts.nbytes:
            _check_lengths(self.handles.nbytes // 4, counts=self.counts)
        else:
            _check_lengths(self.handles.nbytes // 4, tokens=self.tokens)


class Load(Message, frozen=True, kw_only=True):
    """A rank's state, numbered, soon after every change that matters to routing.

    `acknowledged` is the last `sequence` received from the frontend this goes to: its work up to there is counted in.
    `counters` are totals since the rank's start: scheduler ones, and the bus's own (`bus_…`). They come once a second;
    in other reports they are left out.
    """

    number: int
    acknowledged: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    min_remaining_output: int | None = None
    used_blocks: int = 0
    num_blocks: int = 0
    pause_state: PauseState = "unpaused"
    draining: bool = False
    counters: dict[str, float] = {}


class KvEvents(Message, frozen=True, kw_only=True):
    """Prefix-cache changes of a rank, numbered; hashes of 16 bytes one after the other (see `bus.prefix`).

    With `snapshot`, `stored` is all there is, and what was known before is void. A gap in the numbers means a lost
    frame: what was known is void until the next snapshot.
    """

    number: int
    snapshot: bool = False
    stored: memoryview = EMPTY
    removed: memoryview = EMPTY


# Command bus: executor → frontend


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that is loaded: what requests call it, and the folder that it came from.

    `identity` stands for the name and all that is in the files: it is the adapter's name between processes, and a part
    of the names of its KV blocks, so that another adapter of the same name is another one.
    """

    name: str
    path: str
    identity: str


class ExecutorStatus(Message, frozen=True, kw_only=True):
    """What the executor serves and how it does. `counters` are totals since its start.

    `adapters` are those that requests may name.
    """

    model: str
    max_model_len: int
    num_blocks: int
    block_size: int
    counters: dict[str, float] = {}
    adapters: list[Adapter] = []


# ---------------------------------------------------------------------------------------------------------------------
# Step bus: executor → rank


class Adapters(Message, frozen=True, kw_only=True):
    """The adapters that rows may have from now on, by their identities; answered by `AdaptersHeld` with its `number`.

    Sent before `KvPool`, and whenever there are others.
    """

    number: int
    identities: list[str] = []


class KvPool(Message, frozen=True, kw_only=True):
    """What a rank may use, sent after `Welcome`: nothing is scheduled before it. Blocks are 0 … num_blocks - 1."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int


class StepResult(Message, frozen=True, kw_only=True):
    """What a step gave one rank: `tokens` in the order of the schedule's rows, `counts` [rows] of each.

    `counts` is left out when each row has one token. It is -1 where the row does not sample yet (its prompt is not
    complete), -2 where its logits were not numbers, and -3 where its prompt was pooled: `pooled` has the vector. A row
    with drafts has the tokens that it would have drawn one by one: drafts that were right, and one more. `logprobs` are
    owned by rows, and have as many positions as there are tokens. A row whose sampling asks for `prompt_logprobs` also
    has those of the prompt's tokens that come after the tokens it ran, whether it samples yet or not; set up anew, it
    has them again. With a `next_step`, what stood of the rank is void from this step on (`StandingSchedule`).
    """

    step: int
    tokens: Ints
    counts: Ints = EMPTY
    logprobs: list[Logprobs] = []
    pooled: list[Pooled] = []
    next_step: int | None = None

    def __post_init__(self) -> None:
        _check_words(tokens=self.tokens, counts=self.counts)


class Recalled(Message, frozen=True, kw_only=True):
    """Answer to the `Recall` with this `number`: nothing stands any more, and no step from `next_step` on was sent."""

    number: int
    next_step: int


# Step bus: rank → executor


class AdaptersHeld(Message, frozen=True, kw_only=True):
    """The rank takes no request with another adapter than the last `Adapters`, with this `number`, has.

    `identities` are those of others that unfinished requests have still; it is sent again when there are fewer.
    """

    number: int
    identities: list[str] = []


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request enters a row, in full. `num_computed_tokens` of its prompt are in its blocks already.

    `adapter` is the identity of its adapter, empty for none.
    """

    row: int
    request_id: str
    prompt_token_ids: Ints
    block_ids: Ints
    sampling: Sampling
    num_computed_tokens: int = 0
    adapter: str = ""

    def __post_init__(self) -> None:
        _check_words(prompt_token_ids=self.prompt_token_ids, block_ids=self.block_ids)


class ResumeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request enters a row again after preemption or recovery.

    `token_ids` is everything so far, the last `num_output_tokens` of them output. `adapter` as in `NewRow`.
    """

    row: int
    request_id: str
    token_ids: Ints
    num_output_tokens: int
    block_ids: Ints
    sampling: Sampling
    num_computed_tokens: int = 0
    adapter: str = ""

    def __post_init__(self) -> None:
        _check_words(token_ids=self.token_ids, block_ids=self.block_ids)


class ContinueRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session's next turn: the last `drop` tokens of the row go, `token_ids` come, and output counts from zero.

    The row keeps its adapter.
    """

    row: int
    token_ids: Ints
    drop: int
    sampling: Sampling

    def __post_init__(self) -> None:
        _check_words(token_ids=self.token_ids)


class PartialSchedule(Message, frozen=True, kw_only=True):
    """One rank's part of a step, in deltas.

    `new`, `resumed`, `continued` set rows up; then `rows` [n] run `num_tokens` [n] tokens each (left out: one each),
    after `block_ids` [m] were appended to the block tables of `block_rows` [m], in order. With `again`, and then
    without `rows`, `num_tokens` and rows to set up, the rows of this rank's last schedule run one token each. `more`
    says that this rank expects to send another right after it has this one's result.

    Of the tokens of each row the last `num_drafts` [n] (left out: none) are drafts, which come after all that the row
    has; `drafts` holds them one after the other, or is left out where the executor has a draft model to draw them. The
    step draws the row's next token, and one after each draft as if it were right; the result has those up to the first
    that is not the draft in its place. That is how far the row has come then, and until then no schedule may name it,
    but to set it up anew.

    `mask_rows` [k] draw only tokens that `masks` allow, ceil(vocabulary / 32) int32 for each: bit t % 32 of word
    t // 32 says whether it may be token t. A row comes once for each token that it draws, in their order.

    At least one row runs, and `step` grows from schedule to schedule. Answered by the `StepResult` with the same
    `step`, or by an `Error` with code ``schedule_refused`` and that `step`: then nothing of it was run and all rows of
    the rank are void, so that what is to run on has to be set up again (`ResumeRow`). Steps sent before it are not
    affected and have their results; a step sent after it that names a void row is refused as well.
    """

    step: int
    rows: Ints = EMPTY
    again: bool = False
    num_tokens: Ints = EMPTY
    num_drafts: Ints = EMPTY
    drafts: Ints = EMPTY
    block_rows: Ints = EMPTY
    block_ids: Ints = EMPTY
    new: list[NewRow] = []
    resumed: list[ResumeRow] = []
    continued: list[ContinueRow] = []
    more: bool = False
    mask_rows: Ints = EMPTY
    masks: Ints = EMPTY

    def __post_init__(self) -> None:
        _check_words(rows=self.rows, block_rows=self.block_rows, drafts=self.drafts)
        _check_words(mask_rows=self.mask_rows, masks=self.masks)
        if self.again and (self.rows.nbytes or self.new or self.resumed or self.continued or self.mask_rows.nbytes):
            raise ValueError("`again` is for schedules without `rows`, `new`, `resumed`, `continued` and `mask_rows`")
        for name, array in (("num_tokens", self.num_tokens), ("num_drafts", self.num_drafts)):
            if array.nbytes:
                _check_lengths(self.rows.nbytes // 4, **{name: array})
        _check_lengths(self.block_rows.nbytes // 4, block_ids=self.block_ids)


class StandingSchedule(Message, frozen=True, kw_only=True):
    """Steps `first_step`, `first_step` + 1, … of one rank, `num_steps` of them, each as with `PartialSchedule.again`.

    They follow the rank's last step, or what stands already. Each stands until the one before it, or with
    `async_depth` 2 the one before that, has come back, and each row has a token that is not in `stop_token_ids`; then
    it counts as sent. If a row has not, what still stands is void, and so is what comes from a rank that had not seen
    that result: `after` is the last whose result it had. The `StepResult` has a `next_step` then, if the rank's last
    schedule was of this kind. Before any other schedule the rank takes back what stands by `Recall`.

    In each step `num_blocks` [num_steps] blocks are begun: `block_ids` [m] by `block_rows` [m], step after step. `more`
    is that of the last step; a step before it always has more after it.
    """

    first_step: int
    num_steps: int
    after: int
    num_blocks: Ints
    block_rows: Ints = EMPTY
    block_ids: Ints = EMPTY
    stop_token_ids: Ints = EMPTY
    more: bool = False

    def __post_init__(self) -> None:
        _check_words(block_rows=self.block_rows, stop_token_ids=self.stop_token_ids)
        if not 1 <= self.num_steps <= MOST_STANDING_STEPS:
            raise ValueError(f"`num_steps` must be from 1 to {MOST_STANDING_STEPS}")
        _check_lengths(self.num_steps, num_blocks=self.num_blocks)
        _check_lengths(self.block_rows.nbytes // 4, block_ids=self.block_ids)


class Recall(Message, frozen=True, kw_only=True):
    """Void what stands; answered by `Recalled` with the same `number`, whether anything still stands or not."""

    number: int


# ---------------------------------------------------------------------------------------------------------------------
# Follower bus: executor → executor 0


class Ready(Message, frozen=True, kw_only=True):
    """The sender has all that steps need. `programs` stands for what it runs: it is the same in all, or none can."""

    programs: str


class Failed(Message, frozen=True, kw_only=True):
    """The sender's device cannot go on."""

    reason: str


class AdapterRead(Message, frozen=True, kw_only=True):
    """Answer to the `ReadAdapter` with this number: the adapter's identity, or a sentence that says why it has none."""

    number: int
    identity: str = ""
    fault: str = ""


# Follower bus: executor 0 → executor


class ReadAdapter(Message, frozen=True, kw_only=True):
    """Read the adapter in the folder `path` and bring it to the devices; answered by `AdapterRead`."""

    number: int
    name: str
    path: str


class PlaceAdapter(Message, frozen=True, kw_only=True):
    """Put the adapter that was read with this number into a slot, between the steps before and after; 0: forget it."""

    number: int
    slot: int


class RowSetup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of all ranks' (rank × max_num_seqs + the rank's row) begins, resumes or continues.

    `token_ids` go to positions `start`, `start` + 1, …; what lies at `prompt_len` and after is output. `adapter` is the
    slot of its adapter, 0 for none.
    """

    row: int
    start: int
    token_ids: Ints
    prompt_len: int
    sampling: Sampling
    adapter: int = 0

    def __post_init__(self) -> None:
        _check_words(token_ids=self.token_ids)


class MergedStep(Message, frozen=True, kw_only=True):
    """A step of all ranks, to be run after that with the number before.

    After `setups`, `rows` [n] run `num_tokens` [n] tokens each from `positions` [n] on; `samples` [n] is 1 for each
    that draws a token, else 0. `num_drafts` [n] (left out: none) and `drafts` are as in `PartialSchedule`, and so are
    `masks`, of the sequences in the places `mask_places` [k] of the step. `block_ids` are the block tables, one row of
    `table_width` after the other. With `again`, the step before runs again, where it ended, and only what is new of its
    tables is here: `block_ids` [m] at `block_places` [m], counted through the rows of the table as it is now; what is
    not named is as before, or 0.
    """

    number: int
    table_width: int
    again: bool = False
    setups: list[RowSetup] = []
    rows: Ints = EMPTY
    positions: Ints = EMPTY
    num_tokens: Ints = EMPTY
    samples: Ints = EMPTY
    num_drafts: Ints = EMPTY
    drafts: Ints = EMPTY
    mask_places: Ints = EMPTY
    masks: Ints = EMPTY
    block_places: Ints = EMPTY
    block_ids: Ints = EMPTY

    def __post_init__(self) -> None:
        count = self.rows.nbytes // 4
        _check_words(rows=self.rows, drafts=self.drafts, mask_places=self.mask_places, masks=self.masks)
        _check_lengths(count, positions=self.positions, num_tokens=self.num_tokens, samples=self.samples)
        if self.num_drafts.nbytes:
            _check_lengths(count, num_drafts=self.num_drafts)
        if self.again:
            if count or self.setups or self.masks.nbytes:
                raise ValueError("`again` is for steps without `rows`, `setups` and `masks`")
            _check_lengths(self.block_places.nbytes // 4, block_ids=self.block_ids)
        else:
            _check_lengths(count * self.table_width, block_ids=self.block_ids)


class EndOfSteps(Message, frozen=True, kw_only=True):
    """No step comes any more: the executor was told to shut down, and all its processes end in an orderly way."""


# ---------------------------------------------------------------------------------------------------------------------
# Who may send what: one union per direction

CLIENT_TO_FRONTEND = Hello | Heartbeat | Goodbye | Error | Generate | Embed | Append | EndTurn | Abort | CommandRequest
FRONTEND_TO_CLIENT = (
    Welcome
    | Heartbeat
    | Goodbye
    | Error
    | Delta
    | TokenDeltas
    | TurnFinished
    | Finished
    | Embedding
    | SessionResumed
    | Reply
)
FRONTEND_TO_ENGINE = (
    Welcome
    | Heartbeat
    | Goodbye
    | Error
    | AddRequest
    | AddRequests
    | AppendInput
    | StopTurn
    | AbortRequests
    | CommandRequest
)
ENGINE_TO_FRONTEND = Hello | Heartbeat | Goodbye | Error | Outputs | Reply | Load | KvEvents | ExecutorStatus
EXECUTOR_TO_RANK = Welcome | Heartbeat | Goodbye | Error | Adapters | KvPool | StepResult | Recalled
RANK_TO_EXECUTOR = Hello | Heartbeat | Goodbye | Error | AdaptersHeld | PartialSchedule | StandingSchedule | Recall
FOLLOWER_TO_EXECUTOR = Hello | Heartbeat | Goodbye | Error | Ready | Failed | AdapterRead
EXECUTOR_TO_FOLLOWER = Welcome | Heartbeat | Goodbye | Error | ReadAdapter | PlaceAdapter | MergedStep | EndOfSteps
