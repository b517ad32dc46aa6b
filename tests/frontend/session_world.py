"""Sessions between clients, a frontend's core, a rank and the HTTP side, each with its own time: for random traces."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bus import messages as m
from bus.core import Drained, Peer, PeerDown, PeerUp, Posted, Received, Send
from bus.wire import pack_ints, unpack_ints
from frontend.client_session import SessionStream, TurnStream
from frontend.seam import (
    BeginTurn,
    Deliver,
    InputRendered,
    RenderInput,
    SessionOutput,
)
from tests.frontend.driving import RANKS, Engine, singly

STOP = 2
UNWANTED = 99
"""A rank refuses inputs that begin with this token."""


@dataclass
class Held:
    """A session on the toy rank. Turns answer with their input's tokens, and the stop token."""

    handle: int
    queue: deque[m.AppendInput] = field(default_factory=deque)
    running: bool = True
    turn: int = 1
    rest: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)


class ToyRank:
    """Keeps sessions, and does one thing at a time for one of them."""

    def __init__(self) -> None:
        self.sessions: dict[int, Held] = {}
        self.said: list[Any] = []
        """What it has told of turns, as (handle, turn, tokens, kept)."""

    def take(self, message: Any) -> list[Any]:
        """Take a frontend's message; what it answers at once."""
        if isinstance(message, m.AddRequest):
            prompt = unpack_ints(message.prompt_token_ids).tolist()
            self.sessions[message.handle] = Held(message.handle, rest=[*prompt, STOP] if prompt else [], context=prompt)
            return []
        if isinstance(message, m.AbortRequests):
            handles = [handle for handle in unpack_ints(message.handles).tolist() if self.sessions.pop(handle, None)]
            return [m.Outputs(ended=[m.RequestEnded(handle=handle, reason="abort") for handle in handles])]
        held = self.sessions.get(message.handle)
        if held is None:
            return [m.Error(code="invalid", message="gone", handle=message.handle, sequence=message.sequence)]
        if isinstance(message, m.StopTurn):
            if not held.running or held.turn != message.turn:
                return [m.Error(code="invalid", message="over", handle=message.handle, sequence=message.sequence)]
            return [self._end(held, "interrupted", min(message.n, len(held.output))), *self._next(held)]
        held.queue.append(message)
        return [] if held.running else self._next(held)

    def step(self, handle: int) -> list[Any]:
        """One token of a session's turn, or its end."""
        held = self.sessions[handle]
        if not held.running:
            return []
        if not held.rest:
            return [self._end(held, "empty", 0), *self._next(held)]
        token = held.rest.pop(0)
        held.output.append(token)
        tokens = m.Outputs(handles=pack_ints([handle]), tokens=pack_ints([token]))
        if held.rest:
            return [tokens]
        end = self._end(held, "stop", len(held.output) - 1)
        return [m.Outputs(handles=tokens.handles, tokens=tokens.tokens, turns=end.turns), *self._next(held)]

    def _end(self, held: Held, reason: Any, kept: int) -> m.Outputs:
        held.running = False
        self.said.append((held.handle, held.turn, list(held.output), kept))
        held.context += held.output[:kept]
        held.output = []
        ended = m.TurnEnded(
            handle=held.handle, turn=held.turn, reason=reason, kept_tokens=kept, context_tokens=len(held.context)
        )
        return m.Outputs(turns=[ended])

    def _next(self, held: Held) -> list[Any]:
        answers: list[Any] = []
        while held.queue and not held.running:
            one = held.queue.popleft()
            tokens = unpack_ints(one.prompt_token_ids).tolist()
            if one.close:
                del self.sessions[held.handle]
                return [*answers, m.Outputs(ended=[m.RequestEnded(handle=held.handle, reason="closed")])]
            if tokens[:1] == [UNWANTED]:
                answers.append(m.Error(code="invalid", message="no", handle=held.handle, sequence=one.sequence))
                continue
            held.context += tokens
            held.rest = [*tokens, STOP] if tokens else []
            held.turn += 1
            held.running = True
        return answers


@dataclass
class Mine:
    """A client's session, with all the turns it ever asked for."""

    stream: SessionStream
    turns: list[TurnStream]
    read: dict[int, list[int]] = field(default_factory=dict)
    """What was read of each turn, by place in `turns`."""


class Client:
    """A client that may be lost and come back, as another start of itself; it keeps what it knows."""

    def __init__(self, index: int) -> None:
        self.peer = Peer("client", "client", index, 1)
        self.connected = True
        self.sessions: list[Mine] = []
        self.made = 0

    def of(self, request_id: str) -> Mine | None:
        """The one of this name that has not ended."""
        return next(
            (one for one in self.sessions if one.stream.request.request_id == request_id and not one.stream.over), None
        )


