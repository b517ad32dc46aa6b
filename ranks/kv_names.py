"""The names of the blocks in the prefix cache, counted, and what changed since frontends were last told."""

from ranks.scheduler import KvChanges


class KvNames:
    """Several blocks may have the same name; it is gone when the last of them is."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._before: dict[bytes, bool] = {}
        self._cleared = False

    def __contains__(self, name: bytes) -> bool:
        return name in self._counts

    def store(self, name: bytes) -> None:
        count = self._counts.get(name, 0)
        self._before.setdefault(name, count > 0)
        self._counts[name] = count + 1

    def remove(self, name: bytes) -> None:
        count = self._counts[name]
        self._before.setdefault(name, True)
        if count == 1:
            del self._counts[name]
        else:
            self._counts[name] = count - 1

    def clear(self) -> None:
        self._counts.clear()
        self._before.clear()
        self._cleared = True

    def take_changes(self) -> KvChanges:
        """The net changes since the last call."""
        stored = b"".join(name for name, before in self._before.items() if not before and name in self._counts)
        removed = b"".join(name for name, before in self._before.items() if before and name not in self._counts)
        changes = KvChanges(stored, removed, self._cleared)
        self._before.clear()
        self._cleared = False
        return changes

    def snapshot(self) -> bytes:
        """All names, in the order in which they came."""
        return b"".join(self._counts)
