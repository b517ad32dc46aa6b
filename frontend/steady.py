"""Steps that give as many tokens to each of their sequences: the step before says most of what is to be done for them.

Where the sequences are the same, all of it; where some have begun or ended, whose tokens are whose is found anew, but
no sequence is given its token by itself: the tokens are kept step by step, and sorted when somebody asks for them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bus.core import Effect, Peer
from bus.messages import EMPTY, Ints, Outputs
from bus.wire import pack_ints, unpack_ints
from frontend.gathering import Sequences, StepTokens, side_by_side
from frontend.ledger import Entry, Ledger
from frontend.seam import Deliver, Delivery

MOST_TOKENS = 256
"""Tokens of a sequence that are kept before they are given to it."""


@dataclass(slots=True)
class _Client:
    """A client's sequences: `places` are where they stand in a step, None if all of it is theirs."""

    sequences: Sequences
    places: npt.NDArray[np.intp] | None


class _Step(NamedTuple):
    """The `handles` [n] of a step, and its `tokens` [n, each]. Equal handles in a row are one object."""

    handles: bytes
    tokens: Ints
    each: int


class SteadyOutputs:
    """The sequences of one rank's last step, in its order, and their newest tokens.

    A sequence that is here is in every step kept since it came; its `output` is brought up to date when it is asked
    for.
    """

    def __init__(self, rank: int, ledger: Ledger) -> None:
        self._rank = rank
        self._ledger = ledger
        self._handles = b""  # bytes, since views are compared element by element
        self._entries: list[Entry] = []
        self._num_here = 0
        """Of these, those that have not ended."""
        self._texts: list[tuple[int, str]] = []
        self._clients: list[_Client] = []
        self._steps: list[_Step] = []
        self._num_tokens = 0
        """Of each sequence that is in all of the steps."""

    def take(self, outputs: Outputs) -> list[Effect] | None:
        """Take the tokens of a step that `is_plain`: what is to be told of them. None if some are nobody's."""
        handles = bytes(outputs.handles)
        if handles != self._handles and not self._change(handles):
            return None
        tokens = outputs.tokens
        each = tokens.nbytes // len(handles)
        self._steps.append(_Step(self._handles, tokens, each))
        self._num_tokens += each
        if self._num_tokens >= MOST_TOKENS:
            self.settle()
        effects: list[Effect] = []
        for client in self._clients:
            mine = tokens
            if client.places is not None:
                mine = pack_ints(unpack_ints(tokens).reshape(-1, each)[client.places].reshape(-1))
            effects.append(StepTokens(client.sequences, mine, each))
        if self._texts:
            size = 4 * each
            deliveries = [
                Delivery(name, tokens[place * size : place * size + size], None, None, None)
                for place, name in self._texts
            ]
            effects.append(Deliver(self._rank, deliveries, outputs.step))
        return effects

    def remove(self, entry: Entry) -> None:
        """A sequence that is here has ended, and what it was given no longer matters."""
        entry.steady = None
        self._num_here -= 1
        self._handles = b""

    def pending(self, entry: Entry) -> int:
        """How many tokens are kept for a sequence that is here."""
        return self._num_tokens - entry.steady_since

    def settle(self) -> None:
        """Give the sequences their tokens."""
        steps, self._steps, self._num_tokens = self._steps, [], 0
        if not steps:
            return
        first = steps[0].handles
        if all(step.handles is first for step in steps):
            table = side_by_side((step.tokens, step.each) for step in steps)
            order, data = unpack_ints(first), table.tobytes()
            bounds = list(range(0, len(data) + 1, 4 * table.shape[1]))
        else:
            joined = np.concatenate([np.repeat(unpack_ints(step.handles), step.each) for step in steps])
            places = np.argsort(joined, kind="stable")
            data = unpack_ints(memoryview(b"".join(step.tokens for step in steps)))[places].tobytes()
            order, begins = np.unique(joined[places], return_index=True)
            bounds = [*(4 * begins).tolist(), len(data)]
        for handle, (begin, end) in zip(order.tolist(), pairwise(bounds), strict=True):
            entry = self._ledger.get(handle)
            if entry is not None and entry.steady is self:
                entry.add_output(data[begin:end])
        for entry in self._entries:
            entry.steady_since = 0

    def leave(self) -> None:
        """The next step is another, or whom its tokens are for is about to change: nobody is here any more."""
        self.settle()
        for entry in self._entries:
            if entry.steady is self:
                entry.steady = None
        self._entries, self._clients, self._texts, self._handles = [], [], [], b""
        self._num_here = 0

    def _change(self, handles: bytes) -> bool:
        """Have the sequences with these handles here; false if there are others among them."""
        found = self._ledger.find(handles)
        entries = [entry for entry in found if entry is not None and entry.rank == self._rank]
        if len(entries) < len(found):
            return False
        new = [entry for entry in entries if entry.steady is not self]
        if len(entries) - len(new) < self._num_here:  # some go on, but not in this step
            self.leave()
            new = entries
        for entry in new:
            entry.steady, entry.steady_since = self, self._num_tokens
        self._handles, self._entries, self._num_here = handles, entries, len(entries)
        self._sort()
        return True

    def _sort(self) -> None:
        """See whose the sequences are."""
        entries = self._entries
        owner = entries[0].owner if entries else None
        if owner is not None and all(entry.owner is owner and entry.wanted for entry in entries):
            self._texts, self._clients = [], [self._client(owner, entries, None)]
            return
        wanted = [(place, entry) for place, entry in enumerate(entries) if entry.wanted]
        self._texts = [(place, entry.request_id) for place, entry in wanted if entry.owner is None]
        of_client: dict[Peer, list[int]] = {}
        for place, entry in wanted:
            if entry.owner is not None:
                of_client.setdefault(entry.owner, []).append(place)
        self._clients = [
            self._client(peer, [entries[place] for place in places], np.array(places, np.intp))
            for peer, places in of_client.items()
        ]

    def _client(self, peer: Peer, entries: list[Entry], places: npt.NDArray[np.intp] | None) -> _Client:
        indices = [entry.index for entry in entries]
        names = [entry.request_id for entry in entries]
        return _Client(Sequences(peer, self._rank, names, pack_ints(indices) if any(indices) else EMPTY), places)


def is_plain(outputs: Outputs) -> bool:
    """Whether there are as many tokens for each handle, and no more to say of them than that some begin or end."""
    if outputs.logprobs or outputs.turns or outputs.pooled:
        return False
    if not outputs.counts.nbytes:
        return True
    counts = unpack_ints(outputs.counts)
    alike = counts[0] > 0 and bool((counts == counts[0]).all())
    return alike and counts.nbytes * int(counts[0]) == outputs.tokens.nbytes
