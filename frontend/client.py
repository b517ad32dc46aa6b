"""The client library: requests and commands from a Python script, over the client bus.

    with Client("ipc:///path/to/run/client-0.ipc") as client:
        for piece in client.generate("Once upon a time", max_tokens=50):
            print(piece.text, end="", flush=True)

`Client` is for plain scripts, `AsyncClient` for asyncio; both have the same methods. A prompt is a text, a list of chat
messages, or a list of token ids; sampling parameters are keywords with vLLM's names (`bus.messages.GenerateParams`).

The embeddings of prompts are arrays, float32 [prompts, hidden size]:

    client.embed("a cat", "a dog") @ client.embed("an animal").T

A session is a request whose input keeps coming:

    with client.session("One, two,", max_tokens=5) as session:
        for piece in session.first:
            ...
        for piece in session.append(" and now in French:", max_tokens=20):
            ...
"""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from bus.buses import BUSES
from bus.core import Event, Peer, PeerDown, PeerUp, Received
from bus.counters import Counters
from bus.links import Dialer, Identity, Timing
from bus.messages import (
    Abort,
    AnyCommand,
    Append,
    CommandRequest,
    Delta,
    Embed,
    Embedding,
    EndTurn,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Goodbye,
    Message,
    PoolingKind,
    Reply,
    SessionResumed,
    TokenDeltas,
    TurnFinished,
)
from bus.wire import Codec, pack_ints, unpack_floats, unpack_ints
from frontend.client_session import SessionStream, TurnStream
from frontend.pieces import Completion, EngineError, Piece, Prompt
from frontend.session_client import AsyncSession, AsyncTurn, Session, Turn

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "Client",
    "Completion",
    "EngineError",
    "Piece",
    "Prompt",
    "Session",
    "Turn",
]

Vectors = npt.NDArray[np.float32]

TIMING = Timing(interval=1.0, timeout=15.0)
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
TICK_S = 0.2


class _Stream:
    """A request under way: what was asked, and what has come and not been read yet."""

    def __init__(self, request: Generate | Embed) -> None:
        self.request = request
        self.sent = False
        self.started = False
        self.children_left = request.params.n if isinstance(request, Generate) else 1
        self.inbox: deque[Piece | Embedding | EngineError] = deque()

    @property
    def over(self) -> bool:
        return self.children_left == 0 and not self.inbox


