"""The requests of a scheduler that have not ended, and how they end."""

from collections.abc import Callable, Iterator

from bus.messages import FinishReason, RequestEnded
from ranks.batch import NONE, Batch
from ranks.kv_cache import KvCache
from ranks.request import Request
from ranks.scheduler import Ended
from ranks.sessions import Sessions
from ranks.waiting import Waiting


class Members:
    """Knows all unfinished requests, wherever they are, and takes from those that end what they have."""

    def __init__(
        self,
        batch: Batch,
        kv: KvCache,
        waiting: Waiting,
        sessions: Sessions,
        drafts: dict[int, list[int]],
        unsettle: Callable[[], None],
    ) -> None:
        """`drafts` are those of the rows' next steps; `unsettle` is called before requests leave their rows."""
        self._batch = batch
        self._kv = kv
        self._waiting = waiting
        self._sessions = sessions
        self._drafts = drafts
        self._unsettle = unsettle
        self._by_key: dict[tuple[int, int], Request] = {}
        self._by_name: dict[str, Request] = {}
        self.constrained: dict[int, Request] = {}
        """Those with a grammar, by their number."""
        self.gone: list[Request] = []
        """Requests that have ended since the last schedule."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_key.values())

    def add(self, request: Request) -> None:
        """A request is there from now on; nobody else has its key or its name."""
        self._by_key[request.frontend, request.handle] = self._by_name[request.name] = request
        if request.matcher is not None:
            self.constrained[request.number] = request

    def get(self, frontend: int, handle: int) -> Request | None:
        """The request with this key."""
        return self._by_key.get((frontend, handle))

    def named(self, name: str) -> Request | None:
        """The request with this name."""
        return self._by_name.get(name)

    def has(self, request: Request) -> bool:
        """Whether a request has not ended."""
        return self._by_key.get((request.frontend, request.handle)) is request

    # Ends

    def finish(self, requests: list[Request], reason: FinishReason, code: str = "", message: str = "") -> list[Ended]:
        """End requests, wherever they are."""
        rows = [request.row for request in requests if request.row != NONE]
        for request in requests:
            if request.row == NONE and request.session is not None:
                self._sessions.remove(request)
            elif request.row == NONE:
                self._waiting.remove(request)
        ended = [self.forget(request, reason, code=code, message=message) for request in requests]
        self.leave(rows)
        return ended

    def forget(
        self, request: Request, reason: FinishReason, stop_reason: int | None = None, code: str = "", message: str = ""
    ) -> Ended:
        """End a request but for what it has: a row, which it is to `leave`."""
        del self._by_key[request.frontend, request.handle], self._by_name[request.name]
        self.constrained.pop(request.number, None)
        self.gone.append(request)
        ended = RequestEnded(handle=request.handle, reason=reason, stop_reason=stop_reason, code=code, message=message)
        return Ended(request.frontend, request.request_id, ended)

    def leave(self, rows: list[int]) -> None:
        """Give back the rows and blocks of requests that have ended."""
        if rows:
            self._unsettle()
            for row in rows:
                self._kv.release(row)
                self._sessions.left(self._batch.request(row))
                self._drafts.pop(row, None)
            self._batch.leave(rows)
