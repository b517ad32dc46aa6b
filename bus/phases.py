"""How long a process takes for what it handles, by the kind of event: the parts of a step, as metrics see them."""

from bus.core import Event, Posted, Received


class Phases:
    """Totals by kind of event: the message's type, the posted value's, or the event's own (``Drained``, ``Tick``)."""

    def __init__(self) -> None:
        self._totals: dict[type, list[float]] = {}

    def add(self, event: Event, seconds: float) -> None:
        """An event was handled, and its effects performed, in `seconds`."""
        kind: type = type(event)
        if kind is Received:
            kind = type(event.message)  # type: ignore[union-attr]
        elif kind is Posted:
            kind = type(event.value)  # type: ignore[union-attr]
        total = self._totals.get(kind)
        if total is None:
            total = self._totals[kind] = [0.0, 0.0]
        total[0] += 1
        total[1] += seconds

    def snapshot(self) -> dict[str, float]:
        """All totals, as counters (see `bus.counters`)."""
        found = {}
        for kind, (count, seconds) in self._totals.items():
            found[f"bus_handled_events/{kind.__name__}"] = count
            found[f"bus_handling_seconds/{kind.__name__}"] = seconds
        return found