class _Conversation:
    """What a client and its frontend say to each other, without the socket: frames in, frames out."""

    def __init__(self, index: int | None) -> None:
        incarnation = time.time_ns()
        identity = Identity("client", incarnation % 2**31 ^ os.getpid() if index is None else index, incarnation)
        bus = BUSES["client"]
        self._dialer = Dialer(bus, identity, Codec(bus.down, MAX_MESSAGE_BYTES), Counters(), TIMING, index=None)
        self.routing_id = self._dialer.routing_id
        self._peer: Peer | None = None
        self._last_peer: Peer | None = None
        self._unsent: list[Message] = []
        self.streams: dict[str, _Stream] = {}
        self.sessions: dict[str, SessionStream] = {}
        self.replies: dict[int, Reply | EngineError | None] = {}
        self._ids = itertools.count(1)

    def receive(self, parts: list[bytes]) -> None:
        for event in self._dialer.receive(parts, time.monotonic()):
            self._handle(event)

    def tick(self) -> None:
        """To be called after everything that has arrived was received: silence is judged here."""
        for event in self._dialer.tick(time.monotonic()):
            self._handle(event)

    def frames(self) -> list[list[bytes]]:
        """What is to be sent now."""
        frames, self._dialer.outbox = self._dialer.outbox, []
        if self._peer is not None:
            unsent, self._unsent = self._unsent, []
            for message in unsent:
                encoded = self._dialer.encode(self._peer, message, time.monotonic())
                frames += [encoded] if encoded else []
                if isinstance(message, Generate | Embed) and message.request_id in self.streams:
                    self.streams[message.request_id].sent = True
        return frames

    def generate(
        self, prompt: Prompt, request_id: str | None, options: dict[str, Any], params: dict[str, Any]
    ) -> _Stream:
        request_id = self._id(request_id)
        return self._begin(Generate(request_id=request_id, params=_params(params), **_prompt(prompt), **options))

    def embed(self, prompt: Prompt, options: dict[str, Any]) -> _Stream:
        return self._begin(Embed(request_id=self._id(None), **_prompt(prompt), **options))

    def _begin(self, request: Generate | Embed) -> _Stream:
        stream = self.streams[request.request_id] = _Stream(request)
        self._unsent.append(request)
        return stream

    def open(
        self, prompt: Prompt, request_id: str | None, options: dict[str, Any], params: dict[str, Any]
    ) -> SessionStream:
        request_id = self._id(request_id)
        fields = _prompt(prompt) if prompt else {"prompt_token_ids": []}
        request = Generate(request_id=request_id, resumable=True, params=_params(params), **fields, **options)
        session = self.sessions[request_id] = SessionStream(request)
        if self._peer is None:
            session.lost()  # it is opened when there is a frontend
        else:
            self._unsent.append(request)
        return session

    def append(self, session: SessionStream, prompt: Prompt, params: dict[str, Any]) -> TurnStream:
        fields = _prompt(prompt) if prompt else {"prompt_token_ids": []}
        given = _params(params) if params else None
        turn, messages = session.append(Append(request_id=session.request.request_id, params=given, **fields))
        self.say(messages)
        return turn

    def say(self, messages: list[Message]) -> None:
        self._unsent += messages

    def leave(self, session: SessionStream) -> None:
        """Its user has no more use for a session."""
        self.say(session.abort())
        self._forget_ended(session)

    def _id(self, request_id: str | None) -> str:
        request_id = f"r{next(self._ids)}" if request_id is None else request_id
        if request_id in self.streams or request_id in self.sessions:
            raise ValueError(f"request_id {request_id} is in use by this client")
        return request_id

    def abort(self, request_id: str) -> None:
        if request_id in self.streams:
            self._unsent.append(Abort(request_id=request_id))

    def forget(self, stream: _Stream) -> None:
        """The reader has left: abort what is unfinished."""
        if not stream.over:
            self.abort(stream.request.request_id)
        self.streams.pop(stream.request.request_id, None)

    def command(self, body: AnyCommand, ranks: list[int] | None, deadline_s: float | None) -> int:
        command_id = next(self._ids)
        self.replies[command_id] = None
        self._unsent.append(CommandRequest(command_id=command_id, body=body, ranks=ranks, deadline_s=deadline_s))
        return command_id

    def goodbye(self) -> None:
        """Leave: the frontend aborts what is unfinished, and sessions as they are told."""
        aborted = [message for session in self.sessions.values() for message in session.abort()]
        self._unsent = [*aborted, Goodbye()]

    def close(self) -> None:
        """Nothing is said any more, whatever a reader that is still there leaves."""
        self._peer = None

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerUp):
            self._peer = event.peer
            unanswered = [stream.request for stream in self.streams.values() if stream.sent and stream.children_left]
            same, self._last_peer = event.peer == self._last_peer, event.peer
            found = [message for session in list(self.sessions.values()) for message in session.found(same)]
            self._unsent = [*unanswered, *self._unsent, *found]
            self._forget_ended(*self.sessions.values())
        elif isinstance(event, PeerDown):
            self._peer = None
            self._unsent = [message for message in self._unsent if not self._is_of_session(message)]
            for session in self.sessions.values():
                session.lost()
            lost = EngineError("frontend_lost", f"the frontend was lost ({event.reason}); send the request again")
            for stream in [stream for stream in self.streams.values() if stream.started]:
                self._fail(stream, lost)
            self.replies = {key: lost if value is None else value for key, value in self.replies.items()}
        elif isinstance(event, Received):
            self._message(event.message)

    def _message(self, message: Message) -> None:
        if isinstance(message, Delta | Finished | TurnFinished | SessionResumed | Error):
            session = self.sessions.get(message.request_id)
            if session is not None:
                self.say(session.message(message))
                self._forget_ended(session)
                return
        if isinstance(message, Delta | Finished | Embedding):
            stream = self.streams.get(message.request_id)
            if stream is not None:
                stream.started = True
                self._piece(stream, message)
        elif isinstance(message, TokenDeltas):
            self._tokens(message)
        elif isinstance(message, Reply):
            if message.command_id in self.replies:
                self.replies[message.command_id] = message
        elif isinstance(message, Error):
            error = EngineError(message.code, message.message)
            if message.command_id in self.replies:
                self.replies[message.command_id] = error
            elif message.request_id in self.streams:
                self._fail(self.streams[message.request_id], error)

    def _piece(self, stream: _Stream, message: Delta | Finished | Embedding) -> None:
        if isinstance(message, Embedding):
            stream.children_left = 0
            stream.inbox.append(message)
            return
        if isinstance(message, Delta):
            tokens = unpack_ints(message.token_ids).tolist()
            piece = Piece(
                request_id=message.request_id, index=message.index, text=message.text, token_ids=tokens, delta=message
            )
        else:
            stream.children_left -= 1
            piece = Piece(request_id=message.request_id, index=message.index, text="", token_ids=[], finished=message)
        stream.inbox.append(piece)

    def _tokens(self, message: TokenDeltas) -> None:
        count = len(message.request_ids)
        counts = unpack_ints(message.counts).tolist() if message.counts.nbytes else [1] * count
        indices = unpack_ints(message.indices).tolist() if message.indices.nbytes else [0] * count
        tokens = unpack_ints(message.tokens).tolist()
        end = 0
        for request_id, index, length in zip(message.request_ids, indices, counts, strict=True):
            start, end = end, end + length
            stream = self.streams.get(request_id)
            if stream is not None:
                stream.started = True
                piece = Piece(request_id=request_id, index=index, text="", token_ids=tokens[start:end])
                stream.inbox.append(piece)
            elif (session := self.sessions.get(request_id)) is not None:
                session.tokens(tokens[start:end])
        for finished in message.finished:
            self._message(finished)

    def _is_of_session(self, message: Message) -> bool:
        return isinstance(message, Append | EndTurn | Generate | Abort) and message.request_id in self.sessions

    def _forget_ended(self, *sessions: SessionStream) -> None:
        for session in sessions:
            if session.over:
                self.sessions.pop(session.request.request_id, None)

    def _fail(self, stream: _Stream, error: EngineError) -> None:
        stream.inbox.append(error)
        stream.children_left = 0


