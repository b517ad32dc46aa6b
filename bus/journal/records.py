"""What is in a journal: a header per file, and a record per event with what the core answered to it.

Records are MessagePack arrays. Frames are in them byte for byte as they travelled. What the process's own threads
posted, and effects its own shell performs, are encoded by msgspec as they are, numpy arrays as their bytes.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.messages import Role

FORMAT = 1

EventKind = Literal["up", "down", "received", "posted", "drained", "tick", "state"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Whose events a file holds, and all that its core was built from.

    `number` counts the files of this start of the process from 0; `monotonic` and `wall` are the times at which this
    file was begun. `construction` is what the role's core was given at construction beside the configuration.
    """

    role: Role
    index: int
    incarnation: int
    number: int
    monotonic: float
    wall: float
    config: dict[str, Any]
    """`bus.config.Config` as it was; another version of the code may have other settings."""
    code: str
    """Version and hash of the sources of bus and of the role's package."""
    model: str
    """Fingerprint of the model (`bus.model_files.ModelFacts`), empty where the process knows none."""
    schema: str
    redacted: bool
    construction: msgspec.Raw
    format: int = FORMAT


class EffectRecord(msgspec.Struct, frozen=True, array_like=True):
    """An effect: for a `Send`, `subject` is the peer and `data` the frame's body; for others, type name and value.

    The value of a `WakeAt` is its time, that of a `Stop` its reason.
    """

    subject: Peer | str
    data: msgspec.Raw


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One event and the effects it had.

    `at` is the monotonic and `wall` the wall-clock time when the core got the event, `took` the seconds until its
    effects were performed. `subject` is the peer of a link event or frame, the type name of a posted value, or None.
    `data` is the reason, the frame's body, the posted value, or the event's times. `raised` says what ended the
    process if this event did.

    A record of kind ``state`` is no event: its data is the state of the core after the record before it, from which a
    replay may begin.
    """

    at: float
    wall: float
    took: float
    kind: EventKind
    subject: Peer | str | None
    data: msgspec.Raw
    effects: list[EffectRecord]
    raised: str = ""


Plain = Callable[[Any], Any]
"""Makes of a posted value, or of an effect for the process's own shell, what stands for it in the journal."""


def as_is(value: Any) -> Any:
    """The `Plain` of a role all of whose values msgspec can encode."""
    return value


def event_parts(event: Event, body: bytes, plain: Plain) -> tuple[EventKind, Any, Any]:
    """Kind, subject and data of an event as in `Turn`; `body` is that of the frame if it is one."""
    if isinstance(event, Drained):
        return "drained", None, event.now
    if isinstance(event, Received):
        return "received", event.peer, body
    if isinstance(event, Posted):
        return "posted", type(event.value).__name__, plain(event.value)
    if isinstance(event, Tick):
        return "tick", None, event
    if isinstance(event, PeerUp):
        return "up", event.peer, event.minor
    assert isinstance(event, PeerDown)
    return "down", event.peer, event.reason


def effect_parts(effect: Effect, body: bytes | None, plain: Plain) -> tuple[Peer | str, Any]:
    """Subject and data of an effect as in `EffectRecord`; `body` is that of the frame if it was encoded already."""
    if isinstance(effect, Send):
        return effect.peer, ENCODER.encode(effect.message) if body is None else body
    if isinstance(effect, WakeAt):
        return "WakeAt", effect.at
    if isinstance(effect, Stop):
        return "Stop", effect.reason
    return type(effect).__name__, plain(effect)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data.cast("B") if value.size else b""
    raise NotImplementedError(f"{type(value).__name__} cannot be journaled")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
TURN_DECODER = msgspec.msgpack.Decoder(Turn)
HEADER_DECODER = msgspec.msgpack.Decoder(Header)
