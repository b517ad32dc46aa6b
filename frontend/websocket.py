"""Sessions over WebSocket: JSON messages in and out, for browsers and scripts. See docs/http.md."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi.responses import JSONResponse
from fastapi.websockets import WebSocket, WebSocketDisconnect

from bus.messages import (
    Abort,
    Append,
    Delta,
    EndTurn,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Logprobs,
    Message,
    TurnFinished,
)
from bus.wire import unpack_floats, unpack_ints
from frontend.middleware import App, Receive, Send
from frontend.middleware import Message as Event
from frontend.seam import BeginTurn, Call, ConnectionClosed, SessionCall
from frontend.session_text import SessionTexts

PATH = "/v1/sessions"
MAX_BYTES = 8 * 1024 * 1024
"""Longest message that is read; the server ends a connection that sends one of twice that."""

DEFAULT_ID = "session"


class _Ask(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what a connection may say. `id` tells its sessions apart."""

    id: str = DEFAULT_ID


class Open(_Ask, frozen=True, kw_only=True, tag="open"):
    """As `Generate` with `resumable`."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    params: GenerateParams = GenerateParams()
    text_output: bool = True
    priority: int = 0
    cache_salt: str = ""
    rank: int | None = None
    adapter: str = ""


class AppendInput(_Ask, frozen=True, kw_only=True, tag="append"):
    """As `Append`."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    params: GenerateParams | None = None


class StopTurn(_Ask, frozen=True, kw_only=True, tag="end_turn"):
    """As `EndTurn`."""

    turn: int
    n: int


class Close(_Ask, frozen=True, kw_only=True, tag="close"):
    """As `Append` without `resumable`."""


class AbortSession(_Ask, frozen=True, kw_only=True, tag="abort"):
    """As `Abort`."""


_DECODER = msgspec.json.Decoder(Open | AppendInput | StopTurn | Close | AbortSession)


class SessionSockets:
    """The WebSocket connections of one frontend."""

    def __init__(self, texts: SessionTexts, post: Callable[[Call], None], allowed_origins: str) -> None:
        """`allowed_origins` are those of web pages that may connect, with commas between; * is all."""
        self._texts = texts
        self._post = post
        self._origins = frozenset(origin.strip().rstrip("/") for origin in allowed_origins.split(","))
        self._numbers = itertools.count(1)

    async def serve(self, websocket: WebSocket) -> None:
        """Hold one connection, from its handshake to its end; its sessions end with it."""
        origin = websocket.headers.get("origin")
        if origin is not None and not self._may_connect(origin, websocket.headers.get("host", "")):
            sentence = f"pages of {origin} may not open sessions; the setting allowed_origins names those that may"
            refusal = {"error": {"message": sentence, "type": "Forbidden", "param": None, "code": 403}}
            await websocket.send_denial_response(JSONResponse(refusal, status_code=403))
            return
        await websocket.accept()
        number = next(self._numbers)
        outbox = Outbox()
        self._texts.connections[number] = outbox.put
        writer = asyncio.create_task(outbox.write(websocket))
        try:
            await self._read(websocket, number, outbox)
        finally:
            del self._texts.connections[number]
            self._post(ConnectionClosed(connection=number))
            writer.cancel()

    def _may_connect(self, origin: str, host: str) -> bool:
        return origin.partition("://")[2] == host or "*" in self._origins or origin in self._origins

    async def _read(self, websocket: WebSocket, number: int, outbox: "Outbox") -> None:
        while True:
            frame = await websocket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            text = frame.get("text")
            try:
                self._post(SessionCall(connection=number, message=_message(text)))
            except _Unreadable as error:
                outbox.put(0, Error(code="invalid", message=str(error), request_id=error.session))


class Outbox:
    """What a connection is still to be sent. Deltas that wait are put together: a slow reader gets fewer and longer."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._last_of: dict[str, dict[str, Any]] = {}
        self._filled = asyncio.Event()

    def put(self, turn: int, message: Message | BeginTurn) -> None:
        """Queue what is to be told of a session; `turn` is that of a delta."""
        event = _event(turn, message)
        name = event["id"]
        last = self._last_of.get(name)
        if last is not None and _can_follow(last, event):
            last["text"] += event["text"]
            last["token_ids"] += event["token_ids"]
        else:
            self._events.append(event)
            self._last_of[name] = event
        self._filled.set()

    async def write(self, websocket: WebSocket) -> None:
        """Send what is queued, for ever."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._events:
                    event = self._events.popleft()
                    if self._last_of.get(event["id"]) is event:
                        del self._last_of[event["id"]]
                    await websocket.send_text(msgspec.json.encode(event).decode())
        except (WebSocketDisconnect, RuntimeError):
            pass  # the reader finds that the connection is gone


