"""Which rank a new request goes to, from the load and KV events that the ranks publish: no round trip per request."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from bus.messages import KvEvents, Load
from bus.prefix import HASH_BYTES, split_hashes

AFFINITY_SLACK = 4
"""A rank may have this many requests more in flight than the least busy one, plus a quarter of that one's number,
before its cached prefixes no longer speak for it. So a popular prefix spreads over the ranks instead of piling up on
the one that computed it first."""


class Unroutable(Exception):
    """No rank can take the request; the text says why."""


class _Placed(NamedTuple):
    """Work sent to a rank that its reported load does not count yet."""

    sequence: int
    tokens: int


class RankView:
    """What this frontend knows of one rank: its last load, its prefix cache, and what it does not count yet."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self.available = False
        """Whether it takes new requests: it has told its load, has KV blocks, and is not drained."""
        self.pending_tokens = 0
        """Tokens it has yet to prefill."""
        self.in_flight = 0
        """Requests that wait or run on it."""
        self.row_frees_in = 0
        """Output tokens until a row is free at the latest known; 0 when nothing runs."""
        self.sequence = 0
        self._placed: deque[_Placed] = deque()
        self._placed_tokens = 0
        self._cached: set[bytes] = set()
        self._kv_number: int | None = None

    def place(self, tokens: int) -> int:
        """Count `tokens` as work sent to this rank; return the sequence number of the message that brings it."""
        self.sequence += 1
        self._placed.append(_Placed(self.sequence, tokens))
        self._placed_tokens += tokens
        self.pending_tokens += tokens
        self.in_flight += 1
        return self.sequence

    def see_load(self, load: Load) -> None:
        """Take a newer load report; an older one is ignored."""
        if self.load is not None:
            if load.number <= self.load.number:
                return
            if not load.counters:
                load = structs.replace(load, counters=self.load.counters)
        self.load = load
        while self._placed and self._placed[0].sequence <= load.acknowledged:
            self._placed_tokens -= self._placed.popleft().tokens
        self.available = load.num_blocks > 0 and not load.draining
        self.pending_tokens = load.pending_prefill_tokens + self._placed_tokens
        self.in_flight = load.running + load.waiting + len(self._placed)
        self.row_frees_in = load.min_remaining_output or 0

    def see_kv_events(self, events: KvEvents) -> None:
        """Follow the rank's prefix cache. After a gap nothing is known of it until the next snapshot."""
        if events.snapshot:
            self._cached = set(split_hashes(events.stored))
            self._kv_number = events.number
            return
        if self._kv_number is None or events.number != self._kv_number + 1:
            self._cached, self._kv_number = set(), None
            return
        self._kv_number = events.number
        self._cached.difference_update(split_hashes(events.removed))
        self._cached.update(split_hashes(events.stored))

    def cached_blocks(self, hashes: bytes) -> int:
        """How many blocks from the start of a prompt with these block names are in the prefix cache."""
        for start in range(0, len(hashes), HASH_BYTES):
            if hashes[start : start + HASH_BYTES] not in self._cached:
                return start // HASH_BYTES
        return len(hashes) // HASH_BYTES


class Router:
    """Chooses ranks. Each policy is one method; both skip ranks that do not take new requests."""

    def __init__(self, policy: str, frontend_index: int, block_size: int, rows: int) -> None:
        """`rows` is how many requests a rank can run at once (max_num_seqs)."""
        self._rows = rows
        self.ranks: dict[int, RankView] = {}
        self._policy = {"least_loaded": self._least_loaded, "round_robin": self._round_robin}[policy]
        self._frontend_index = frontend_index
        self._block_size = block_size
        self._turn = frontend_index

    def choose(self, prompt_tokens: int, hashes: bytes, pinned: int | None) -> tuple[int, int]:
        """The rank for a prompt of so many tokens and these block names, and the tokens it will have to prefill.

        Raises:
            Unroutable: the pinned rank, or every rank, takes no new requests.
        """
        if pinned is not None:
            if pinned not in self.ranks or not self.ranks[pinned].available:
                raise Unroutable(f"rank {pinned} takes no requests now; {self._available_words()}")
            rank = pinned
        else:
            candidates = [rank for rank in sorted(self.ranks) if self.ranks[rank].available]
            if not candidates:
                raise Unroutable("no rank takes requests now; try again when the engine is ready")
            rank = self._policy(candidates, prompt_tokens, hashes)
        return rank, self._to_prefill(rank, prompt_tokens, hashes)

    def _least_loaded(self, candidates: Sequence[int], prompt_tokens: int, hashes: bytes) -> int:
        """Minimise the resulting maximum load; ties: own load, requests in flight, how soon a row frees, rotation.

        Ranks whose rows are all taken come last: there a request waits, however little prefill is pending.
        """
        views = [self.ranks[rank] for rank in candidates]
        in_flight = [view.in_flight for view in views]
        pending = [view.pending_tokens for view in views]
        maximum, least_in_flight = max(pending), min(in_flight)
        most_in_flight = least_in_flight + AFFINITY_SLACK + least_in_flight // 4
        costs = []
        for rank, view, requests, tokens in zip(candidates, views, in_flight, pending, strict=True):
            own = tokens + self._to_prefill(rank, prompt_tokens, hashes if requests <= most_in_flight else b"")
            rotation = (rank - self._frontend_index) % len(self.ranks)
            costs.append((requests >= self._rows, max(own, maximum), own, requests, view.row_frees_in, rotation))
        return candidates[costs.index(min(costs))]

    def _round_robin(self, candidates: Sequence[int], prompt_tokens: int, hashes: bytes) -> int:
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]

    def _to_prefill(self, rank: int, prompt_tokens: int, hashes: bytes) -> int:
        """Tokens of the prompt that are not cached there; at least one, since the last is computed in any case."""
        return max(1, prompt_tokens - self.ranks[rank].cached_blocks(hashes) * self._block_size)

    def _available_words(self) -> str:
        available = [str(rank) for rank in sorted(self.ranks) if self.ranks[rank].available]
        return f"ranks that do: {', '.join(available)}" if available else "none does"
