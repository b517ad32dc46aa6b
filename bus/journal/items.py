"""What a record says, in plain values: the event and each effect with type, peer and named fields."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from bus.core import Peer, Tick
from bus.journal.records import EventKind, Turn
from bus.journal.redaction import NAMES, TRUE_NAMES
from bus.wire import unpack_floats, unpack_ints

FLOATS = frozenset({"values"})
HASHES = NAMES | {TRUE_NAMES}
HASH_HEX = 32
"""Characters of one block name (16 bytes) in hexadecimal."""


class Item(NamedTuple):
    """An event, or an effect of one. `fields` is a dictionary where the fields have names."""

    type: str
    peer: Peer | None
    fields: Any
    is_effect: bool


def items(turn: Turn) -> list[Item]:
    """The event of a record, then its effects."""
    event = _event(turn.kind, turn.subject, msgspec.msgpack.decode(turn.data))
    return [event, *(_effect(effect.subject, msgspec.msgpack.decode(effect.data)) for effect in turn.effects)]


def readable(value: Any, name: str = "") -> Any:
    """Bytes under field `name` as the numbers they are, all the way down; other values as they are."""
    if isinstance(value, dict):
        return {key: readable(one, key if isinstance(key, str) else "") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [readable(one, name) for one in value]
    if isinstance(value, bytes):
        if name in HASHES or len(value) % 4:
            text = value.hex()
            return [text[start : start + HASH_HEX] for start in range(0, len(text), HASH_HEX)]
        return (unpack_floats if name in FLOATS else unpack_ints)(memoryview(value)).tolist()
    return value


def _event(kind: EventKind, subject: Any, data: Any) -> Item:
    match kind:
        case "received":
            return _frame(subject, data, is_effect=False)
        case "posted":
            return Item(subject, None, readable(data), is_effect=False)
        case "up":
            return Item("PeerUp", subject, {"incarnation": subject.incarnation}, is_effect=False)
        case "down":
            return Item("PeerDown", subject, {"reason": data}, is_effect=False)
        case "state":
            return Item("State", None, {"bytes": len(data)}, is_effect=False)
        case "drained":
            return Item("Drained", None, {"now": data}, is_effect=False)
    return Item("Tick", None, dict(zip(Tick._fields, data, strict=True)), is_effect=False)


def _effect(subject: Peer | str, data: Any) -> Item:
    if isinstance(subject, Peer):
        return _frame(subject, data, is_effect=True)
    return Item(subject, None, readable(data), is_effect=True)


def _frame(subject: Any, body: bytes, is_effect: bool) -> Item:
    fields = msgspec.msgpack.decode(body)
    kind = fields.pop("type")
    return Item(kind, subject, readable(fields), is_effect)


class Tracker:
    """Knows which requests the items of a journal are about, when it is shown all of them in order."""

    def __init__(self) -> None:
        self._of_handle: dict[tuple[Any, ...], str] = {}
        self._of_row: dict[tuple[Any, ...], str] = {}
        self._last: dict[tuple[Any, ...], list[int]] = {}
        """The rows of each rank's last schedule, which may run again."""
        self._of_step: dict[tuple[Any, ...], frozenset[str]] = {}

    def requests(self, item: Item) -> frozenset[str]:
        """Ids of the requests that this item names, directly or by handle, row or step."""
        fields = item.fields
        if not isinstance(fields, dict) or item.type in ("Tick", "Load", "KvEvents"):
            return frozenset()
        found = set(_ids(fields))
        peer = (item.peer.role, item.peer.index) if item.peer else ()
        for added in (fields, *fields["requests"]) if item.type == "AddRequests" else (fields,):
            if "handle" in added and "request_id" in added:
                self._of_handle[*peer, added["handle"]] = added["request_id"]
        for handle in _handles(item.type, fields):
            name = self._of_handle.get((*peer, handle))
            if name is not None:
                found.add(name)
        if item.type == "PartialSchedule":
            found |= self._schedule(peer, fields)
        elif item.type == "StandingSchedule":
            for step in range(fields["first_step"], fields["first_step"] + fields["num_steps"]):
                found |= self._schedule(peer, {"again": True, "step": step})
        elif item.type == "StepResult":
            found |= self._of_step.pop((*peer, fields["step"]), frozenset())
        return frozenset(found)

    def _schedule(self, peer: tuple[Any, ...], fields: dict[str, Any]) -> frozenset[str]:
        for setup in [*fields.get("new", ()), *fields.get("resumed", ())]:
            self._of_row[*peer, setup["row"]] = setup["request_id"]
        rows = self._last[peer] = self._last.get(peer, []) if fields.get("again") else fields["rows"]
        names = (self._of_row.get((*peer, row)) for row in rows)
        found = frozenset(name for name in names if name is not None)
        self._of_step[*peer, fields["step"]] = found
        return found


def matches(wanted: str, found: Iterable[str]) -> bool:
    """Whether one of the ids is `wanted`, a child of it, or what the HTTP side has made of it."""
    return any(one == wanted or one.startswith((f"{wanted}/", f"{wanted}-")) for one in found)


def step_of(item: Item) -> int | None:
    """The step an item belongs to."""
    if not isinstance(item.fields, dict):
        return None
    step = item.fields.get("step") or item.fields.get("number" if item.type in ("RunStep", "StepDone") else "step")
    return step if isinstance(step, int) else None


def _ids(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "request_id" and one:
                yield one
            elif key == "request_ids" and one:
                yield from one
            elif isinstance(one, dict | list):
                yield from _ids(one)
    elif isinstance(value, list):
        for one in value:
            if isinstance(one, dict):
                yield from _ids(one)


def _handles(kind: str, fields: dict[str, Any]) -> Iterator[int]:
    if kind in ("Outputs", "AbortRequests"):
        yield from fields.get("handles", ())
    if kind == "Outputs":
        for group in ("started", "turns", "ended"):
            yield from (one["handle"] for one in fields.get(group, ()))
    if kind in ("AppendInput", "StopTurn", "Error") and "handle" in fields:
        yield fields["handle"]