class Client:
    """A synchronous client of one frontend. Not to be shared between threads."""

    def __init__(self, endpoint: str, timeout_s: float = 120.0, index: int | None = None) -> None:
        """`timeout_s` is the longest silence that is borne; `index` is the number this client is known by."""
        self._conversation = _Conversation(index)
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _set_up(self._socket, self._conversation, endpoint)

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        text_output: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
        **params: Any,
    ) -> Iterator[Piece]:
        """Start a request; iterate over its output. Leaving the iterator aborts it.

        Raises:
            EngineError: the request was refused or failed.
            TimeoutError: nothing was heard for `timeout_s`.
        """
        options = _options(priority, cache_salt, rank, adapter, text_output=text_output)
        stream = self._conversation.generate(prompt, request_id, options, params)
        self._pump(0)
        return self._read(stream)

    def session(
        self,
        prompt: Prompt = (),
        *,
        request_id: str | None = None,
        text_output: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
        **params: Any,
    ) -> Session:
        """Open a session; the prompt, which may be empty, is its first turn. `params` are for turns without their own.

        It goes on when the connection is lost for a while. Leaving its `with` block closes it, and waits for its end.
        """
        options = _options(priority, cache_salt, rank, adapter, text_output=text_output)
        # Made before anything is sent: the answer may be that there is no session, and then there is no first turn.
        session = Session(self, self._conversation.open(prompt, request_id, options, params))
        self._pump(0)
        return session

    def complete(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """Run a request to its end; one completion per child. Options and errors as in `generate`."""
        return _gather(list(self.generate(prompt, **options)))

    def embed(
        self,
        *prompts: Prompt,
        pooling: PoolingKind | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
    ) -> Vectors:
        """The embeddings of prompts, float32 [prompts, hidden size]; they are asked for all at once.

        `pooling` None is the engine's setting; with `normalize` each has a length of 1.

        Raises:
            EngineError: one was refused or failed.
            TimeoutError: nothing was heard for `timeout_s`.
        """
        options = _options(priority, cache_salt, rank, adapter, pooling=pooling, normalize=normalize)
        streams = [self._conversation.embed(prompt, options) for prompt in prompts]
        try:
            self._wait(lambda: all(stream.inbox for stream in streams))
            return _vectors(streams)
        finally:
            for stream in streams:
                self._conversation.forget(stream)
            self._flush()

    def abort(self, request_id: str) -> None:
        """End a request early; its iterator ends with reason abort."""
        self._conversation.abort(request_id)
        self._pump(0)

    def command(self, body: AnyCommand, ranks: list[int] | None = None, deadline_s: float | None = None) -> Reply:
        """Run a command (see `bus.messages`) and wait for its reply.

        Raises:
            EngineError: it was refused or failed.
            TimeoutError: there was no answer for `timeout_s`.
        """
        command_id = self._conversation.command(body, ranks, deadline_s)
        self._wait(lambda: self._conversation.replies[command_id] is not None)
        return _reply(self._conversation.replies.pop(command_id))

    def close(self) -> None:
        """Abort what is unfinished and disconnect."""
        self._conversation.goodbye()
        self._flush()
        self._conversation.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, stream: _Stream) -> Iterator[Piece]:
        try:
            while not stream.over:
                self._wait(lambda: bool(stream.inbox))
                yield _take(stream)
        finally:
            self._conversation.forget(stream)
            self._flush()

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            if self._pump(TICK_S):
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise TimeoutError(f"the frontend said nothing for {self._timeout_s:g} s")

    def _pump(self, timeout_s: float) -> bool:
        """Send what there is to send, receive what has come; whether something has."""
        self._flush()
        arrived = bool(self._socket.poll(round(timeout_s * 1000)))
        while self._socket.poll(0):
            self._conversation.receive(self._socket.recv_multipart())
        self._conversation.tick()
        self._flush()
        return arrived

    def _flush(self) -> None:
        for parts in self._conversation.frames():
            self._socket.send_multipart(parts)


