"""A request as the native scheduler knows it, apart from what changes at every step (see `ranks.batch`)."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bus.messages import AddRequest, MultimodalFeature, Sampling
from bus.prefix import HASH_BYTES, chain_hash, feature_key, root_hash, split_hashes
from bus.wire import unpack_ints
from ranks.grammars import Matcher
from ranks.logprobs import PromptReport
from ranks.pooling import takes_all

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Turn:
    """What a session is to go on with: the input that came with the frontend's message `sequence`."""

    sequence: int
    tokens: Int32
    sampling: Sampling
    features: list[MultimodalFeature]
    added_at: float
    matcher: Matcher | None = None
    ticket: int = 0
    """Of the grammar that is being compiled for it; 0 if none is."""


@dataclass(slots=True)
class Session:
    """What a request is on top when it is a session; `opened_with` are the parameters of turns that bring none.

    `turns` wait for the present one to end; after them the session ends if it is `closing`.

    While it has no row, it keeps `blocks`; the first `computed` of its tokens are in them, and the first `num_named` of
    them have their names. `row` is the one it had before, as long as it can go on there: nobody else has had it, and
    the blocks are the same. The executor holds `row_tokens` tokens in it, the first `row_kept` of them the session's.
    """

    opened_with: Sampling
    turns: deque[Turn] = field(default_factory=deque)
    taken: Turn | None = None
    """The turn it is in, or was in last; None is the one that came with its beginning."""
    closing: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    num_named: int = 0
    row: int = -1
    row_tokens: int = 0
    row_kept: int = 0
    order: int = 0
    """Its place among those that wait, which it got when its last turn ended."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `number` counts requests in the order in which they came; `limit` is its length at the end.
    `name` is its id in single-step mode: the request's own, made unique.

    `tokens` (int32) is all there is of it, prompt first, while it has no row; in a row they are the row's.
    `names` are those of its full blocks, as far as they have been needed; the first hangs on `root`. `adapter` is the
    identity of its adapter, or empty.

    Of a session, everything is about its turn, the `turn`th: the prompt is all that was kept of those before, and the
    turn's input; output is the turn's. Between turns it is about the next, whose input is yet to come.
    """

    frontend: int
    handle: int
    request_id: str
    name: str
    number: int
    sampling: Sampling
    priority: int
    arrival_time: float
    added_at: float
    num_prompt: int
    limit: int
    tokens: Int32
    root: bytes
    adapter: str = ""
    names: list[bytes] = field(default_factory=list)
    row: int = -1
    matcher: Matcher | None = None
    """How far it has come in its grammar, if it has one."""
    ticket: int = 0
    """Of the grammar that is being compiled, for which it waits, in its place among those that wait; 0 if none is."""
    place: tuple[float, ...] = ()
    """What it is ordered by among those that wait (see `ranks.waiting`)."""
    has_run: bool = False
    num_preemptions: int = 0
    features: list[MultimodalFeature] = field(default_factory=list)
    """Other media in it, at their places in all of it."""
    turn: int = 1
    session: Session | None = None
    prompt_report: PromptReport | None = None
    """Where log-probabilities of the prompt are asked for: which of them were told."""

    @property
    def reads_cache(self) -> bool:
        """Whether it may take blocks from the prefix cache: log-probabilities and the mean need all of a prompt."""
        return self.sampling.prompt_logprobs is None and not takes_all(self.sampling)

    def name_next(self, tokens: bytes) -> bytes:
        """Name the block after those in `names`; its tokens are raw little-endian int32."""
        size = len(tokens) // 4
        begin = len(self.names) * size
        key = feature_key(self.features, begin, begin + size) if self.features else b""
        name = chain_hash(self.names[-1] if self.names else self.root, tokens, key)
        self.names.append(name)
        return name

    def name_blocks(self, count: int, tokens: Int32, block_size: int) -> list[bytes]:
        """Its `names`, at least `count` of them; `tokens` is the request from its first token on."""
        for begin in range(len(self.names) * block_size, count * block_size, block_size):
            self.name_next(tokens[begin : begin + block_size].tobytes())
        return self.names


def new_request(
    frontend: int, message: AddRequest, *, name: str, number: int, now: float, max_len: int, block_size: int
) -> Request:
    """The request that `message` asks for; it ends at `max_len` tokens at the latest."""
    prompt = unpack_ints(message.prompt_token_ids)
    tokens = prompt
    if message.output_token_ids.nbytes:
        tokens = np.concatenate([prompt, unpack_ints(message.output_token_ids)])
    named = message.block_hashes.nbytes == prompt.size // block_size * HASH_BYTES
    return Request(
        frontend=frontend,
        handle=message.handle,
        request_id=message.request_id,
        name=name,
        number=number,
        sampling=message.sampling,
        priority=message.priority,
        arrival_time=message.arrival_time,
        added_at=now,
        num_prompt=prompt.size,
        limit=prompt.size + 1 if message.sampling.pooling else min(prompt.size + message.sampling.max_tokens, max_len),
        tokens=tokens,
        root=root_hash(message.cache_salt, message.adapter),
        adapter=message.adapter,
        names=split_hashes(message.block_hashes) if named else [],
        features=message.mm_features,
        turn=message.turn,
        session=Session(message.sampling) if message.resumable else None,
        prompt_report=PromptReport.for_request(message),
    )
