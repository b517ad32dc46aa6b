"""``/dashboard``: one page that shows the engine live, and ``/dashboard/events``: what it shows, as a stream."""

import asyncio
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Any

from frontend.middleware import App, Message, Receive, Send
from frontend.sight import Sight

PAGE, EVENTS = "/dashboard", "/dashboard/events"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""The page loads nothing from anywhere."""


class Dashboard:
    """ASGI middleware that answers for the two paths; all else is the application's."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._page = resources.files("frontend").joinpath("dashboard.html").read_bytes()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in (PAGE, EVENTS):
            await self._app(scope, receive, send)
        elif scope["path"] == PAGE:
            await _begin(send, b"text/html; charset=utf-8", (b"content-security-policy", POLICY.encode()))
            await send({"type": "http.response.body", "body": self._page})
        else:
            await _stream(scope["app"].state.engine_client.sight, receive, send)


async def _begin(send: Send, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
    given = [(b"content-type", content_type), (b"cache-control", b"no-store"), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": given})


async def _stream(sight: Sight, receive: Receive, send: Send) -> None:
    """Server-sent events: first an array of the snapshots so far, then one of each new one."""
    await _begin(send, b"text/event-stream")
    follow = sight.follow()
    gone: asyncio.Task[Any] = asyncio.create_task(_until_gone(receive))
    try:
        while (made := await _next(follow, gone)) is not None:
            event = b"data: [" + b",".join(made) + b"]\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        gone.cancel()
        await follow.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(follow: AsyncGenerator[list[bytes]], gone: "asyncio.Task[Any]") -> list[bytes] | None:
    """What comes next; None when there is nothing more, or nobody to take it."""
    coming: asyncio.Task[list[bytes] | None] = asyncio.ensure_future(anext(follow, None))
    await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        return None
    return coming.result()