class World:
    """All of them, and the queues between them."""

    def __init__(self) -> None:
        self.engine = Engine().start()
        self.engine.feed(PeerDown(RANKS[1], "not used"))
        self.engine.take()
        self.rank = ToyRank()
        self.clients = [Client(100 + index) for index in range(2)]
        self.from_clients: deque[tuple[Client, m.Message]] = deque()
        self.to_rank: deque[Any] = deque()
        self.to_core: deque[Any] = deque()
        self.to_http: deque[Any] = deque()
        self.from_http: deque[Any] = deque()
        self.turns: dict[str, BeginTurn] = {}
        for client in self.clients:
            self.core(PeerUp(client.peer, m.PROTOCOL_MINOR))

    # Events

    def core(self, event: Any) -> None:
        """Let the core take an event, and put what it answers on its ways."""
        for effect in self.engine.core.handle(event):
            if isinstance(effect, Send):
                if effect.peer == RANKS[0]:
                    self.to_rank.extend(singly(effect.message))
                else:
                    for message in singly(effect.message):
                        self._tell(effect.peer, message)
            elif isinstance(effect, BeginTurn | Deliver | RenderInput):
                self.to_http.append(effect)

    def core_hears(self) -> None:
        if self.from_clients:
            client, message = self.from_clients.popleft()
            self.core(Received(client.peer, message))

    def core_has_read_all(self) -> None:
        self.core(Drained(0.0))

    def rank_takes(self) -> None:
        if self.to_rank:
            self.to_core.extend(self.rank.take(self.to_rank.popleft()))

    def rank_steps(self, choice: int) -> None:
        handles = sorted(self.rank.sessions)
        if handles:
            self.to_core.extend(self.rank.step(handles[choice % len(handles)]))

    def core_takes(self) -> None:
        if self.to_core:
            self.core(Received(RANKS[0], self.to_core.popleft()))

    def http_takes(self) -> None:
        if not self.to_http:
            return
        effect = self.to_http.popleft()
        if isinstance(effect, RenderInput):
            text = effect.text or ""
            answer = (
                {"code": "invalid", "message": "bad"}
                if text == "bad"
                else {"token_ids": pack_ints(list(map(ord, text)))}
            )
            self.from_http.append(InputRendered(session=effect.session, input=effect.input, **answer))
        elif isinstance(effect, BeginTurn):
            self.turns[effect.delivery] = effect
        else:
            for output in effect.outputs:
                self._deliver(output)

    def http_answers(self) -> None:
        if self.from_http:
            self.core(Posted(self.from_http.popleft()))

    def lose(self, client: Client) -> None:
        if client.connected:
            client.connected = False
            self.from_clients = deque(one for one in self.from_clients if one[0] is not client)
            self.core(PeerDown(client.peer, "gone"))
            for one in client.sessions:
                one.stream.lost()

    def come_back(self, client: Client) -> None:
        if not client.connected:
            client.connected = True
            old = client.peer
            client.peer = Peer(old.bus, old.role, old.index, old.incarnation + 1)
            self.core(PeerUp(client.peer, m.PROTOCOL_MINOR))
            for one in [one for one in client.sessions if not one.stream.over]:
                self._send(client, one.stream.found(same=True))

    def settle(self) -> None:
        """Until nothing happens any more."""
        for client in self.clients:
            self.come_back(client)
        for client in self.clients:
            for one in client.sessions:
                self._send(client, one.stream.close())
        for _ in range(500):
            self.core_has_read_all()
            if not (
                self.from_clients
                or self.to_rank
                or self.to_core
                or self.to_http
                or self.from_http
                or self.rank.sessions
            ):
                return
            for act in (
                self.core_hears,
                self.rank_takes,
                lambda: self.rank_steps(0),
                self.core_takes,
                self.http_takes,
                self.http_answers,
            ):
                act()
            for place in range(len(self.rank.sessions)):
                self.rank_steps(place)
        raise AssertionError("it does not come to an end")

    # What users do

    def open(self, client: Client, text: bool, tokens: list[int]) -> None:
        client.made += 1
        request = m.Generate(
            request_id=f"s{client.made % 3}",  # names are used again
            resumable=True,
            text_output=text,
            text="".join(map(chr, tokens)) if text else None,
            prompt_token_ids=None if text else tokens,
        )
        if client.of(request.request_id) is not None:
            return
        stream = SessionStream(request)
        client.sessions.append(Mine(stream, [stream.turns[0]]))
        if client.connected:
            self._send(client, [request])
        else:
            stream.lost()

    def act(self, client: Client, choice: int, do: Callable[[Mine], list[m.Message]]) -> None:
        """Do something with one of a client's sessions that have not ended."""
        ours = [one for one in client.sessions if not one.stream.over]
        if ours:
            self._send(client, do(ours[choice % len(ours)]))

    def _send(self, client: Client, messages: list[m.Message]) -> None:
        for message in messages:
            if client.connected:
                self.from_clients.append((client, message))

    def _tell(self, peer: Peer, message: Any) -> None:
        client = next(one for one in self.clients if one.peer.index == peer.index)
        assert client.connected
        assert client.peer == peer
        if isinstance(message, m.TokenDeltas):
            tokens = unpack_ints(message.tokens).tolist()
            counts = unpack_ints(message.counts).tolist() if message.counts.nbytes else [1] * len(message.request_ids)
            for name, count in zip(message.request_ids, counts, strict=True):
                part, tokens = tokens[:count], tokens[count:]
                one = client.of(name)
                assert one is not None
                one.stream.tokens(part)
            return
        one = client.of(message.request_id)
        if one is None:
            assert isinstance(message, m.Error)  # an answer to something said before the end was known
            return
        self._send(client, one.stream.message(message))

    def _deliver(self, output: Any) -> None:
        turn = self.turns.get(output.request_id)
        if turn is None:
            return
        messages: list[Any] = []
        if output.token_ids.nbytes:
            text = "".join(map(chr, unpack_ints(output.token_ids).tolist()))
            messages.append(m.Delta(request_id=turn.request_id, token_ids=output.token_ids, text=text))
        for message in (*messages, *output.messages):
            self.from_http.append(SessionOutput(session=turn.session, message=message))
            if isinstance(message, m.Finished):
                del self.turns[output.request_id]
