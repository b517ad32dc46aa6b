"""Totals since the start of a process: plain numbers, reported in Load and ExecutorStatus and exported in /metrics."""


class Counters:
    """Named totals. A name is a metric and its label values, joined by slashes: ``bus_rejected_frames/step/stale``."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count `amount` more."""
        self._totals[name] = self._totals.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Let `name` be `value`: for what goes up and down."""
        self._totals[name] = value

    def snapshot(self) -> dict[str, float]:
        """All totals, copied."""
        return dict(self._totals)
