"""How records lie in a journal file: frames with a checksum each, many of them compressed into a block.

A file is blocks one after the other. A block is a head of 32 bytes (little-endian: magic ``RBJ1``, kind, 3 bytes of
zero, stored size, raw size, number of records, number of the first record, CRC-32 of what stands before it) and
`stored size` bytes of zstd. Decompressed, these are records: size, CRC-32 of the data (both uint32), data. The first
block of a file has kind ``H`` and one record, the `records.Header`; all others have kind ``R``. Records are numbered
from 1 through all files of a process start.
"""

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple
from zlib import crc32

from bus.journal.zstd import ZstdError, decompress

MAGIC = b"RBJ1"
HEAD = struct.Struct("<4sc3xIIIQI")
FRAME = struct.Struct("<II")
Kind = Literal[b"H", b"R"]
MAX_BLOCK_BYTES = 1 << 30
"""More raw bytes than this are taken for damage: no block is larger than one record and what had gathered before it."""


class Head(NamedTuple):
    """What stands before a block; sizes in bytes."""

    kind: bytes
    stored: int
    raw: int
    records: int
    first: int


class Damaged(NamedTuple):
    """In place of records that cannot be read: their numbers, and why.

    `last` is None where it is not known, and 0 where it is a file's header and no record.
    """

    first: int
    last: int | None
    why: str

    def __str__(self) -> str:
        if self.last == 0:
            return f"the header of a file cannot be read: {self.why}"
        if self.last is None:
            return f"records from {self.first} on cannot be read: {self.why}"
        if self.first == self.last:
            return f"record {self.first} cannot be read: {self.why}"
        return f"records {self.first} to {self.last} cannot be read: {self.why}"


def frame(data: bytes) -> bytes:
    """What stands before a record's data."""
    return FRAME.pack(len(data), crc32(data))


def pack_head(head: Head) -> bytes:
    """The 32 bytes before a block."""
    packed = HEAD.pack(MAGIC, *head, 0)[:-4]
    return packed + crc32(packed).to_bytes(4, "little")


def unpack_head(data: bytes) -> Head | None:
    """The head in 32 bytes, None if they are none."""
    if len(data) < HEAD.size:
        return None
    magic, *fields, crc = HEAD.unpack(data)
    if magic != MAGIC or crc != crc32(data[: HEAD.size - 4]):
        return None
    return Head(*fields)


def unpack_records(head: Head, stored: bytes) -> Iterator[tuple[int, bytes] | Damaged]:
    """The number and data of each record of a block, or what is wrong with it."""
    last = head.first + head.records - 1
    if head.raw > MAX_BLOCK_BYTES:
        yield Damaged(head.first, last, f"their block claims {head.raw} bytes")
        return
    try:
        raw = decompress(stored, head.raw)
    except ZstdError as error:
        yield Damaged(head.first, last, f"their block is damaged ({error})")
        return
    position = 0
    for number in range(head.first, last + 1):
        size, crc = FRAME.unpack_from(raw, position) if position + FRAME.size <= len(raw) else (len(raw), 0)
        start, position = position + FRAME.size, position + FRAME.size + size
        if position > len(raw):
            yield Damaged(number, last, "a size is damaged")
            return
        data = raw[start:position]
        if crc32(data) == crc:
            yield number, data
        else:
            yield Damaged(number, number, "its checksum does not fit")
