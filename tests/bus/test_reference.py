"""docs/protocol.md says what the code does."""

import re
from typing import get_args

from bus import messages
from bus.buses import BUSES
from bus.links import Listener
from bus.reference import DOCUMENT, MARKER, render


def test_the_reference_is_the_definitions() -> None:
    _, marker, written = DOCUMENT.read_text().partition(MARKER)
    assert marker, "the marker line is gone"
    assert written.strip() == render().strip(), "run python -m bus.reference"


def test_every_message_and_command_is_described() -> None:
    for union in (*(side for bus in BUSES.values() for side in (bus.up, bus.down)), messages.AnyCommand):
        for kind in get_args(union):
            assert f"### {kind.__name__}\n" in render()
            assert kind.__doc__


def test_the_version_and_the_error_codes_of_the_prose_are_the_code_s() -> None:
    prose, _, _ = DOCUMENT.read_text().partition(MARKER)
    assert f"major {messages.PROTOCOL_MAJOR}, minor {messages.PROTOCOL_MINOR}." in prose
    source = (DOCUMENT.parent.parent / "bus" / "links.py").read_text()
    codes = set(re.findall(r'code="(\w+)"', source))
    assert Listener.__name__ in source
    assert codes
    assert not {code for code in codes if f"`{code}`" not in prose}
