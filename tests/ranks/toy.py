"""A model and an executor for tests: exact about rows, positions and blocks, and quick.

The toy model's next token is a hash of all tokens before it, so any way of scheduling a request gives the same tokens.
The toy KV cache holds at each place a hash of the tokens up to there; before a row runs, everything it attends to must
be in its blocks. The real executor's merge looks at every schedule too, and must see the same positions and blocks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from bus.messages import EMPTY, AddRequest, ContinueRow, KvPool, PartialSchedule, Sampling, StepResult
from bus.wire import pack_ints, unpack_ints
from executor.merge import Limits, Merger, Part
from executor.rows import Rows

VOCAB = 50

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


def generate(
    prompt: list[int], sampling: Sampling, max_model_len: int, model: NextToken = next_token
) -> tuple[list[int], str]:
    """What a request must give, and why it ends."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        token = model(tokens)
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
    output: list[int] = (),  # type: ignore[assignment]
    priority: int = 0,
    resumable: bool = False,
    salt: str = "",
    **sampling: object,
) -> AddRequest:
    return AddRequest(
        handle=handle,
        sequence=handle + 1,
        request_id=f"r{handle}",
        prompt_token_ids=pack_ints(prompt),
        output_token_ids=pack_ints(list(output)) if output else EMPTY,
        sampling=Sampling(seed=0, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        priority=priority,
        cache_salt=salt,
        resumable=resumable,
    )


@dataclass
class _Row:
    tokens: list[int]
    position: int
    blocks: list[int]


@dataclass
class ToyExecutor:
    """Runs partial schedules of one rank at once, in order; results are taken from `results` when the test wants."""

    pool: KvPool
    max_num_seqs: int
    max_num_batched_tokens: int
    model: NextToken = next_token
    most_drafts: int = 0
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

    def __post_init__(self) -> None:
        pool = self.pool
        limits = Limits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            pool.max_model_len,
            pool.vocab_size,
            [pool.num_blocks],
            most_drafts=self.most_drafts,
        )
        self.merger = Merger(Rows(1, self.max_num_seqs, pool.max_model_len, pool.block_size), limits)

    def run(self, schedule: PartialSchedule) -> None:
        rows = self.last_rows = self.last_rows if schedule.again else unpack_ints(schedule.rows).tolist()
        counts = unpack_ints(schedule.num_tokens).tolist() or [1] * len(rows)
        self.again += schedule.again
        assert rows
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_num_seqs for row in rows)
        assert all(count > 0 for count in counts)
        assert sum(counts) <= self.max_num_batched_tokens
        for new in schedule.new:
            self._enter(new.row, unpack_ints(new.prompt_token_ids), new.block_ids, new.num_computed_tokens)
        for resume in schedule.resumed:
            self.resumed += 1
            self._enter(resume.row, unpack_ints(resume.token_ids), resume.block_ids, resume.num_computed_tokens)
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
        drafts = [[left.pop(0) for _ in range(number)] for number in tried]
        tokens = [self._run_row(*item) for item in zip(rows, counts, drafts, strict=True)]
        assert merged.samples.tolist() == [drawn != [-1] for drawn in tokens]
        for row, table in zip(rows, merged.block_tables, strict=True):
            used = -(-self.rows[row].position // self.pool.block_size)
            assert table[:used].tolist() == self.rows[row].blocks[:used]
        self.in_flight_rows.append(rows)
        self.in_flight_parts.append(part)
        flat = [token for drawn in tokens for token in drawn]
        numbers = [len(drawn) for drawn in tokens] if any(drafts) else []
        self.results.append(StepResult(step=schedule.step, tokens=pack_ints(flat), counts=pack_ints(numbers)))

    def take(self) -> StepResult:
        self.in_flight_rows.popleft()
        part, result = self.in_flight_parts.popleft(), self.results.popleft()
        if result.counts.nbytes:
            self.merger.judged([part], unpack_ints(result.counts))
        return result

    def _enter(self, row: int, tokens: object, block_ids: object, num_computed: int) -> None:
        assert not any(row in named for named in self.in_flight_rows), f"row {row} is named by a step in flight"
        blocks = unpack_ints(block_ids).tolist()  # type: ignore[arg-type]
        assert all(0 <= block < self.pool.num_blocks for block in blocks)
        self.cached += num_computed
        self.rows[row] = _Row(list(tokens.tolist()), num_computed, blocks)  # type: ignore[attr-defined]

    def _continue(self, more: ContinueRow) -> None:
        self.continued += 1
        row = self.rows[more.row]
        assert more.drop <= len(row.tokens)
        kept = len(row.tokens) - more.drop
        row.tokens[kept:] = unpack_ints(more.token_ids).tolist()
        row.position = min(row.position, kept)

    def _run_row(self, number: int, count: int, drafts: list[int]) -> list[int]:
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
        row.position = end - len(drafts)
        if end < len(tokens):
            return [-1]
        drawn = []
        for draft in (*drafts, None):
            drawn.append(self.model(row.tokens))
            row.tokens.append(drawn[-1])
            if drawn[-1] != draft:
                break
            row.position += 1
        self.accepted += len(drawn) - 1
        self.rejected += len(drafts) - len(drawn) + 1
        return [-2] if number in self.nan_rows else drawn
