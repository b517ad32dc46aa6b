"""How long a process takes for what it handles."""

from bus.core import Drained, Peer, Posted, Received
from bus.messages import Goodbye
from bus.phases import Phases


def test_totals_are_by_what_was_handled() -> None:
    phases = Phases()
    for event, seconds in (
        (Drained(1.0), 0.25),
        (Drained(2.0), 0.5),
        (Received(Peer("step", "rank", 0, 1), Goodbye()), 2.0),
        (Posted("a value"), 4.0),
    ):
        phases.add(event, seconds)
    assert phases.snapshot() == {
        "bus_handled_events/Drained": 2.0,
        "bus_handling_seconds/Drained": 0.75,
        "bus_handled_events/Goodbye": 1.0,
        "bus_handling_seconds/Goodbye": 2.0,
        "bus_handled_events/str": 1.0,
        "bus_handling_seconds/str": 4.0,
    }
