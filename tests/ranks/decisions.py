"""What schedulers decide, in a form in which two of them can be compared, and the traces they decide on.

A trace is plain data: settings, and turns. A turn adds, aborts and so on, makes a step, may abort while the step is in
flight, and gives the step its tokens. Which token comes at which position is a function of the request's stream, so
both schedulers are told the same whatever they decide.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from bus.messages import AddRequest, AppendInput, Sampling
from bus.prefix import block_hashes
from bus.wire import pack_ints

VOCAB = 12


class Settings(NamedTuple):
    """What a scheduler is made with. `num_blocks` are usable ones."""

    policy: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool


class Add(NamedTuple):
    """A new request: `stream` is what its tokens are drawn from."""

    prompt: tuple[int, ...]
    stream: int
    max_tokens: int
    stop: tuple[int, ...] = ()
    eos: int | None = None
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    output: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    session: bool = False


class Append(NamedTuple):
    """The next input of the n-th request, if it is an unfinished session with room for it; or, empty, its close."""

    number: int
    tokens: tuple[int, ...]


class Abort(NamedTuple):
    """End the n-th request, if it is unfinished."""

    number: int


class Pause(NamedTuple):
    state: str


class Reset(NamedTuple):
    """Reset the prefix cache."""

    running: bool


Action = Add | Append | Abort | Pause | Reset


@dataclass(frozen=True, slots=True)
class Turn:
    """`before` and `during` the step; `drafts` are how many each request that can take any is given after it."""

    before: tuple[Action, ...] = ()
    during: tuple[Action, ...] = ()
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    settings: Settings
    turns: tuple[Turn, ...]
    seed: int = 0


class Entered(NamedTuple):
    """A request enters a row."""

    number: int
    num_computed: int
    blocks: tuple[int, ...]


class Decision(NamedTuple):
    """A step. Requests are numbered in the order in which they were added; blocks from 0."""

    scheduled: tuple[tuple[int, int], ...]
    """(number, tokens) in the order of the schedule."""
    new: tuple[Entered, ...]
    resumed: tuple[Entered, ...]
    given: tuple[tuple[int, tuple[int, ...]], ...]
    """(number, blocks) of those that ran before and got some."""
    drafts: tuple[tuple[int, tuple[int, ...]], ...]
    preempted: tuple[int, ...]


class Emitted(NamedTuple):
    """What a request gives after a step."""

    number: int
    tokens: tuple[int, ...]
    reason: str | None
    stop_reason: int | None


class State(NamedTuple):
    """What there is between steps."""

    running: tuple[int, ...]
    num_waiting: int
    free_blocks: tuple[int, ...]
    """In the order in which they will be given out."""
    names: frozenset[bytes]
    """Of the blocks that can be found."""


class Side(Protocol):
    """A scheduler under comparison."""

    def add(self, number: int, message: AddRequest) -> None: ...
    def append(self, number: int, message: AppendInput) -> bool: ...
    def abort(self, number: int) -> bool: ...
    def pause(self, state: str) -> None: ...
    def reset(self, running: bool) -> bool: ...
    def schedule(self) -> Decision: ...
    def update(self, sampled: dict[int, list[int]]) -> tuple[Emitted, ...]: ...
    def set_drafts(self, drafts: dict[int, list[int]]) -> None: ...
    def state(self) -> State: ...


def token_at(seed: int, stream: int, position: int) -> int:
    """The token that a stream has at a position."""
    return (((seed * 31 + stream) * 1_000_003 + position) * 2_654_435_761 >> 13) % VOCAB


def message_for(number: int, add: Add, block_size: int) -> AddRequest:
    prompt = pack_ints(list(add.prompt))
    return AddRequest(
        handle=number,
        sequence=number + 1,
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        sampling=Sampling(
            seed=0,
            max_tokens=add.max_tokens,
            eos_token_id=add.eos,
            stop_token_ids=list(add.stop),
            prompt_logprobs=add.prompt_logprobs,
        ),
        arrival_time=add.arrival,
        priority=add.priority,
        cache_salt=add.salt,
        block_hashes=memoryview(block_hashes(prompt, block_size, add.salt)),
        output_token_ids=pack_ints(list(add.output)),
        resumable=add.session,
    )


@dataclass(slots=True)
class _Sequence:
    """What the driver knows of a request: its tokens so far."""

    stream: int
    length: int
    is_session: bool = False
    queued: list[int] = field(default_factory=list)
    """How long the inputs are that wait for the turn before to end."""
    sleeps: bool = False
    closing: bool = False


@dataclass(slots=True)
class Driver:
    """Plays a trace on one scheduler and yields what it did, turn by turn."""

    trace: Trace
    side: Side
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    num_added: int = 0
    drafts: dict[int, list[int]] = field(default_factory=dict)
    is_full: bool = False
    """A session has come to `max_model_len`, or its next input has: vLLM's take that all the same."""

    def turn(self, turn: Turn) -> list[Any]:
        """Play one turn; what was decided, emitted and left."""
        done: list[Any] = [self._act(action) for action in turn.before]
        decision = self.side.schedule()
        done.append(decision)
        done += [self._act(action) for action in turn.during]
        drafts = dict(decision.drafts)
        entered = {item.number: item.num_computed for item in (*decision.new, *decision.resumed)}
        sampled = {}
        for number, count in decision.scheduled:
            sequence = self.sequences.get(number)
            if sequence is None:
                sampled[number] = [0]  # aborted during the step; it does not matter what comes
                continue
            if number in entered:
                self.computed[number] = entered[number]
            self.computed[number] += count
            tokens = self._sample(number, sequence, list(drafts.get(number, ())))
            self.computed[number] -= max(len(drafts.get(number, ())) - max(len(tokens) - 1, 0), 0) if tokens else 0
            sampled[number] = tokens
        emitted = self.side.update(sampled)
        done.append(emitted)
        for item in emitted:
            self.sequences[item.number].length += len(item.tokens)
            if item.reason is not None and self.sequences[item.number].is_session:
                self._end_turn(item.number)
            elif item.reason is not None:
                del self.sequences[item.number]
        proposals = self._propose(emitted, turn.drafts)
        if proposals:
            self.side.set_drafts(proposals)
        done.append(self.side.state())
        return done

    computed: dict[int, int] = field(default_factory=dict)

    def _act(self, action: Action) -> Any:
        match action:
            case Add():
                number = self.num_added
                self.num_added += 1
                length = len(action.prompt) + len(action.output)
                self.sequences[number] = _Sequence(action.stream, length, action.session)
                self.side.add(number, message_for(number, action, self.trace.settings.block_size))
                return None
            case Append(number, tokens):
                return self._append(number, tokens)
            case Abort(number):
                if number not in self.sequences:
                    return None
                del self.sequences[number]
                return self.side.abort(number)
            case Pause(state):
                self.side.pause(state)
                return None
            case Reset(running):
                return self.side.reset(running)

    def _append(self, number: int, tokens: tuple[int, ...]) -> Any:
        sequence = self.sequences.get(number)
        room = self.trace.settings.max_model_len
        if sequence is None or not sequence.is_session or sequence.closing:
            return None
        if sequence.length + sum(sequence.queued) + len(tokens) + 3 > room // 2 and tokens:
            return None  # vLLM does not look whether there is room
        message = AppendInput(handle=number, sequence=1, prompt_token_ids=pack_ints(list(tokens)), close=not tokens)
        ended = self.side.append(number, message)
        if not tokens:
            sequence.closing = True
            if sequence.sleeps:
                del self.sequences[number]
        elif sequence.sleeps:
            sequence.sleeps = False
            sequence.length += len(tokens)
        else:
            sequence.queued.append(len(tokens))
        return ended

    def _end_turn(self, number: int) -> None:
        """The last token goes, and what was appended comes."""
        sequence = self.sequences[number]
        self.is_full |= sequence.length >= self.trace.settings.max_model_len
        sequence.length -= 1
        if sequence.queued:
            sequence.length += sequence.queued.pop(0)
            self.is_full |= sequence.length >= self.trace.settings.max_model_len
        elif sequence.closing:
            del self.sequences[number]
        else:
            sequence.sleeps = True

    def _sample(self, number: int, sequence: _Sequence, drafts: list[int]) -> list[int]:
        """The tokens a step gives a request: none before it has computed all that is known, else drafts as far as
        they are right, and one more."""
        if self.computed[number] < sequence.length:
            return []
        tokens = []
        for draft in (*drafts, None):
            tokens.append(token_at(self.trace.seed, sequence.stream, sequence.length + len(tokens)))
            if draft != tokens[-1]:
                break
        return tokens

    def _propose(self, emitted: tuple[Emitted, ...], most: int) -> dict[int, list[int]]:
        """Drafts, right and wrong ones, for some of the requests that got tokens and go on."""
        proposals = {}
        for item in emitted:
            sequence = self.sequences.get(item.number)
            if sequence is None or item.reason is not None or not most:
                continue
            draw = random.Random(f"{self.trace.seed}/{item.number}/{sequence.length}")
            drafts = [
                token_at(self.trace.seed, sequence.stream, sequence.length + i) if draw.random() < 0.6 else VOCAB - 1
                for i in range(draw.randrange(most + 1))
            ]
            proposals[item.number] = drafts
        return proposals