class AsyncClient:
    """The same for asyncio. To be made, used and closed in one event loop."""

    def __init__(self, endpoint: str, timeout_s: float = 120.0, index: int | None = None) -> None:
        self._conversation = _Conversation(index)
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_up(self._socket, self._conversation, endpoint)
        self._news = asyncio.Condition()
        self._receiver = asyncio.create_task(self._receive())

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        text_output: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
        **params: Any,
    ) -> AsyncIterator[Piece]:
        """As `Client.generate`."""
        options = _options(priority, cache_salt, rank, adapter, text_output=text_output)
        return self._read(self._conversation.generate(prompt, request_id, options, params))

    async def session(
        self,
        prompt: Prompt = (),
        *,
        request_id: str | None = None,
        text_output: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
        **params: Any,
    ) -> AsyncSession:
        """As `Client.session`."""
        options = _options(priority, cache_salt, rank, adapter, text_output=text_output)
        session = AsyncSession(self, self._conversation.open(prompt, request_id, options, params))
        await self._flush()
        return session

    async def complete(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """As `Client.complete`."""
        return _gather([piece async for piece in self.generate(prompt, **options)])

    async def embed(
        self,
        *prompts: Prompt,
        pooling: PoolingKind | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        adapter: str = "",
    ) -> Vectors:
        """As `Client.embed`."""
        options = _options(priority, cache_salt, rank, adapter, pooling=pooling, normalize=normalize)
        streams = [self._conversation.embed(prompt, options) for prompt in prompts]
        try:
            await self._wait(lambda: all(stream.inbox for stream in streams))
            return _vectors(streams)
        finally:
            for stream in streams:
                self._conversation.forget(stream)
            await self._flush()

    async def abort(self, request_id: str) -> None:
        """As `Client.abort`."""
        self._conversation.abort(request_id)
        await self._flush()

    async def command(self, body: AnyCommand, ranks: list[int] | None = None, deadline_s: float | None = None) -> Reply:
        """As `Client.command`."""
        command_id = self._conversation.command(body, ranks, deadline_s)
        await self._wait(lambda: self._conversation.replies[command_id] is not None)
        return _reply(self._conversation.replies.pop(command_id))

    async def close(self) -> None:
        """As `Client.close`."""
        self._receiver.cancel()
        self._conversation.goodbye()
        await self._flush()
        self._conversation.close()
        self._socket.close()
        self._context.term()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self, stream: _Stream) -> AsyncIterator[Piece]:
        try:
            while not stream.over:
                await self._wait(lambda: bool(stream.inbox))
                yield _take(stream)
        finally:
            self._conversation.forget(stream)
            await self._flush()

    async def _wait(self, condition: Any) -> None:
        await self._flush()
        async with self._news:
            while not condition():
                try:
                    await asyncio.wait_for(self._news.wait(), self._timeout_s)
                except TimeoutError:
                    raise TimeoutError(f"the frontend said nothing for {self._timeout_s:g} s") from None

    async def _receive(self) -> None:
        while True:
            arrived = await self._socket.poll(round(TICK_S * 1000))
            while await self._socket.poll(0):
                self._conversation.receive(await self._socket.recv_multipart())
            self._conversation.tick()
            await self._flush()
            if arrived:
                async with self._news:
                    self._news.notify_all()

    async def _flush(self) -> None:
        for parts in self._conversation.frames():
            await self._socket.send_multipart(parts)


