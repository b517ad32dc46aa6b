"""What goes to the same peer while there is still something to read goes in as few frames as can be.

A frame costs both processes, and the threads that carry it, more than most of what is in one. So requests for a rank,
tokens of steady steps and the ends of requests wait until nothing is left to read: not at all, unless this frontend is
behind. Whatever else there is to send goes after them, so that to each peer all is told in order, but for tokens of
other requests, which may come before an end.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bus.core import Effect, Peer, Send
from bus.messages import EMPTY, MINOR_OF_SEVERAL, AddRequest, AddRequests, Finished, Ints, TokenDeltas
from bus.wire import pack_ints, unpack_ints

MOST = 32
"""Requests and tokens of steps that may wait: more to read holds nothing back for long."""

MOST_BYTES = 1 << 20
"""Of requests that may wait."""

_ENCODER = msgspec.msgpack.Encoder()


class Sequences(NamedTuple):
    """Sequences of one client on one rank, in the order of their tokens. `indices` are as in `TokenDeltas`."""

    peer: Peer
    rank: int
    request_ids: list[str]
    indices: Ints


class StepTokens(NamedTuple):
    """Effect within the frontend's core: a step's tokens for some sequences, `each` for each, one after the other.

    There is one `Sequences` for all steps of a rank in a row that have the same ones.
    """

    sequences: Sequences
    tokens: Ints
    each: int


class Gathering:
    """Keeps effects back, and puts them together."""

    def __init__(self, max_message_bytes: int) -> None:
        self._most_bytes = min(MOST_BYTES, max_message_bytes // 2)
        self._minors: dict[Peer, int] = {}
        """Of each peer that is up, the minor version of the protocol that it knows."""
        self._num = self._bytes = 0
        self._requests: dict[Peer, list[AddRequest]] = {}
        self._steps: dict[tuple[int, Peer], list[StepTokens]] = {}
        """Of each rank and client; all of them of the same sequences."""
        self._ends: dict[Peer, list[Finished]] = {}

    def peer_up(self, peer: Peer, minor: int) -> None:
        """A peer is there that knows version `minor` of the protocol."""
        self._minors[peer] = minor

    def peer_down(self, peer: Peer) -> None:
        """A peer is gone, and with it what waits for it."""
        self._minors.pop(peer, None)
        self._requests.pop(peer, None)
        self._ends.pop(peer, None)
        self._steps = {key: steps for key, steps in self._steps.items() if key[1] != peer}

    def take(self, effects: list[Effect]) -> list[Effect]:
        """Take what is to be done; return what is to be done now."""
        now: list[Effect] = []
        for effect in effects:
            if isinstance(effect, StepTokens):
                key = effect.sequences.rank, effect.sequences.peer
                waiting = self._steps.get(key)
                if waiting is not None and waiting[0].sequences is not effect.sequences:
                    now += self.release()
                    waiting = None
                if waiting is None:
                    self._steps[key] = [effect]
                else:
                    waiting.append(effect)
                self._num += 1
            elif not isinstance(effect, Send):
                now.append(effect)
            elif isinstance(effect.message, AddRequest):
                size = len(_ENCODER.encode(effect.message))
                if self._bytes + size > self._most_bytes:
                    now += self.release()
                self._requests.setdefault(effect.peer, []).append(effect.message)
                self._bytes += size
                self._num += 1
            elif isinstance(effect.message, Finished):
                self._ends.setdefault(effect.peer, []).append(effect.message)
            else:
                now += self.release()
                now.append(effect)
            if self._num == MOST:
                now += self.release()
        return now

    def release(self) -> list[Effect]:
        """Send all that waits."""
        effects: list[Effect] = []
        for rank, requests in self._requests.items():
            together = len(requests) > 1 and self._knows_several(rank)
            effects += [Send(rank, message) for message in ([AddRequests(requests=requests)] if together else requests)]
        steps: dict[Peer, list[list[StepTokens]]] = {}
        for (_, client), of_rank in self._steps.items():
            steps.setdefault(client, []).append(of_rank)
        for client, of_ranks in steps.items():
            ends = self._ends.pop(client, []) if self._ends and self._knows_several(client) else []
            effects.append(Send(client, _deltas(of_ranks, ends)))
        for client, ends in self._ends.items():
            together = len(ends) > 1 and self._knows_several(client)
            effects += [Send(client, message) for message in ([_deltas([], ends)] if together else ends)]
        if effects:
            self._requests, self._steps, self._ends = {}, {}, {}
            self._num = self._bytes = 0
        return effects

    def _knows_several(self, peer: Peer) -> bool:
        return self._minors.get(peer, 0) >= MINOR_OF_SEVERAL


def _deltas(of_ranks: list[list[StepTokens]], ends: list[Finished]) -> TokenDeltas:
    """The tokens of all steps, and the ends after them; `of_ranks` has at least one step of each rank."""
    if len(of_ranks) == 1:
        return _of_rank(of_ranks[0], ends)
    of_each = [_of_rank(steps, []) for steps in of_ranks]
    sizes = [len(one.request_ids) for one in of_each]
    return TokenDeltas(
        request_ids=[name for one in of_each for name in one.request_ids],
        tokens=memoryview(b"".join(one.tokens for one in of_each)),
        counts=_joined([one.counts for one in of_each], sizes, 1),
        indices=_joined([one.indices for one in of_each], sizes, 0),
        finished=ends,
    )


def _of_rank(steps: list[StepTokens], ends: list[Finished]) -> TokenDeltas:
    """The tokens of steps of the same sequences."""
    sequences, tokens, each = steps[0]
    size = len(sequences.request_ids)
    if len(steps) > 1:
        each = sum(step.each for step in steps)
        tokens = pack_ints(side_by_side((step.tokens, step.each) for step in steps))
    counts = EMPTY if each == 1 else pack_ints(np.full(size, each, np.int32))
    return TokenDeltas(
        request_ids=sequences.request_ids, tokens=tokens, counts=counts, indices=sequences.indices, finished=ends
    )


def side_by_side(steps: Iterable[tuple[Ints, int]]) -> npt.NDArray[np.int32]:
    """Tokens of steps of the same n sequences, each with how many there are for each: a line for each sequence."""
    return np.concatenate([unpack_ints(tokens).reshape(-1, each) for tokens, each in steps], axis=1)


def _joined(arrays: list[Ints], sizes: list[int], default: int) -> Ints:
    """Arrays one after the other, of these sizes; an empty one stands for as many `default`, and so does the whole."""
    if not any(array.nbytes for array in arrays):
        return EMPTY
    return pack_ints(
        np.concatenate(
            [
                unpack_ints(array) if array.nbytes else np.full(size, default, np.int32)
                for array, size in zip(arrays, sizes, strict=True)
            ]
        )
    )
