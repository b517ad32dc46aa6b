"""What the ledger holds of a session: what its turns have left, its inputs still to come, and what must be told."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bus.core import Peer
from bus.messages import (
    EMPTY,
    Error,
    Finished,
    Generate,
    Ints,
    MultimodalFeature,
    Sampling,
    SessionResumed,
    TurnFinished,
)
from frontend.ledger import Entry

Client = tuple[str, int]
"""Whose a session is: the bus, and the client's index there, the same for each start of that client."""

CONTEXT_TOKENS = 16
"""How many tokens before a turn's first the detokenizer is given: more than one character or word spans."""


@dataclass(slots=True, eq=False)
class Input:
    """What a client has appended, or its close. `tokens` are None while they are made of its text.

    `number` is this frontend's. `sequence` is its number to the rank, once the rank was given it. `prefix` goes before
    the tokens that are being made.
    """

    number: int
    tokens: Ints | None
    sampling: Sampling | None = None
    close: bool = False
    features: list[MultimodalFeature] = field(default_factory=list)
    prefix: Ints = EMPTY
    sequence: int = 0

    @property
    def length(self) -> int:
        """Tokens, as far as they are known."""
        return 0 if self.tokens is None else self.tokens.nbytes // 4


@dataclass(slots=True)
class Told:
    """Something the client must not miss: `message`, after the turn's `tokens`, which come after `context`."""

    message: TurnFinished | Finished | Error
    tokens: Ints = EMPTY
    context: Ints = EMPTY


@dataclass(slots=True, eq=False)
class Session:
    """One session, as its frontend knows it.

    `peer` is the present start of its client, None while that is away (since `gone_since`); `returning` is a start that
    becomes it when the HTTP side has begun anew to make text. Inputs go from `unsent` (being tokenised, or behind one
    that is) to `appended` (the rank has them for later turns) to `running`. `context` is all that the turns before the
    running one have left; `turn` is the number of the running one or the last. `cut` is the token that the last turn
    sampled, and did not keep, when it ended for its length. `told` begins with the last turn's end that was sent.
    `adapter` is the identity of its adapter, or empty.
    """

    number: int
    client: Client
    request: Generate
    sampling: Sampling
    arrival_time: float
    peer: Peer | None
    over_seam: bool
    adapter: str = ""
    unsent: deque[Input] = field(default_factory=deque)
    appended: deque[Input] = field(default_factory=deque)
    running: Input | None = None
    entry: Entry | None = None
    turn: int = 0
    context: bytearray = field(default_factory=bytearray)
    cut: Ints = EMPTY
    told: deque[Told] = field(default_factory=deque)
    closing: bool = False
    over: bool = False
    gone_since: float = 0.0
    returning: Peer | None = None
    inputs_made: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def request_id(self) -> str:
        """The client's name for it."""
        return self.request.request_id

    @property
    def delivery(self) -> str:
        """Its name where output goes over the seam; the ids that vLLM makes end otherwise."""
        return f"{self.request_id}-session{self.number}" if self.over_seam else self.request_id

    @property
    def waits(self) -> bool:
        """Whether it has nothing to do until its client says something."""
        return self.running is None and not self.unsent and not self.appended

    def inputs(self) -> Iterator[Input]:
        """Those whose turn has not ended, in order."""
        if self.running is not None:
            yield self.running
        yield from self.appended
        yield from self.unsent

    def turn_of(self, wanted: Input) -> int:
        """The number of the turn that an input is for."""
        first = self.turn + (self.running is None)
        return first + next(place for place, one in enumerate(self.inputs()) if one is wanted)

    def last_input(self) -> int:
        """The number of the turn that the last input is for."""
        return self.turn - (self.running is not None) + sum(not one.close for one in self.inputs())

    def length(self) -> int:
        """Tokens it holds at least when all its inputs have had their turns."""
        return len(self.context) // 4 + sum(one.length for one in self.inputs())

    def tail(self) -> Ints:
        """The last tokens before the running turn's first."""
        recent = bytes(self.context[-4 * CONTEXT_TOKENS :])
        if self.running is not None and self.running.tokens is not None:
            recent += bytes(self.running.tokens[-4 * CONTEXT_TOKENS :])
        return memoryview(recent[-4 * CONTEXT_TOKENS :])

    def sent(self, message: TurnFinished | Finished | Error) -> None:
        """The client was sent this: what came before it need not be told again, and only a turn's end may have to."""
        if all(told.message != message for told in self.told):
            return
        while self.told[0].message != message:
            self.told.popleft()
        if not isinstance(message, TurnFinished):
            self.told.popleft()

    def resumed(self) -> SessionResumed:
        """What its client is told when it is back."""
        ends = [told.message.turn for told in self.told if isinstance(told.message, TurnFinished)]
        refused = sum(isinstance(told.message, Error) for told in self.told)
        first = ends[0] if ends else max(self.turn, 1)
        return SessionResumed(request_id=self.request_id, turn=first, inputs=self.last_input() + refused)
