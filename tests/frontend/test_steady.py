"""Steps that are alike take a short way, on which clients and the HTTP side hear what they hear on the long one.

On the short way what clients are told is gathered, too: then they hear the same of each sequence, in fewer messages.
"""

import random
from typing import Any

import msgspec
import pytest

from bus.core import Peer, Send
from bus.counters import Counters
from bus.messages import (
    PROTOCOL_MINOR,
    Finished,
    Load,
    Outputs,
    RequestEnded,
    RequestStarted,
    Sampling,
    TokenDeltas,
)
from bus.wire import pack_ints, unpack_ints
from frontend.gathering import Gathering
from frontend.requests import Requests
from frontend.routing import RankView, Router
from frontend.seam import Deliver
from frontend.steady import MOST_TOKENS
from tests.frontend.driving import singly

CLIENTS = [Peer("client", "client", number, 1) for number in range(3)]
RANKS = [Peer("command", "rank", number, 1) for number in range(2)]
SAMPLING = Sampling(seed=0, max_tokens=1000)


class NoTurns:
    """There are no sessions here."""

    def turn_ended(self, *_: Any) -> list[Any]:
        raise AssertionError

    ended = turn_ended


NO_TURNS = NoTurns()


class LongWay(Requests):
    def _is_steady(self, *_: Any) -> bool:
        return False


