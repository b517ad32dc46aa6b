"""Steps that give one token to each of their sequences: the step before says most of what is to be done for them.

Where the sequences are the same, all of it; where some have begun or ended, whose tokens are whose is found anew, but
no sequence is given its token by itself: the tokens are kept step by step, and sorted when somebody asks for them.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bus.core import Effect, Peer, Send
from bus.messages import EMPTY, Ints, Outputs, TokenDeltas
from bus.wire import pack_ints, unpack_ints
from frontend.ledger import Entry, Ledger
from frontend.seam import Deliver, Delivery

MOST_STEPS = 64
"""Steps whose tokens are kept together before they are given to their sequences."""


@dataclass(slots=True)
class _Client:
    """A client and its sequences: `places` are where they stand in a step, None if all of it is theirs."""

    peer: Peer
    request_ids: list[str]
    indices: Ints
    places: npt.NDArray[np.intp] | None


class SteadyOutputs:
    """The sequences of one rank's last step, in its order, and their newest tokens.

    A sequence that is here is in every step kept since it came; its `output` is brought up to date when it is asked
    for.
    """

    def __init__(self, rank: int, ledger: Ledger) -> None:
        self._rank = rank
        self._ledger = ledger
        self._handles: Ints = EMPTY
        self._entries: list[Entry] = []
        self._num_here = 0
        """Of these, those that have not ended."""
        self._texts: list[tuple[int, str]] = []
        self._clients: list[_Client] = []
        self._steps: list[tuple[Ints, Ints]] = []
        """Handles and tokens of steps. Equal handles in a row are one object."""

    def take(self, outputs: Outputs) -> list[Effect] | None:
        """Take the tokens of a step that `is_plain`: what is to be told of them. None if some are nobody's."""
        if outputs.handles != self._handles and not self._change(outputs.handles):
            return None
        tokens = outputs.tokens
        self._steps.append((self._handles, tokens))
        if len(self._steps) == MOST_STEPS:
            self.settle()
        effects: list[Effect] = []
        for client in self._clients:
            mine = tokens if client.places is None else pack_ints(unpack_ints(tokens)[client.places])
            message = TokenDeltas(request_ids=client.request_ids, tokens=mine, indices=client.indices)
            effects.append(Send(client.peer, message))
        if self._texts:
            deliveries = [Delivery(name, tokens[begin : begin + 4], None, None, None) for begin, name in self._texts]
            effects.append(Deliver(self._rank, deliveries, outputs.step))
        return effects

    def remove(self, entry: Entry) -> None:
        """A sequence that is here has ended, and what it was given no longer matters."""
        entry.steady = None
        self._num_here -= 1
        self._handles = EMPTY

    def pending(self, entry: Entry) -> int:
        """How many tokens are kept for a sequence that is here."""
        return len(self._steps) - entry.steady_since

    def settle(self) -> None:
        """Give the sequences their tokens."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        first = steps[0][0]
        if all(handles is first for handles, _ in steps):
            table = np.stack([unpack_ints(tokens) for _, tokens in steps], axis=1)
            order, data = unpack_ints(first), table.tobytes()
            bounds = list(range(0, len(data) + 1, 4 * len(steps)))
        else:
            joined = unpack_ints(memoryview(b"".join(handles for handles, _ in steps)))
            places = np.argsort(joined, kind="stable")
            data = unpack_ints(memoryview(b"".join(tokens for _, tokens in steps)))[places].tobytes()
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
        self._entries, self._clients, self._texts, self._handles = [], [], [], EMPTY
        self._num_here = 0

    def _change(self, handles: Ints) -> bool:
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
            entry.steady, entry.steady_since = self, len(self._steps)
        self._handles, self._entries, self._num_here = handles, entries, len(entries)
        self._sort()
        return True

    def _sort(self) -> None:
        """See whose the sequences are."""
        entries = self._entries
        owner = entries[0].owner if entries else None
        if owner is not None and all(entry.owner is owner and entry.wanted for entry in entries):
            self._texts, self._clients = [], [_client(owner, entries, None)]
            return
        wanted = [(place, entry) for place, entry in enumerate(entries) if entry.wanted]
        self._texts = [(4 * place, entry.request_id) for place, entry in wanted if entry.owner is None]
        of_client: dict[Peer, list[int]] = {}
        for place, entry in wanted:
            if entry.owner is not None:
                of_client.setdefault(entry.owner, []).append(place)
        self._clients = [
            _client(peer, [entries[place] for place in places], np.array(places, np.intp))
            for peer, places in of_client.items()
        ]


def is_plain(outputs: Outputs) -> bool:
    """Whether there is one token for each handle, and no more to say of them than that some begin or end."""
    return not (outputs.counts.nbytes or outputs.logprobs or outputs.turns or outputs.pooled)


def _client(peer: Peer, entries: list[Entry], places: npt.NDArray[np.intp] | None) -> _Client:
    indices = [entry.index for entry in entries]
    names = [entry.request_id for entry in entries]
    return _Client(peer, names, pack_ints(indices) if any(indices) else EMPTY, places)
