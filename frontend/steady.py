"""Sequences that get one token each, step after step: the last step says what is to be done for each of them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bus.core import Effect, Peer, Send
from bus.messages import EMPTY, Ints, Outputs, TokenDeltas
from bus.wire import pack_ints, unpack_ints
from frontend.ledger import Entry
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
    """The sequences of one rank's step, in its order, as long as its next steps have the same and nothing else.

    Their `output` is brought up to date when it is asked for.
    """

    def __init__(self, rank: int, handles: Ints, entries: list[Entry]) -> None:
        self._rank = rank
        self._handles = handles
        self._entries = entries
        self._steps: list[Ints] = []
        wanted = [(place, entry) for place, entry in enumerate(entries) if entry.wanted]
        self._texts = [(4 * place, entry.request_id) for place, entry in wanted if entry.owner is None]
        of_client: dict[Peer, list[tuple[int, Entry]]] = {}
        for place, entry in wanted:
            if entry.owner is not None:
                of_client.setdefault(entry.owner, []).append((place, entry))
        self._clients = [_client(peer, mine, len(entries)) for peer, mine in of_client.items()]
        for entry in entries:
            entry.steady = self

    def goes_on(self, outputs: Outputs) -> bool:
        """Whether `outputs` has one token for each of the sequences, and nothing else."""
        return outputs.handles == self._handles and is_plain(outputs)

    def add(self, outputs: Outputs) -> list[Effect]:
        """Take the tokens of a step; what is to be told of them."""
        tokens = outputs.tokens
        self._steps.append(tokens)
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

    def settle(self) -> None:
        """Give the sequences their tokens."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        table = np.stack([unpack_ints(tokens) for tokens in steps], axis=1)
        data, width = table.tobytes(), 4 * len(steps)
        for place, entry in enumerate(self._entries):
            entry.add_output(data[place * width : (place + 1) * width])

    def end(self) -> None:
        """The next step is another: the sequences are on their own."""
        self.settle()
        for entry in self._entries:
            entry.steady = None
        self._entries, self._clients, self._texts, self._handles = [], [], [], EMPTY


def is_plain(outputs: Outputs) -> bool:
    """Whether there is one token for each handle, and nothing else."""
    return not (outputs.counts.nbytes or outputs.ended or outputs.started or outputs.logprobs or outputs.turns)


def _client(peer: Peer, mine: list[tuple[int, Entry]], count: int) -> _Client:
    indices = [entry.index for _, entry in mine]
    places = None if len(mine) == count else np.array([place for place, _ in mine], np.intp)
    names = [entry.request_id for _, entry in mine]
    return _Client(peer, names, pack_ints(indices) if any(indices) else EMPTY, places)
