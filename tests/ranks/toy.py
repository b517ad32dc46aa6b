"""A model and an executor for tests: exact about rows, positions and blocks, and quick.

The toy model's next token is a hash of all tokens before it, so any way of scheduling a request gives the same tokens.
The toy KV cache holds at each place a hash of the tokens up to there; before a row runs, everything it attends to must
be in its blocks. The real executor's merge looks at every schedule too, and must see the same positions and blocks.
"""

import json
import string
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from bus.messages import (
    EMPTY,
    AddRequest,
    ContinueRow,
    Grammar,
    KvPool,
    Logprobs,
    NewRow,
    PartialSchedule,
    Pooled,
    Pooling,
    Recall,
    Recalled,
    ResumeRow,
    Sampling,
    StandingSchedule,
    StepResult,
)
from bus.wire import pack_floats, pack_ints, unpack_ints
from executor.checks import Limits
from executor.merge import Merger
from executor.rows import Rows
from executor.standing import Standing
from executor.step import Part
from tests.tiny_model import SPECIAL, write_tiny_llama, write_tokenizer

CHARACTERS = '{}[]",:-.!' + string.digits + string.ascii_lowercase
VOCAB = len(SPECIAL) + len(CHARACTERS) + 1
"""50: special ones, these characters, and the space, which tokenizers write otherwise."""

NextToken = Callable[[list[int]], int]


def prefix_hashes(tokens: list[int]) -> list[bytes]:
    """For each position, a hash of the tokens up to and with it."""
    hashes = []
    parent = b""
    for token in tokens:
        parent = blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()
        hashes.append(parent)
    return hashes


def next_token(tokens: list[int]) -> int:
    return prefix_hashes(tokens)[-1][0] % VOCAB


def next_repeating(tokens: list[int]) -> int:
    """Of a model that soon repeats itself, so that drafts found in the tokens are right more often than not."""
    state = (tokens[-1] % 3, tokens[-2] % 3 if len(tokens) > 1 else 0, len(tokens) % 31 == 0)
    return blake2b(repr(state).encode(), digest_size=1).digest()[0] % VOCAB


def logprobs_within(owner: int, tokens: list[int], position: int) -> Logprobs:
    """What the toy says of these tokens of a prompt, from `position` on: the value of each is where it stands."""
    count = len(tokens)
    return Logprobs(
        owner=owner,
        positions=count,
        token_ids=pack_ints([token + other for token in tokens for other in (0, 1)]),
        values=pack_floats([-float(position + place) for place in range(count) for _ in (0, 1)]),
        ranks=pack_ints(range(position, position + count)),
        prompt_position=position,
    )


def vector_of(tokens: list[int], kind: str) -> list[float]:
    """What the toy pools a prompt to: a number that follows from its last token's prefix, or from all of them."""
    numbers = [float(name[0]) for name in prefix_hashes(tokens)]
    return [numbers[-1] if kind == "last" else sum(numbers)]


def allowed_token(token: int, mask: bytes) -> int:
    """The token, or if the mask does not allow it, the next that it does."""
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:VOCAB]
    assert allowed.any()
    return int(next(other % VOCAB for other in range(token, token + VOCAB) if allowed[other % VOCAB]))


def write_vocabulary(folder: Path) -> Path:
    """A model folder as far as grammars need one: the toy's tokens, and which of them ends a text."""
    write_tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    write_tokenizer(folder, {token: place for place, token in enumerate([*SPECIAL, *CHARACTERS, "\u0120"])})
    return folder


