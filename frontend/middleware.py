"""What our HTTP server does on top of vLLM's: unknown parameters and early failures get a status of 4xx or 5xx."""

import difflib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from http import HTTPStatus
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

from bus.log import get_logger
from frontend.ignored import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, fault_of

log = get_logger()

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Longest body of a request; the rest of a longer one is not read."""

_ERROR_EVENT = b'data: {"error": '


class StrictRequests:
    """ASGI middleware.

    vLLM ignores parameters it does not know; a misspelt one is refused here, and one that this engine would ignore. And
    vLLM starts a streamed response before it has looked at the request, so that a refusal would come with status 200:
    the start is held back until the first event is there, and an error that is the first event becomes the response.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, _TellStart(send))
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, messages = await _read(receive)
        if len(body) > MAX_BODY_BYTES:
            await _respond(send, 413, _error(413, f"the request has more than {MAX_BODY_BYTES} bytes; send less"))
            return
        if scope["path"] not in _request_types():
            await self._app(scope, _replay(messages, receive), send)
            return
        refusal = _refusal(scope["path"], body)
        if refusal is not None:
            await _respond(send, 400, refusal)
            return
        await self._app(scope, _replay(messages, receive), _HeldStart(send))


class _TellStart:
    """`send`, with a line in the log when the application has started: the server listens right after that."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            log.info("HTTP is up")
        await self._send(message)


class _HeldStart:
    """`send`, with the start of the response held back until its first part is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._replaced:
            return
        if self._start is not None:
            start, self._start = self._start, None
            error = _error_of(message.get("body", b""))
            if error is not None:
                self._replaced = True
                code = error["error"]["code"]
                error["error"]["type"] = HTTPStatus(code).phrase
                await _respond(self._send, code, error)
                return
            await self._send(start)
        await self._send(message)


def _error_of(body: bytes) -> Any | None:
    """The error object, if that is what the first event of a stream is."""
    if not body.startswith(_ERROR_EVENT):
        return None
    return json.loads(body.partition(b"\n")[0].removeprefix(b"data: "))


async def _read(receive: Receive) -> tuple[bytes, list[Message]]:
    """The request's body, or what of it shows that it is too long; and the messages it came in."""
    messages: list[Message] = []
    more, size = True, 0
    while more and size <= MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(message.get("body", b"") for message in messages), messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return replay


def _refusal(path: str, body: bytes) -> Any | None:
    """What is answered to a body with a parameter that this path does not have, or that would be ignored.

    A body that is no JSON object is vLLM's to refuse.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    known = _parameters(path)
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, known, n=1)
        allowed = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
        return _error(400, f"{unknown!r} is not a parameter of {path}; {allowed}", unknown)
    ignored = fault_of(path, given)
    if ignored is not None:
        name, sentence = ignored
        return _error(400, sentence, name)
    return None


def _error(status: int, message: str, parameter: str | None = None) -> Any:
    return {"error": {"message": message, "type": HTTPStatus(status).phrase, "param": parameter, "code": status}}


async def _respond(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@cache
def _request_types() -> dict[str, tuple[type[BaseModel], ...]]:
    """The types of the bodies that are checked, by path."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest, EmbeddingRequest
    from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

    rerank = (RerankRequest,)

    return {
        CHAT: (ChatCompletionRequest,),
        COMPLETIONS: (CompletionRequest,),
        RESPONSES: (ResponsesRequest,),
        MESSAGES: (AnthropicMessagesRequest,),
        COUNT_TOKENS: (AnthropicCountTokensRequest,),
        "/v1/load_lora_adapter": (LoadLoRAAdapterRequest,),
        "/v1/unload_lora_adapter": (UnloadLoRAAdapterRequest,),
        "/tokenize": get_args(TokenizeRequest),
        "/detokenize": (DetokenizeRequest,),
        "/v1/embeddings": get_args(get_args(EmbeddingRequest)[0]),
        "/v2/embed": (CohereEmbedRequest,),
        "/pooling": get_args(get_args(PoolingRequest)[0])[:2],  # the third is for plugins
        "/score": get_args(ScoreRequest),
        "/v1/score": get_args(ScoreRequest),
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
    }


@cache
def _parameters(path: str) -> frozenset[str]:
    names: set[str] = set()
    for request_type in _request_types()[path]:
        for name, field in request_type.model_fields.items():
            names.add(name)
            if field.alias:
                names.add(field.alias)
    return frozenset(names)
