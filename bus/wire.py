"""From messages to ZeroMQ frames and back, and from integer arrays to bytes and back.

A message is two frames: the envelope (sender's and addressee's incarnation, two little-endian uint64) and the body
(MessagePack). On a ROUTER socket libzmq puts the peer's routing id before them.
"""

import hashlib
import struct
import types
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bus.messages import Error, Floats, Ints, Message, Role

ENVELOPE = struct.Struct("<QQ")

_INT32, _UINT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f4")
_AS_ARRAY = (np.ndarray, list, tuple)
"""What numpy makes an array of at once."""


class InvalidFrame(Exception):
    """Frames that are no message of this bus. The text is the sentence to answer with; `reason` is what to count."""

    def __init__(self, reason: str, sentence: str, body: Any = None) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.body = body


class Frame(NamedTuple):
    """A decoded message and the incarnations on its envelope."""

    sender: int
    addressee: int
    message: Message


class Codec:
    """Encodes any message, and decodes those of one union (what the other side of a bus may send)."""

    def __init__(self, incoming: Any, max_body_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._max_body_bytes = max_body_bytes

    def encode(self, sender: int, addressee: int, message: Message) -> list[bytes]:
        """The two frames of `message`."""
        return [ENVELOPE.pack(sender, addressee), self.write(message)]

    def write(self, message: Message) -> bytes:
        """The body of `message`."""
        return self._encoder.encode(message)

    def decode(self, parts: list[bytes]) -> Frame:
        """Read the two frames of a message.

        Raises:
            InvalidFrame: they are not two, too large, not MessagePack, or no message that may come from there.
        """
        if len(parts) != 2 or len(parts[0]) != ENVELOPE.size:
            raise InvalidFrame("malformed", "a message is two frames: 16 bytes of incarnations and a MessagePack body")
        message = self.read(parts[1])
        sender, addressee = ENVELOPE.unpack(parts[0])
        return Frame(sender, addressee, message)

    def read(self, body: bytes) -> Message:
        """Read the body of a message.

        Raises:
            InvalidFrame: it is too large, not MessagePack, or no message that may come from there.
        """
        if len(body) > self._max_body_bytes:
            raise InvalidFrame(
                "too_large", f"the body has {len(body)} bytes; at most {self._max_body_bytes} are allowed"
            )
        try:
            message: Message = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidFrame("invalid", f"not a valid message: {error}", _readable(body)) from None
        return message


def error_for(invalid: InvalidFrame) -> Error | None:
    """What to answer to an invalid frame; None if it was an `Error` itself, which is never answered."""
    body = invalid.body if isinstance(invalid.body, dict) else {}
    if body.get("type") == "Error":
        return None
    request_id, command_id = body.get("request_id"), body.get("command_id")
    return Error(
        code=f"{invalid.reason}_message",
        message=str(invalid),
        request_id=request_id if isinstance(request_id, str) else "",
        command_id=command_id if isinstance(command_id, int) and abs(command_id) < 2**63 else 0,
    )


def _readable(body: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return None


def routing_id(role: Role, index: int, incarnation: int) -> bytes:
    """A DEALER's identity: readable in logs, and different for every start of a process."""
    return f"{role}/{index}/{incarnation:x}".encode()


def pack_ints(values: Iterable[int] | npt.NDArray[Any]) -> Ints:
    """Integers as they travel. An int32 array is not copied."""
    return np.ascontiguousarray(values if isinstance(values, _AS_ARRAY) else list(values), _INT32).data.cast("B")


def unpack_ints(view: Ints | bytes) -> npt.NDArray[np.int32]:
    """The integers in a message, as a read-only array that shares its memory. Shape [n], int32."""
    return np.frombuffer(view, dtype=_INT32)


def all_below(values: npt.NDArray[np.int32], limit: int | npt.NDArray[np.uint32]) -> bool:
    """Whether all of `values` [n] are from 0 to `limit` - 1; `limit` is one for all, or one for each, uint32 [n]."""
    unsigned = values.view(_UINT32)
    if isinstance(limit, int):
        return not unsigned.size or unsigned.item(unsigned.argmax()) < limit  # a third of the time that `max` takes
    return int(np.count_nonzero(unsigned < limit)) == unsigned.size


def pack_floats(values: Iterable[float] | npt.NDArray[Any]) -> Floats:
    """Floats as they travel."""
    return np.ascontiguousarray(values if isinstance(values, _AS_ARRAY) else list(values), _FLOAT32).data.cast("B")


def unpack_floats(view: Floats) -> npt.NDArray[np.float32]:
    """The floats in a message, as a read-only array that shares its memory. Shape [n], float32."""
    return np.frombuffer(view, dtype=_FLOAT32)


def schema_hash(unions: Iterable[Any]) -> str:
    """A short hash over the names and types of all fields of all messages: equal hashes mean equal definitions."""
    digest = hashlib.blake2b(digest_size=8)
    for union in unions:
        for struct_type in _structs(union):
            digest.update(f"{struct_type.__name__}:".encode())
            for field in msgspec.structs.fields(struct_type):
                digest.update(f"{field.name}={field.type};".encode())
    return digest.hexdigest()


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return list(arms)