GRAMMARS = (
    Grammar(kind="regex", spec="[a-e]{2,9}(-[0-9]{1,3})*!"),
    Grammar(kind="choice", spec='["yes", "yellow", "no"]'),
    Grammar(kind="json", spec='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
)


def generate(
    prompt: list[int],
    sampling: Sampling,
    max_model_len: int,
    model: NextToken = next_token,
    matcher: Any = None,
) -> tuple[list[int], str]:
    """What a request must give, and why it ends. `matcher` is at the beginning of its grammar."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        token = model(tokens)
        if matcher is not None:
            token = allowed_token(token, matcher.masks([])[0])
            assert matcher.accept([token])
        tokens.append(token)
        output.append(token)
        if token == sampling.eos_token_id or token in sampling.stop_token_ids:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return output, "length"


def request(
    handle: int,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    pooling: str | None = None,
    output: list[int] = (),  # type: ignore[assignment]
    priority: int = 0,
    resumable: bool = False,
    salt: str = "",
    adapter: str = "",
    **sampling: object,
) -> AddRequest:
    """With `pooling`, which is a kind, the prompt is pooled."""
    pools = None if pooling is None else Pooling(kind=pooling)  # type: ignore[arg-type]
    return AddRequest(
        handle=handle,
        sequence=handle + 1,
        request_id=f"r{handle}",
        prompt_token_ids=pack_ints(prompt),
        output_token_ids=pack_ints(list(output)) if output else EMPTY,
        sampling=Sampling(seed=0, max_tokens=1 if pools else max_tokens, pooling=pools, **sampling),  # type: ignore[arg-type]
        priority=priority,
        cache_salt=salt,
        resumable=resumable,
        adapter=adapter,
    )


@dataclass
class _Row:
    tokens: list[int]
    position: int
    blocks: list[int]
    constrained: bool
    prompt: list[int]
    """Where log-probabilities of it are asked for."""
    pooling: str
    """The kind, if it is pooled."""
    sum: float = 0.0
    """Of the tokens that ran, see `vector_of`."""


@dataclass
class ToyExecutor:
    """Runs partial schedules of one rank at once, in order; results are taken from `results` when the test wants."""

    pool: KvPool
    max_num_seqs: int
    max_num_batched_tokens: int
    model: NextToken = next_token
    most_drafts: int = 0
    draws_drafts: bool = False
    """Whether it has a draft model, which is often right."""
    async_depth: int = 1
    """Steps that stand begin until there are so many without result."""
    standing: Standing = field(default_factory=Standing)
    last_step: int = -1
    results: deque[StepResult] = field(default_factory=deque)
    rows: dict[int, _Row] = field(default_factory=dict)
    kv: dict[tuple[int, int], bytes] = field(default_factory=dict)
    last_rows: list[int] = field(default_factory=list)
    in_flight_rows: deque[list[int]] = field(default_factory=deque)
    in_flight_parts: deque[Part] = field(default_factory=deque)
    nan_rows: set[int] = field(default_factory=set)
    resumed: int = 0
    again: int = 0
    continued: int = 0
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    masked: int = 0
    prompt_positions: int = 0
    pooled: int = 0

    def __post_init__(self) -> None:
        pool = self.pool
        limits = Limits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            pool.max_model_len,
            pool.vocab_size,
            [pool.num_blocks],
            most_drafts=self.most_drafts,
            draws_drafts=self.draws_drafts,
        )
        self.merger = Merger(Rows(1, self.max_num_seqs, pool.max_model_len, pool.block_size), limits, {"A": 1, "B": 2})
        self.adapters: list[tuple[str, str, str]] = []
        """Which adapter rows were set up with: how, by which request."""

    def stand(self, schedule: StandingSchedule) -> None:
        assert not self.standing.fault_of(schedule)
        assert schedule.first_step == 1 + (self.standing.last_step if self.standing else self.last_step)
        self.standing.add(schedule)
        self._go_on()

    def recall(self, recall: Recall) -> Recalled:
        self.standing.clear()
        return Recalled(number=recall.number, next_step=self.last_step + 1)

    def _go_on(self) -> None:
        while self.standing and len(self.results) < self.async_depth:
            self.run(self.standing.take())

    def run(self, schedule: PartialSchedule) -> None:
        self.last_step = schedule.step
        rows = self.last_rows = self.last_rows if schedule.again else unpack_ints(schedule.rows).tolist()
        counts = unpack_ints(schedule.num_tokens).tolist() or [1] * len(rows)
        self.again += schedule.again
        assert rows
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_num_seqs for row in rows)
        assert all(count > 0 for count in counts)
        assert sum(counts) <= self.max_num_batched_tokens
        for new in schedule.new:
            self._enter(new, unpack_ints(new.prompt_token_ids))
        for resume in schedule.resumed:
            self.resumed += 1
            self._enter(resume, unpack_ints(resume.token_ids))
        for more in schedule.continued:
            self._continue(more)
        entered = {item.row for item in (*schedule.new, *schedule.resumed)}
        assert entered | {item.row for item in schedule.continued} <= set(rows)
        for row, block in zip(
            unpack_ints(schedule.block_rows).tolist(), unpack_ints(schedule.block_ids).tolist(), strict=True
        ):
            assert row in rows
            assert row not in entered
            self.rows[row].blocks.append(block)
        part = self.merger.apply(0, schedule)
        merged = self.merger.merge([part])
        assert merged.positions.tolist() == [self.rows[row].position for row in rows]
        left = unpack_ints(schedule.drafts).tolist()
        tried = unpack_ints(schedule.num_drafts).tolist() or [0] * len(rows)
        drafts = [
            self._guess(row, number) if self.draws_drafts else [left.pop(0) for _ in range(number)]
            for row, number in zip(rows, tried, strict=True)
        ]
        masks = self._masks(schedule)
        logprobs = [found for row, count in zip(rows, counts, strict=True) if (found := self._prompt(row, count))]
        tokens = [
            self._run_row(row, count, own, masks.pop(row, []))
            for row, count, own in zip(rows, counts, drafts, strict=True)
        ]
        assert not masks
        assert merged.samples.tolist() == [drawn != [-1] for drawn in tokens]
        pooled = [
            Pooled(owner=row, vector=pack_floats([self.rows[row].sum]))
            for row, drawn in zip(rows, tokens, strict=True)
            if drawn == [-3]
        ]
        self.pooled += len(pooled)
        for row, table in zip(rows, merged.block_tables, strict=True):
            used = -(-self.rows[row].position // self.pool.block_size)
            assert table[:used].tolist() == self.rows[row].blocks[:used]
        self.in_flight_rows.append(rows)
        self.in_flight_parts.append(part)
        flat = [token for drawn in tokens for token in drawn]
        numbers = [len(drawn) for drawn in tokens] if any(drafts) else []
        packed = pack_ints(flat), pack_ints(numbers)
        self.results.append(
            StepResult(step=schedule.step, tokens=packed[0], counts=packed[1], logprobs=logprobs, pooled=pooled)
        )

    def _guess(self, row: int, count: int) -> list[int]:
        tokens = list(self.rows[row].tokens)
        for _ in range(count):
            tokens.append(self.model(tokens) if len(tokens) % 5 else 0)
        return tokens[len(tokens) - count :]

    def take(self) -> StepResult:
        self.in_flight_rows.popleft()
        part, result = self.in_flight_parts.popleft(), self.results.popleft()
        if result.counts.nbytes:
            self.merger.judged([part], unpack_ints(result.counts))
        if self.standing.end_by(result):
            return structs.replace(result, next_step=self.last_step + 1)
        self._go_on()
        return result

    def _prompt(self, number: int, count: int) -> Logprobs | None:
        row = self.rows[number]
        begin = row.position + 1
        tokens = row.prompt[begin : begin + count]
        self.prompt_positions += len(tokens)
        return logprobs_within(number, tokens, begin) if tokens else None

    def _masks(self, schedule: PartialSchedule) -> dict[int, list[bytes]]:
        """By row; none may be drawing in a step in flight, unless its turn has ended: masks follow from tokens."""
        rows = unpack_ints(schedule.mask_rows).tolist()
        begun = {item.row for item in schedule.continued}
        for named, part in zip(self.in_flight_rows, self.in_flight_parts, strict=True):
            drawing = [row for row, samples in zip(named, part.samples.tolist(), strict=True) if samples]
            assert begun.issuperset({*drawing} & {*rows})
        self.masked += len(rows)
        width = 4 * -(-VOCAB // 32)
        masks: dict[int, list[bytes]] = {}
        for i, row in enumerate(rows):
            masks.setdefault(row, []).append(bytes(schedule.masks[width * i : width * (i + 1)]))
        return masks

    def _enter(self, item: NewRow | ResumeRow, tokens: Any) -> None:
        row, num_computed = item.row, item.num_computed_tokens
        assert not any(row in named for named in self.in_flight_rows), f"row {row} is named by a step in flight"
        blocks = unpack_ints(item.block_ids).tolist()
        assert all(0 <= block < self.pool.num_blocks for block in blocks)
        self.cached += num_computed
        self.adapters.append((type(item).__name__, item.request_id, item.adapter))
        num_output = item.num_output_tokens if isinstance(item, ResumeRow) else 0
        asks = item.sampling.prompt_logprobs is not None
        prompt = tokens[: tokens.size - num_output].tolist() if asks else []
        pooling = "" if item.sampling.pooling is None else item.sampling.pooling.kind
        constrained = item.sampling.grammar is not None
        self.rows[row] = _Row(tokens.tolist(), num_computed, blocks, constrained, prompt, pooling)

    def _continue(self, more: ContinueRow) -> None:
        self.continued += 1
        row = self.rows[more.row]
        assert more.drop <= len(row.tokens)
        kept = len(row.tokens) - more.drop
        row.tokens[kept:] = unpack_ints(more.token_ids).tolist()
        row.position = min(row.position, kept)
        row.constrained = more.sampling.grammar is not None

    def _run_row(self, number: int, count: int, drafts: list[int], masks: list[bytes]) -> list[int]:
        row = self.rows[number]
        size = self.pool.block_size
        end = row.position + count
        tokens = [*row.tokens, *drafts]
        assert end <= len(tokens), "the row runs past its last known token"
        assert not drafts or end == len(tokens), "not all of a row's drafts run"
        assert len(row.blocks) == -(-end // size) or len(row.blocks) * size >= end
        hashes = prefix_hashes(tokens[:end])
        for position in range(row.position, end):
            self.kv[row.blocks[position // size], position % size] = hashes[position]
        for position in range(end):
            assert self.kv[row.blocks[position // size], position % size] == hashes[position], "wrong KV"
        if row.pooling:
            ran = [float(name[0]) for name in hashes[row.position : end]]
            row.sum = ran[-1] if row.pooling == "last" else row.sum + sum(ran)
        row.position = end - len(drafts)
        if end < len(tokens):
            assert not masks
            return [-1]
        if row.pooling:
            assert not masks
            assert not drafts
            return [-2] if number in self.nan_rows else [-3]
        assert len(masks) == (1 + len(drafts) if row.constrained else 0)
        drawn = []
        for place, draft in enumerate((*drafts, None)):
            token = self.model(row.tokens)
            drawn.append(allowed_token(token, masks[place]) if masks else token)
            row.tokens.append(drawn[-1])
            if drawn[-1] != draft:
                break
            row.position += 1
        self.accepted += len(drawn) - 1
        self.rejected += len(drafts) - len(drawn) + 1
        return [-2] if number in self.nan_rows else drawn