@dataclass(slots=True)
class Mismatch(Exception):
    """Two schedulers differ."""

    trace: Trace
    turn: int
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"turn {self.turn}\n{show(self.trace)}\n\nleft:\n{_lines(self.left)}\nright:\n{_lines(self.right)}"


def compare(trace: Trace, left: Side, right: Side, over: Callable[[], bool] = lambda: False) -> list[list[Any]]:
    """Play a trace on both until it is `over`; what both did.

    Raises:
        Mismatch: they differ.
    """
    one, other = Driver(trace, left), Driver(trace, right)
    history = []
    for number, turn in enumerate(trace.turns):
        did = one.turn(turn)
        if over() or one.is_full:
            break
        also = other.turn(turn)
        if did != also:
            raise Mismatch(trace, number, did, also)
        history.append(did)
    return history


def show(trace: Trace) -> str:
    """A trace as the Python it can be written with."""
    turns = "\n".join(f"        {turn!r}," for turn in trace.turns)
    return f"Trace(\n    {trace.settings!r},\n    (\n{turns}\n    ),\n    {trace.seed},\n)"


def _lines(items: Any) -> str:
    return "\n".join(f"  {item!r}" for item in items) if isinstance(items, list) else f"  {items!r}"


def shrunk(trace: Trace, fails: Any) -> Trace:
    """A smaller trace that still fails: turns and actions are left out as long as it does."""
    size = max(len(trace.turns) // 2, 1)
    while True:
        begin = 0
        while begin < len(trace.turns):
            smaller = replace(trace, turns=trace.turns[:begin] + trace.turns[begin + size :])
            if fails(smaller):
                trace = smaller
            else:
                begin += size
        if size == 1:
            break
        size = max(size // 2, 1)
    for place in range(len(trace.turns)):
        for name in ("before", "during"):
            index = 0
            while index < len(getattr(trace.turns[place], name)):
                actions = getattr(trace.turns[place], name)
                turn = replace(trace.turns[place], **{name: actions[:index] + actions[index + 1 :]})
                smaller = replace(trace, turns=(*trace.turns[:place], turn, *trace.turns[place + 1 :]))
                if fails(smaller):
                    trace = smaller
                else:
                    index += 1
    return trace