class _Unreadable(Exception):
    """What a connection sent is no message; the text is the sentence, `session` its id where there is one."""

    def __init__(self, sentence: str, session: str = "") -> None:
        super().__init__(sentence)
        self.session = session


class SessionRoute:
    """ASGI middleware that gives vLLM's server the endpoint for sessions when it starts.

    So the endpoint lies behind the server's other middleware, such as that which asks for an API key. The server's
    engine client is a `frontend.engine.BusLLM`.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["app"].add_api_websocket_route(PATH, _sessions)
        await self._app(scope, receive, send)


async def _sessions(websocket: WebSocket) -> None:
    await websocket.app.state.engine_client.sockets.serve(websocket)


def _message(text: str | None) -> Generate | Append | EndTurn | Abort:
    """What a frame says, as a client of the client bus would say it."""
    if text is None:
        raise _Unreadable("a message is text, in JSON; this one is binary")
    size = len(text.encode())
    if size > MAX_BYTES:
        raise _Unreadable(f"the message has {size} bytes; at most {MAX_BYTES} are allowed")
    try:
        asked = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Unreadable(f"not a valid message: {error}", _id_in(text)) from None
    if not asked.id:
        raise _Unreadable("`id` is empty; leave it out, or give each session one of its own")
    match asked:
        case Open():
            return Generate(request_id=asked.id, resumable=True, **_fields(asked))
        case AppendInput():
            return Append(request_id=asked.id, **_fields(asked))
        case StopTurn():
            return EndTurn(request_id=asked.id, turn=asked.turn, n=asked.n)
        case Close():
            return Append(request_id=asked.id, resumable=False)
        case _:
            return Abort(request_id=asked.id)


def _fields(asked: Open | AppendInput) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(asked).items() if name != "id"}


def _id_in(text: str) -> str:
    """The `id` of a message that is otherwise wrong."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ""
    name = found.get("id", DEFAULT_ID) if isinstance(found, dict) else ""
    return name if isinstance(name, str) else ""


def _event(turn: int, message: Message | BeginTurn) -> dict[str, Any]:
    """What a connection is sent of a message. The first turn's beginning is the session's."""
    fields = msgspec.structs.asdict(message)
    name = fields.pop("request_id", "")
    match message:
        case Delta():
            logprobs = {} if message.logprobs is None else {"logprobs": _logprobs(message.logprobs)}
            tokens = unpack_ints(message.token_ids).tolist()
            return {"type": "delta", "id": name, "turn": turn, "text": message.text, "token_ids": tokens, **logprobs}
        case BeginTurn():
            return {"type": "opened", "id": name}
        case TurnFinished():
            return {"type": "turn_finished", "id": name, **fields}
        case Finished():
            del fields["index"]
            return {"type": "finished", "id": name, **fields}
        case Error():
            return {"type": "error", "id": name, "code": message.code, "message": message.message, "turn": message.turn}
        case _:
            raise TypeError(f"{type(message).__name__} is nothing to tell a connection")


def _can_follow(last: dict[str, Any], event: dict[str, Any]) -> bool:
    """Whether an event can be put together with the one before it."""
    both = (last, event)
    return last.get("turn") == event.get("turn") and all(
        one["type"] == "delta" and "logprobs" not in one for one in both
    )


def _logprobs(logprobs: Logprobs) -> list[dict[str, Any]]:
    """One object per position: the sampled token's rank, and the tokens with their values, the sampled one first."""
    shape = (logprobs.positions, -1)
    tokens = unpack_ints(logprobs.token_ids).reshape(shape).tolist()
    values = unpack_floats(logprobs.values).reshape(shape).tolist()
    ranks = unpack_ints(logprobs.ranks).tolist()
    return [
        {"rank": rank, "token_ids": ids, "values": one} for rank, ids, one in zip(ranks, tokens, values, strict=True)
    ]
