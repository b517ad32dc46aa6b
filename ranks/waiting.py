"""The requests that wait for a row, in the order in which they are to get one."""

import heapq
from itertools import count
from typing import NamedTuple

from ranks.request import Request


class _Entry(NamedTuple):
    """A request's place in the heap; void if the request has left or has another place by now."""

    place: tuple[float, ...]
    serial: int
    request: Request

    @property
    def is_void(self) -> bool:
        return self.request.place is not self.place


class Waiting:
    """First come, first served, preempted ones before all others; or by (priority, arrival time) where asked.

    Requests whose grammar is not there yet count among those that wait, but are not offered. A session waits where it
    stood when its last turn ended.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[_Entry] = []
        self._serial = count()
        self._came = count()
        self._returned = count(-1, -1)
        self._size = 0
        self.num_tokens = 0
        """Tokens of all of them."""
        self.num_computed = 0
        """How many of these have their KV in blocks that sessions keep."""

    def __len__(self) -> int:
        return self._size

    @property
    def offers_any(self) -> bool:
        """Whether there is one that waits for nothing but a row."""
        return self.first() is not None

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self._insert(request, self.next_place())

    def next_place(self) -> int:
        """The place of who comes now, behind all that came before."""
        return next(self._came)

    def add_at(self, request: Request, place: int) -> None:
        """Let a request wait at a place that it got from `next_place`."""
        self._insert(request, place)

    def add_first(self, request: Request) -> None:
        """Let a preempted request wait, before the others if they are served as they came."""
        self._insert(request, next(self._returned))

    def _insert(self, request: Request, turn: int) -> None:
        if self._by_priority:
            request.place = (request.priority, request.arrival_time, request.number)
        else:
            request.place = (turn,)
        self._size += 1
        self.num_tokens += request.tokens.size
        self.num_computed += _computed(request)
        if not request.ticket:
            self.offer(request)

    def offer(self, request: Request) -> None:
        """A request that waited for its grammar may get a row from now on."""
        heapq.heappush(self._heap, _Entry(request.place, next(self._serial), request))

    def first(self) -> Request | None:
        """The request that is next; None if none can be."""
        while self._heap and self._heap[0].is_void:
            heapq.heappop(self._heap)
        return self._heap[0].request if self._heap else None

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
        request.place = ()
        self._size -= 1
        self.num_tokens -= request.tokens.size
        self.num_computed -= _computed(request)
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [entry for entry in self._heap if not entry.is_void]
            heapq.heapify(self._heap)


def _computed(request: Request) -> int:
    return 0 if request.session is None else request.session.computed
