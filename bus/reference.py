"""Writes the message reference of docs/protocol.md from the definitions themselves: python -m bus.reference

It replaces all after the marker line in that file, so that the document says what the code does; a test holds them
together.
"""

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bus import messages
from bus.buses import BUSES
from bus.messages import Command, Message

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"
MARKER = "<!-- From here on: written by `python -m bus.reference` from the definitions; do not edit. -->"


def render() -> str:
    """The reference as Markdown: who sends what on which bus, then every message, command and part with its fields."""
    lines = ["## Who sends what", "", "| bus | from | to | messages |", "|---|---|---|---|"]
    for bus in BUSES.values():
        connects = " and ".join(bus.connects)
        lines.append(f"| {bus.name} | {connects} | {bus.binds} | {_names(bus.up)} |")
        lines.append(f"| {bus.name} | {bus.binds} | {connects} | {_names(bus.down)} |")
    found = _structs()
    kinds = (
        ("Messages", [kind for kind in found if issubclass(kind, Message)]),
        ("Commands", [kind for kind in found if issubclass(kind, Command)]),
        ("Parts", [kind for kind in found if not issubclass(kind, Message | Command)]),
    )
    for title, structs in kinds:
        lines += ["", f"## {title}"]
        for kind in structs:
            lines += ["", f"### {kind.__name__}", "", _prose(inspect.getdoc(kind) or ""), *_fields(kind)]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Bring docs/protocol.md up to date."""
    head, _, _ = DOCUMENT.read_text().partition(MARKER)
    DOCUMENT.write_text(f"{head}{MARKER}\n\n{render()}")


def _structs() -> list[type[msgspec.Struct]]:
    """All structs in use, in the order of their definition."""
    bases = {messages.Message, messages.ClientMessage, messages.Command}
    return [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value not in bases
    ]


def _fields(kind: type[msgspec.Struct]) -> list[str]:
    fields = msgspec.structs.fields(kind)
    if not fields:
        return []
    hints = typing.get_type_hints(kind)
    lines = ["", "| field | type | default |", "|---|---|---|"]
    for field in fields:
        name = _type(hints[field.name])
        lines.append(f"| `{field.name}` | {name} | {_default(field)} |")
    return lines


def _type(kind: Any) -> str:
    if kind is memoryview:
        return "bytes"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (types.UnionType, typing.Union):
        if all(isinstance(arm, type) and issubclass(arm, Command) for arm in arguments):
            return "any of the commands below"
        return " or ".join(_type(arm) for arm in arguments)
    if origin is list:
        return f"array of {_type(arguments[0])}"
    if origin is dict:
        return f"map from {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "nil", Any: "anything"}[kind]


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT:
        return "empty"
    if isinstance(field.default, memoryview):
        return "empty"
    if isinstance(field.default, msgspec.Struct):
        return "its defaults"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _names(union: Any) -> str:
    return ", ".join(f"[{arm.__name__}](#{arm.__name__.lower()})" for arm in typing.get_args(union))


def _prose(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


if __name__ == "__main__":
    write()
