"""Which row of the rank's batch each running request has.

A row that a request leaves is free again only when no step in flight names it: until then the executor may still
write to it, and what comes back for it belongs to the request that left.
"""

from collections import deque


class Rows:
    """The rows 0 … size - 1 of a rank. Steps are made and complete in rising order of their numbers."""

    def __init__(self, size: int) -> None:
        self._free = deque(range(size))
        self._last_step = [-1] * size
        self._leaving: deque[int] = deque()
        self._completed = -1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        """Rows that requests have left but steps in flight still name."""
        return len(self._leaving)

    def take(self) -> int:
        """Give a free row to a request; the one that has been free longest."""
        return self._free.popleft()

    def use(self, row: int, step: int) -> None:
        """Note that a step names this row."""
        self._last_step[row] = step

    def leave(self, row: int) -> None:
        """The row's request has left it."""
        if self._last_step[row] <= self._completed:
            self._free.append(row)
        else:
            self._leaving.append(row)

    def complete(self, step: int) -> None:
        """A step has come back: rows that only it and earlier ones named become free."""
        self._completed = step
        for _ in range(len(self._leaving)):
            self.leave(self._leaving.popleft())
