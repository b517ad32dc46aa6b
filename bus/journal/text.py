"""Records in words: lines for people, JSON lines for programs, and two items field by field."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from bus.journal.items import Item
from bus.journal.reader import Record

LONGEST = 24
"""Elements of a list that a line for people shows."""


def lines(record: Record, items: list[Item], begun: float) -> Iterator[str]:
    """A record for people: a line for the event, one for each effect. `begun` is the journal's first time."""
    turn = record.turn
    clock = datetime.fromtimestamp(turn.wall, UTC).strftime("%H:%M:%S.%f")
    head = f"{clock} {turn.at - begun:+12.6f} #{record.number}"
    for item in items:
        yield f"{head:{len(head)}}  {_arrow(item)} {one_line(item)}"
        head = " " * len(head)
    if turn.raised:
        yield f"{head}  !! {turn.raised}"


def json_line(record: Record, items: list[Item]) -> str:
    """A record for programs: one JSON object on a line."""
    turn = record.turn
    event, *effects = ({"type": item.type, "peer": _peer(item), "fields": item.fields} for item in items)
    value = {
        "number": record.number,
        "at": turn.at,
        "wall": turn.wall,
        "took": turn.took,
        "event": event,
        "effects": effects,
        "raised": turn.raised,
    }
    return msgspec.json.encode(value).decode()


def one_line(item: Item) -> str:
    """Type, peer, and fields of an event or effect."""
    return " ".join(word for word in (item.type, _peer(item), _shown(item.fields)) if word)


def differences(recorded: Item, other: Item) -> list[str]:
    """One line for each field of two items that differs, and for type and peer if they do."""
    found = [("type", recorded.type, other.type), ("peer", _peer(recorded), _peer(other))]
    found += _compare("", recorded.fields, other.fields)
    return [f"{path or 'value'}: {_shown(a)} → {_shown(b)}" for path, a, b in found if a != b]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def _compare(path: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        dot = f"{path}." if path else ""
        return [one for key in keys for one in _compare(f"{dot}{key}", a.get(key, ABSENT), b.get(key, ABSENT))]
    if isinstance(a, list) and isinstance(b, list):
        length = [(f"{path}.length", len(a), len(b))] if len(a) != len(b) else []
        return length + [
            one for place, pair in enumerate(zip(a, b, strict=False)) for one in _compare(f"{path}[{place}]", *pair)
        ]
    return [(path, a, b)]


def _arrow(item: Item) -> str:
    return ("->" if item.peer else " =") if item.is_effect else ("<-" if item.peer else " *")


def _peer(item: Item) -> str:
    return f"{item.peer.bus}:{item.peer}" if item.peer else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_inner(one)}" for key, one in value.items())
    return _inner(value)


def _inner(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + _shown(value) + "}"
    if isinstance(value, list):
        more = f", … {len(value)} in all" if len(value) > LONGEST else ""
        return "[" + ", ".join(map(_inner, value[:LONGEST])) + more + "]"
    return repr(value)
