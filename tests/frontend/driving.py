"""A frontend's core with two ranks and an executor that say what a test has them say."""

from typing import Any

import msgspec

from bus import messages as m
from bus.config import Config
from bus.core import Drained, Peer, PeerUp, Received, Send, Tick
from bus.wire import pack_ints
from frontend.core import FrontendCore
from frontend.params import ModelLimits

CLIENT = Peer("client", "client", 7, 70)
OTHER = Peer("client", "client", 8, 80)
EXECUTOR = Peer("command", "executor", 0, 30)
RANKS = [Peer("command", "rank", index, 10 + index) for index in range(2)]
SAMPLING = m.Sampling(seed=1, max_tokens=5)


class Engine:
    """A core with two ranks and an executor up, and what it has sent to whom, one by one."""

    def __init__(self, **settings: Any) -> None:
        limits = ModelLimits(vocab_size=100, max_model_len=64, eos_token_ids=(2, 3))
        self.core = FrontendCore(0, Config(**settings), limits, b"key")
        self.sent: list[tuple[Peer, Any]] = []
        self.up: list[Any] = []
        self.numbers = [0, 0]
        self.now = 0.0
        self.tick(0.0)

    def start(self) -> "Engine":
        for peer in (*RANKS, EXECUTOR):
            self.feed(PeerUp(peer, m.PROTOCOL_MINOR))
        status = m.ExecutorStatus(model="x", max_model_len=64, num_blocks=8, block_size=16)
        self.feed(Received(EXECUTOR, status))
        for rank in range(2):
            self.load(rank)
        self.feed(PeerUp(CLIENT))
        return self

    def feed(self, event: Any) -> list[Any]:
        """Let an event come, and nothing after it; what is to be done."""
        return self.feed_all([event])

    def feed_all(self, events: list[Any]) -> list[Any]:
        """Let events come in one go; what is to be done."""
        effects = [effect for event in [*events, Drained(self.now)] for effect in self.core.handle(event)]
        self.sent += [
            (effect.peer, message)
            for effect in effects
            if isinstance(effect, Send)
            for message in singly(effect.message)
        ]
        self.up += [effect for effect in effects if not isinstance(effect, Send)]
        return effects

    def tick(self, now: float) -> None:
        self.now = now
        self.feed(Tick(now, 1000.0 + now, {}))

    def load(self, rank: int, **fields: Any) -> None:
        self.numbers[rank] += 1
        values = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0, "num_blocks": 4, "acknowledged": 0} | fields
        self.feed(Received(RANKS[rank], m.Load(number=self.numbers[rank], **values)))

    def ask(self, peer: Peer = CLIENT, **fields: Any) -> None:
        values = {"request_id": "a", "prompt_token_ids": [5, 6], "text_output": False} | fields
        self.feed(Received(peer, m.Generate(**values)))

    def take(self, peer: Peer | None = None) -> list[Any]:
        """Messages sent to `peer` (or to anyone) since the last time."""
        taken = [message for to, message in self.sent if peer in (None, to)]
        self.sent = [(to, message) for to, message in self.sent if peer not in (None, to)]
        return taken

    def added(self) -> tuple[int, m.AddRequest]:
        """The one AddRequest sent, and its rank."""
        ((peer, message),) = [(peer, message) for peer, message in self.sent if isinstance(message, m.AddRequest)]
        self.take()
        return peer.index, message


def singly(message: Any) -> list[Any]:
    """What is in a message that has several things, one by one; any other message as it is."""
    if isinstance(message, m.AddRequests):
        return message.requests
    if not isinstance(message, m.TokenDeltas):
        return [message]
    tokens = [msgspec.structs.replace(message, finished=[])] if message.request_ids else []
    return [*tokens, *message.finished]


def outputs(handles: list[int], tokens: list[int], **fields: Any) -> m.Outputs:
    return m.Outputs(step=1, handles=pack_ints(handles), tokens=pack_ints(tokens), **fields)


def ended(handle: int, reason: Any = "stop", **fields: Any) -> m.RequestEnded:
    return m.RequestEnded(handle=handle, reason=reason, **fields)
