"""The requests this frontend answers for: whose they are, where they run, and what their clients have been sent."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bus.core import Peer
from bus.messages import Ints, Sampling
from bus.wire import unpack_ints

if TYPE_CHECKING:
    from frontend.session import Session
    from frontend.steady import SteadyOutputs

MAX_HANDLE = 2**31 - 1


@dataclass(slots=True)
class Entry:
    """One unfinished sequence. `owner` is the client it is for, or None for the HTTP side.

    `index` is its number among the children of `request_id`. `wanted` turns false when nobody waits for it any more and
    only the rank's confirmation is awaited, and while the client of a session is away. Of a session, output and cached
    tokens are those of the running turn.
    """

    handle: int
    owner: Peer | None
    request_id: str
    index: int
    rank: int
    prompt_token_ids: Ints
    sampling: Sampling
    cached_tokens: int = 0
    wanted: bool = True
    session: "Session | None" = None
    steady: "SteadyOutputs | None" = None
    """Who keeps its newest tokens, if anybody does; `steady_since` is the first of the kept steps that it was in."""
    steady_since: int = 0
    _output: bytearray = field(default_factory=bytearray)

    @property
    def output(self) -> bytearray:
        """The tokens sent so far, raw int32."""
        if self.steady is not None:
            self.steady.settle()
        return self._output

    def add_output(self, tokens: Ints | bytes) -> None:
        """Note that these tokens were sent."""
        self._output += tokens

    def clear_output(self) -> None:
        """A turn has ended: what it gave is the session's now."""
        self._output = bytearray()

    def on_its_own(self) -> None:
        """Whom its tokens are for is about to change: it is no longer served together with others."""
        if self.steady is not None:
            self.steady.leave()

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_ids.nbytes // 4

    @property
    def num_output_tokens(self) -> int:
        return len(self._output) // 4 + (self.steady.pending(self) if self.steady is not None else 0)


Key = tuple[Peer | None, str]
"""Who asked, and the id it gave: a request, with all its children."""


class Ledger:
    """Owns the entries, by handle and by request."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._requests: dict[Key, list[int]] = {}
        self._next_handle = 1

    def __len__(self) -> int:
        return len(self._entries)

    def new_handle(self) -> int:
        """A handle no unfinished request has."""
        while self._next_handle in self._entries:
            self._advance()
        handle = self._next_handle
        self._advance()
        return handle

    def add(self, entry: Entry) -> None:
        """Remember a sequence from now on."""
        self._entries[entry.handle] = entry
        self._requests.setdefault((entry.owner, entry.request_id), []).append(entry.handle)

    def get(self, handle: int) -> Entry | None:
        """The sequence with this handle, if it is unfinished."""
        return self._entries.get(handle)

    def find(self, handles: Ints | bytes) -> list[Entry | None]:
        """The sequences with these handles, None for each that is not unfinished."""
        return list(map(self._entries.get, unpack_ints(handles).tolist()))

    def remove(self, entry: Entry) -> None:
        """Forget a sequence: it has ended."""
        del self._entries[entry.handle]
        self._forget_request(entry)

    def give(self, entry: Entry, owner: Peer) -> None:
        """Make a sequence another start's of its client."""
        self._forget_request(entry)
        entry.on_its_own()
        entry.owner = owner
        self._requests.setdefault((owner, entry.request_id), []).append(entry.handle)

    def _forget_request(self, entry: Entry) -> None:
        key = (entry.owner, entry.request_id)
        handles = self._requests[key]
        handles.remove(entry.handle)
        if not handles:
            del self._requests[key]

    def of_request(self, owner: Peer | None, request_id: str) -> list[Entry]:
        """The unfinished sequences of a request, in the order they were added; empty if it is unknown."""
        return [self._entries[handle] for handle in self._requests.get((owner, request_id), ())]

    def of_owner(self, owner: Peer) -> list[Entry]:
        """The unfinished sequences of a client."""
        return [entry for entry in self._entries.values() if entry.owner == owner]

    def of_rank(self, rank: int) -> list[Entry]:
        """The unfinished sequences on a rank."""
        return [entry for entry in self._entries.values() if entry.rank == rank]

    def _advance(self) -> None:
        self._next_handle = self._next_handle % MAX_HANDLE + 1


def split_by_counts(tokens: Ints, counts: "np.ndarray | None", count: int) -> list[Ints]:
    """One view per sequence of the tokens of all of them; `counts` None means one each."""
    view = tokens.cast("B")
    if counts is None:
        return [view[4 * i : 4 * i + 4] for i in range(count)]
    ends = np.cumsum(counts) * 4
    return [view[end - 4 * n : end] for end, n in zip(ends.tolist(), counts.tolist(), strict=True)]
