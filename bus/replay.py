"""Feeds what a journal recorded to a core in this process, and compares all that it answers with what was recorded.

A role's own package says how its core is built and which values its threads post (`Subject`).
"""

import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from bus.buses import BUSES
from bus.config import Config
from bus.core import Core, Drained, Event, Peer, PeerDown, PeerUp, Posted, Received, Tick
from bus.journal.blocks import Damaged
from bus.journal.items import Item, items
from bus.journal.reader import Journal, JournalError
from bus.journal.records import ENCODER, EffectRecord, Header, Plain, Turn, as_is, effect_parts
from bus.journal.redaction import TRUE_NAMES
from bus.messages import KvEvents, Role
from bus.prefix import split_hashes

Kind = TypeVar("Kind")


class Subject(NamedTuple):
    """A core to replay, and what belongs to it."""

    core: Core
    posted: tuple[type, ...] = ()
    """Types of what the process's own threads post."""
    plain: Plain = as_is
    """The same as when it was recorded."""
    summary: Callable[[], str] | None = None
    """What else there is to tell when the replay is over."""


class Difference(NamedTuple):
    """Where a replayed core first did something else than was recorded.

    `place` counts the effects of the event from 1; 0 is the event itself. What one side lacks is None.
    """

    place: int
    recorded: Item | None
    replayed: Item | None


class Differs(Exception):
    """For a `Core` that does again what lies outside of the core: it came out otherwise than an event says."""

    def __init__(self, recorded: Item, replayed: Item) -> None:
        super().__init__(recorded, replayed)
        self.recorded = recorded
        self.replayed = replayed


class Replay:
    """Replays one journal, record by record."""

    def __init__(self, header: Header, subject: Subject, names: Mapping[bytes, bytes] | None = None) -> None:
        """`names` is what KV blocks in `KvEvents` of a redacted journal are called by the core; see `names_of`."""
        self.core = subject.core
        self._subject = subject
        self._events = EventReader(header.role, subject.posted)
        self._sent = {
            bus.name: msgspec.msgpack.Decoder(bus.down if bus.binds == header.role else bus.up)
            for bus in BUSES.values()
        }
        self._redacted = header.redacted
        self._names = names or {}

    def feed(self, turn: Turn) -> Difference | None:
        """Give the core the event of a record; the first difference in what it answers, if there is one.

        Raises:
            Exception: what the core raised, if it did not end the recorded process as well.
        """
        event = self._events.event(turn)
        if self._names and isinstance(event, Received) and isinstance(event.message, KvEvents):
            event = event._replace(message=self._renamed(event.message))
        try:
            effects = [effect_parts(effect, None, self._subject.plain) for effect in self.core.handle(event)]
        except Differs as differs:
            return Difference(0, differs.recorded, differs.replayed)
        except Exception as error:
            if turn.raised == f"{type(error).__name__}: {error}":
                return None
            raise
        if turn.raised:
            del effects[len(turn.effects) :]  # performing the next one ended the process
        replayed = [EffectRecord(subject, msgspec.Raw(ENCODER.encode(data))) for subject, data in effects]
        if len(replayed) == len(turn.effects) and all(map(self._equal, turn.effects, replayed)):
            return None
        return self._difference(turn, replayed)

    def _equal(self, recorded: EffectRecord, replayed: EffectRecord) -> bool:
        if recorded.subject != replayed.subject:
            return False
        if bytes(recorded.data) == bytes(replayed.data):
            return True
        if self._redacted:
            return _without_names(recorded) == _without_names(replayed)
        return self._meaning(recorded) == self._meaning(replayed)

    def _meaning(self, effect: EffectRecord) -> Any:
        """Of a frame, the message: a field that holds its default may be in the frame or not."""
        value = msgspec.msgpack.decode(effect.data)
        if not isinstance(effect.subject, Peer):
            return value
        try:
            return self._sent[effect.subject.bus].decode(value)
        except msgspec.ValidationError:  # other code has recorded it
            return value

    def _difference(self, turn: Turn, replayed: list[EffectRecord]) -> Difference:
        _, *before = items(turn)
        _, *now = items(msgspec.structs.replace(turn, effects=replayed))
        both = min(len(before), len(now))
        place = next((place for place in range(both) if not self._equal(turn.effects[place], replayed[place])), both)
        return Difference(place + 1, _at(before, place), _at(now, place))

    def _renamed(self, events: KvEvents) -> KvEvents:
        stored, removed = (
            memoryview(b"".join(self._names.get(name, name) for name in split_hashes(names)))
            for names in (events.stored, events.removed)
        )
        return msgspec.structs.replace(events, stored=stored, removed=removed)