class Side:
    """The requests of a frontend with two ranks, and all it has said.

    `said` has what each sequence of a client was told, its tokens one by one and its end, and what the HTTP side was
    told by rank.
    """

    def __init__(self, kind: type[Requests]) -> None:
        router = Router("least_loaded", 0, 16, 8)
        self.counters = Counters()
        self.requests = kind(router, 16, self.counters)
        self.gathering = Gathering(1 << 20)
        self.said: dict[Any, list[Any]] = {}
        self.messages = 0
        self.alike = self.short = 0
        for client in CLIENTS:
            self.gathering.peer_up(client, min(client.index, PROTOCOL_MINOR))
        for rank in RANKS:
            router.ranks[rank.index] = RankView()
            load = Load(number=1, acknowledged=0, running=0, waiting=0, pending_prefill_tokens=0, num_blocks=9)
            router.ranks[rank.index].see_load(load)
            self.requests.rank_up(rank)

    def add(self, owner: Peer | None, name: str, rank: int) -> list[int]:
        effects = self.requests.add(owner, name, pack_ints([1, 2]), [SAMPLING] * 2, 0.0, 0, "", rank, [], "")
        return [effect.message.handle for effect in effects]

    def outputs(self, rank: int, outputs: Outputs) -> None:
        before = self.requests._steady[rank]._handles
        self.do(self.requests.outputs(rank, outputs, NO_TURNS))
        after = self.requests._steady[rank]._handles
        self.alike += bool(after) and after == before
        self.short += bool(after) and after != before

    def do(self, effects: list[Any]) -> None:
        self.hear(self.gathering.take(effects))

    def all_read(self) -> None:
        self.hear(self.gathering.release())

    def hear(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.messages += 1
                for message in singly(effect.message):
                    self.told(effect.peer, message)
            elif isinstance(effect, Deliver):
                said = (effect.step, msgspec.to_builtins(effect.outputs))
                self.said.setdefault(effect.rank, []).append(said)

    def told(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Finished):
            self.said.setdefault((peer, message.request_id, message.index), []).append(msgspec.to_builtins(message))
        if not isinstance(message, TokenDeltas):
            return
        size = len(message.request_ids)
        counts = unpack_ints(message.counts).tolist() if message.counts.nbytes else [1] * size
        indices = unpack_ints(message.indices).tolist() if message.indices.nbytes else [0] * size
        tokens = unpack_ints(message.tokens).tolist()
        assert len(set(zip(message.request_ids, indices, strict=True))) == size
        for name, index, count in zip(message.request_ids, indices, counts, strict=True):
            said = self.said.setdefault((peer, name, index), [])
            said += tokens[:count]
            del tokens[:count]
        assert not tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_says_what_the_long_one_says(seed: int) -> None:
    draw = random.Random(seed)
    short, long = Side(Requests), Side(LongWay)
    handles: list[list[int]] = [[], []]
    for number in range(8):
        owner, rank = draw.choice([*CLIENTS, None]), draw.randrange(2)
        added = short.add(owner, f"r{number}", rank)
        assert added == long.add(owner, f"r{number}", rank)
        handles[rank] += added
    behind = draw.choice([0.0, 0.5, 0.9])
    for step in range(60):
        for rank in draw.choices((0, 1), k=2):
            outputs = step_of(draw, handles[rank], step)
            for side in (short, long):
                side.outputs(rank, outputs)
            handles[rank] = [handle for handle in handles[rank] if handle not in [end.handle for end in outputs.ended]]
        if draw.random() < 0.05 and any(handles):
            chosen = draw.choice([handle for mine in handles for handle in mine])
            for side in (short, long):
                entry = side.requests.ledger.get(chosen)
                assert entry is not None
                side.do(side.requests.abort([entry], wanted=bool(chosen % 2)))
        long.all_read()
        if draw.random() >= behind:
            short.all_read()
            check(short, long)
    for side in (short, long):
        side.all_read()
        side.do(side.requests.rank_down(RANKS[0], NO_TURNS))
        side.all_read()
    check(short, long)
    assert short.alike > 30
    assert short.short > 5
    assert not long.alike + long.short
    if behind == 0.9:
        assert short.messages < long.messages


def step_of(draw: random.Random, handles: list[int], step: int) -> Outputs:
    """Most steps are as the one before; now and then one has a beginning, an end, other counts, or another order."""
    what = draw.random() if handles else 1.0
    counts = [1] * len(handles)
    ended, started = [], []
    if what < 0.05:
        ended = [RequestEnded(handle=draw.choice(handles), reason="length")]
    elif what < 0.1:
        started = [RequestStarted(handle=draw.choice(handles), cached_tokens=16)]
    elif what < 0.15:
        counts = [draw.randrange(3) for _ in handles]
    elif what < 0.2:
        draw.shuffle(handles)
    elif what < 0.4:
        counts = [draw.randrange(2, 5)] * len(handles)
    return Outputs(
        step=step,
        handles=pack_ints(handles),
        tokens=pack_ints([draw.randrange(100) for _ in range(sum(counts))]),
        counts=pack_ints(counts) if set(counts) - {1} else pack_ints([]),
        ended=ended,
        started=started,
    )


def check(short: Side, long: Side) -> None:
    assert short.said == long.said
    assert short.counters.snapshot() == long.counters.snapshot()
    for entry in long.requests.ledger.of_rank(0):
        same = short.requests.ledger.get(entry.handle)
        assert same is not None
        assert same.output == entry.output


def test_tokens_are_given_to_their_sequences_in_time() -> None:
    side = Side(Requests)
    first, second = side.add(CLIENTS[0], "a", 0)
    for step in range(3 * MOST_TOKENS):
        side.outputs(0, Outputs(step=step, handles=pack_ints([first, second]), tokens=pack_ints([step, -step])))
    entries = [side.requests.ledger.get(handle) for handle in (first, second)]
    assert [unpack_ints(memoryview(entry.output)).tolist() for entry in entries if entry] == [
        [sign * step for step in range(3 * MOST_TOKENS)] for sign in (1, -1)
    ]


def test_steps_of_several_tokens_are_as_steady_as_those_of_one() -> None:
    """Whose counts are not those of its tokens is not."""
    side = Side(Requests)
    handles = pack_ints(side.add(CLIENTS[0], "a", 0) + side.add(CLIENTS[1], "b", 0))
    side.outputs(0, Outputs(step=1, handles=handles, tokens=pack_ints(range(4))))
    for step in range(2, 5):
        side.outputs(0, Outputs(step=step, handles=handles, counts=pack_ints([2] * 4), tokens=pack_ints(range(8))))
    assert side.alike == 3
    side.outputs(0, Outputs(step=5, handles=handles, counts=pack_ints([2] * 4), tokens=pack_ints(range(9))))
    assert side.counters.snapshot()["invalid_outputs"] == 1
    side.all_read()
    assert side.messages == 2
    assert side.said[CLIENTS[1], "b", 0] == [2, 4, 5, 4, 5, 4, 5]