def _options(priority: int, cache_salt: str, rank: int | None, adapter: str, **own: Any) -> dict[str, Any]:
    """Fields of a request: those that all kinds have, and some of its `own`."""
    return {"priority": priority, "cache_salt": cache_salt, "rank": rank, "adapter": adapter, **own}


def _params(params: dict[str, Any]) -> GenerateParams:
    try:
        return msgspec.convert(params, GenerateParams)
    except msgspec.ValidationError as error:
        raise EngineError("invalid", str(error)) from None


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    items = list(prompt)
    if items and isinstance(items[0], dict):
        return {"messages": items}
    return {"prompt_token_ids": pack_ints(np.asarray(items, dtype=np.int32))}


def _take(stream: _Stream) -> Piece:
    item = stream.inbox.popleft()
    if isinstance(item, EngineError):
        raise item
    assert isinstance(item, Piece)
    if item.finished is not None and item.finished.reason == "error":
        raise EngineError("failed", item.finished.message)
    return item


def _vectors(streams: list[_Stream]) -> Vectors:
    found = []
    for stream in streams:
        item = stream.inbox.popleft()
        if isinstance(item, EngineError):
            raise item
        if isinstance(item, Piece):
            assert item.finished is not None
            raise EngineError("failed", item.finished.message or "the request was aborted")
        found.append(unpack_floats(item.vector))
    return np.stack(found) if found else np.empty((0, 0), np.float32)


def _gather(pieces: list[Piece]) -> list[Completion]:
    completions = []
    for index in sorted({piece.index for piece in pieces}):
        own = [piece for piece in pieces if piece.index == index]
        completions.append(
            Completion(
                text="".join(piece.text for piece in own),
                token_ids=[token for piece in own for token in piece.token_ids],
                finished=next(piece.finished for piece in own if piece.finished is not None),
            )
        )
    return completions


def _reply(reply: Reply | EngineError | None) -> Reply:
    if isinstance(reply, EngineError):
        raise reply
    assert reply is not None
    return reply


def _set_up(socket: Any, conversation: _Conversation, endpoint: str) -> None:
    socket.setsockopt(zmq.IDENTITY, conversation.routing_id)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)  # while there is no frontend, a Hello a second waits; sending must not block
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