class EventReader:
    """Makes events of records again."""

    def __init__(self, role: Role, posted: tuple[type, ...]) -> None:
        self._messages = {
            bus.name: msgspec.msgpack.Decoder(bus.up if bus.binds == role else bus.down) for bus in BUSES.values()
        }
        self._posted: dict[str, msgspec.msgpack.Decoder[Any]] = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_array) for kind in posted
        }
        self._body = msgspec.msgpack.Decoder(bytes)
        self._number = msgspec.msgpack.Decoder(float)
        self._tick = msgspec.msgpack.Decoder(Tick)

    def event(self, turn: Turn) -> Event:
        """The event of a record, as the core was given it."""
        subject = turn.subject
        match turn.kind:
            case "drained":
                return Drained(self._number.decode(turn.data))
            case "tick":
                return self._tick.decode(turn.data)
            case "posted":
                assert isinstance(subject, str)
                return Posted(self._posted[subject].decode(turn.data))
        assert isinstance(subject, Peer)
        match turn.kind:
            case "received":
                return Received(subject, self._messages[subject.bus].decode(self._body.decode(turn.data)))
            case "up":
                return PeerUp(subject, msgspec.msgpack.decode(turn.data, type=int | None) or 0)
        return PeerDown(subject, msgspec.msgpack.decode(turn.data, type=str))


def names_of(journal: Journal) -> dict[bytes, bytes]:
    """For a redacted journal: the names of KV blocks in `KvEvents`, and those for the tokens that stand there."""
    names: dict[bytes, bytes] = {}
    for record in journal.records():
        if isinstance(record, Damaged):
            continue
        for effect in record.turn.effects:
            for added in _added(_value(effect)):
                if TRUE_NAMES in added:
                    names.update(zip(split_hashes(added[TRUE_NAMES]), split_hashes(added["block_hashes"]), strict=True))
    return names


def config_of(header: Header) -> Config:
    """The configuration of the recorded process.

    Raises:
        JournalError: this code has not the same settings.
    """
    try:
        return msgspec.convert(dict(header.config), Config)
    except msgspec.ValidationError as error:
        raise JournalError(f"the journal's configuration is not one of this code: {error}") from None


def construction_of(header: Header, kind: type[Kind]) -> Kind:
    """What the recorded core was built from beside the configuration.

    Raises:
        JournalError: this code builds it from something else.
    """
    try:
        return msgspec.msgpack.decode(header.construction, type=kind)
    except msgspec.ValidationError as error:
        raise JournalError(f"the journal has not what this code builds a {header.role}'s core from: {error}") from None


def _at(effects: list[Item], place: int) -> Item | None:
    return effects[place] if place < len(effects) else None


def _value(effect: EffectRecord) -> Any:
    value = msgspec.msgpack.decode(effect.data)
    return msgspec.msgpack.decode(value) if isinstance(effect.subject, Peer) else value


def _added(value: Any) -> list[dict[str, Any]]:
    """The requests in the value of an effect: in `AddRequests` all of them, in any other message what may be one."""
    if not isinstance(value, dict):
        return []
    return value["requests"] if value.get("type") == "AddRequests" else [value]


def _without_names(effect: EffectRecord) -> Any:
    """The value of an effect, names of KV blocks aside: in a redacted journal `KvEvents` has other ones."""
    value = _value(effect)
    for added in _added(value):
        added.pop(TRUE_NAMES, None)
    if isinstance(value, dict) and value.get("type") == "KvEvents":
        value |= {key: len(value[key]) for key in ("stored", "removed") if key in value}
    return value


def _decode_array(kind: Any, value: Any) -> Any:
    """A one-dimensional numpy array of its bytes; `kind` is its annotation, like ``npt.NDArray[np.int32]``."""
    _, dtype = typing.get_args(kind)
    return np.frombuffer(value, typing.get_args(dtype)[0])
