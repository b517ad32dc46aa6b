"""What the client library's users hold of a session: itself, and its turns, for plain scripts and for asyncio."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bus.messages import Finished, TurnFinished
from frontend.client_session import SessionStream, TurnStream
from frontend.pieces import EngineError, Piece, Prompt

if TYPE_CHECKING:
    from frontend.client import AsyncClient, Client


class _OfTurn:
    """What can be said of a turn without waiting."""

    def __init__(self, session: SessionStream, stream: TurnStream) -> None:
        self._session = session
        self._stream = stream

    @property
    def text(self) -> str:
        """What has come so far."""
        return self._stream.text

    @property
    def token_ids(self) -> list[int]:
        """What has come so far."""
        return list(self._stream.token_ids)


class _OfSession:
    """What can be said of a session without waiting."""

    def __init__(self, stream: SessionStream) -> None:
        self._stream = stream

    @property
    def request_id(self) -> str:
        """Its name."""
        return self._stream.request.request_id

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._stream.over


class Turn(_OfTurn):
    """A turn of a session: iterate over its output, as it comes."""

    def __init__(self, client: "Client", session: SessionStream, stream: TurnStream) -> None:
        super().__init__(session, stream)
        self._client = client

    def __iter__(self) -> Iterator[Piece]:
        """What was not read yet, until the turn has ended.

        Raises:
            EngineError: the input was refused, or the session ended before the turn.
            TimeoutError: nothing was heard for the client's `timeout_s`.
        """
        stream = self._stream
        while True:
            self._client._wait(lambda: bool(stream.inbox) or stream.over)
            if not stream.inbox:
                break
            yield stream.inbox.popleft()
        if stream.error is not None:
            raise stream.error

    def end(self) -> TurnFinished:
        """Read what is left of the turn; how it has ended. Errors as in iteration."""
        for _ in self:
            pass
        assert self._stream.finished is not None
        return self._stream.finished

    def stop(self, n: int | None = None) -> None:
        """Stop the turn, and keep its first `n` tokens, or those that have come. Nothing happens unless it runs."""
        self._client._conversation.say(self._session.stop(self._stream, n))
        self._client._pump(0)


class Session(_OfSession):
    """A session. `first` is its first turn."""

    def __init__(self, client: "Client", stream: SessionStream) -> None:
        super().__init__(stream)
        self._client = client
        self.first = Turn(client, stream, stream.turns[0])

    def append(self, prompt: Prompt = (), **params: Any) -> Turn:
        """Give it its next input, at any time. `params` are for this turn, whole; none are those it was opened with.

        Chat messages follow the answer of the turn before. Turns run one after the other, in this order.

        Raises:
            EngineError: it has ended, or a parameter is not allowed.
        """
        turn = self._client._conversation.append(self._stream, prompt, params)
        self._client._pump(0)
        return Turn(self._client, self._stream, turn)

    def close(self) -> Finished:
        """End it after the turns there are, and wait for that.

        Raises:
            EngineError: it has failed, or was refused.
        """
        self._client._conversation.say(self._stream.close())
        return self._end()

    def abort(self) -> Finished:
        """End it now, and wait for that. Errors as in `close`."""
        self._client._conversation.say(self._stream.abort())
        return self._end()

    def _end(self) -> Finished:
        self._client._wait(lambda: self._stream.over)
        return _session_end(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._client._conversation.leave(self._stream)
        elif not self._stream.over:
            self.close()


class AsyncTurn(_OfTurn):
    """As `Turn`."""

    def __init__(self, client: "AsyncClient", session: SessionStream, stream: TurnStream) -> None:
        super().__init__(session, stream)
        self._client = client

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """As for `Turn`."""
        stream = self._stream
        while True:
            await self._client._wait(lambda: bool(stream.inbox) or stream.over)
            if not stream.inbox:
                break
            yield stream.inbox.popleft()
        if stream.error is not None:
            raise stream.error

    async def end(self) -> TurnFinished:
        """As `Turn.end`."""
        async for _ in self:
            pass
        assert self._stream.finished is not None
        return self._stream.finished

    async def stop(self, n: int | None = None) -> None:
        """As `Turn.stop`."""
        self._client._conversation.say(self._session.stop(self._stream, n))
        await self._client._flush()


class AsyncSession(_OfSession):
    """As `Session`."""

    def __init__(self, client: "AsyncClient", stream: SessionStream) -> None:
        super().__init__(stream)
        self._client = client
        self.first = AsyncTurn(client, stream, stream.turns[0])

    async def append(self, prompt: Prompt = (), **params: Any) -> AsyncTurn:
        """As `Session.append`."""
        turn = self._client._conversation.append(self._stream, prompt, params)
        await self._client._flush()
        return AsyncTurn(self._client, self._stream, turn)

    async def close(self) -> Finished:
        """As `Session.close`."""
        self._client._conversation.say(self._stream.close())
        return await self._end()

    async def abort(self) -> Finished:
        """As `Session.abort`."""
        self._client._conversation.say(self._stream.abort())
        return await self._end()

    async def _end(self) -> Finished:
        await self._client._wait(lambda: self._stream.over)
        return _session_end(self._stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._client._conversation.leave(self._stream)
            await self._client._flush()
        elif not self._stream.over:
            await self.close()


def _session_end(stream: SessionStream) -> Finished:
    if stream.error is not None:
        raise stream.error
    finished = stream.finished
    assert finished is not None
    if finished.reason == "error":
        raise EngineError("failed", finished.message)
    return finished
