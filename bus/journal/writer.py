"""Writes a journal's files on a thread of its own. What goes wrong with a file is logged and counted, no more."""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec

from bus.counters import Counters
from bus.journal import blocks
from bus.journal.blocks import Head
from bus.journal.records import ENCODER, Header
from bus.log import get_logger

log = get_logger()

MAX_PENDING_BYTES = 64 << 20
"""Raw bytes that may wait for a slow disk; what comes on top is dropped and counted."""
FILE_NAME = re.compile(r"(?P<process>\w+-\d+)-(?P<incarnation>\d+)-(?P<number>\d+)\.journal")


class Batch(NamedTuple):
    """Framed records, on their way into one block."""

    first: int
    records: int
    parts: list[bytes]
    size: int
    """Bytes of all parts."""


class Limits(NamedTuple):
    """When the next file is begun, and how many files of a process (of all its starts) are kept."""

    file_bytes: int
    file_s: float
    keep: int


class Files:
    """Owns the files of one start of a process; only one is open. Not for several threads."""

    def __init__(self, folder: Path, header: Header, limits: Limits, compress: Callable[[bytes], bytes]) -> None:
        self._folder = folder
        self._header = header
        self._limits = limits
        self._compress = compress
        self.begun = 0
        """Files that were begun so far."""
        self._file: int | None = None
        self._size = 0
        self._begun = 0.0

    def append(self, kind: blocks.Kind, first: int, records: int, raw: bytes) -> int:
        """Write a block, to the next file if it is time for that; returns its size on disk.

        Raises:
            OSError: it could not be written; the file, if there is one, ends where it ended before.
        """
        now = time.monotonic()
        if self._file is not None and (
            self._size >= self._limits.file_bytes or now - self._begun >= self._limits.file_s
        ):
            self.close()
        if self._file is None:
            self._open(now, first)
        return self._write(kind, first, records, raw)

    def close(self) -> None:
        """End the present file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, now: float, first: int) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        process = f"{self._header.role}-{self._header.index}"
        path = self._folder / f"{process}-{self._header.incarnation}-{self.begun:05}.journal"
        self._make_room(process)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.begun += 1
        self._size, self._begun = 0, now
        header = msgspec.structs.replace(self._header, number=self.begun - 1, monotonic=now, wall=time.time())
        data = ENCODER.encode(header)
        try:
            self._write(b"H", first, 1, blocks.frame(data) + data)
        except OSError:
            self.close()
            os.unlink(path)
            raise

    def _make_room(self, process: str) -> None:
        """Delete the oldest files of this process, so that with a new one as many as allowed are left."""
        found = []
        for path in self._folder.iterdir():
            match = FILE_NAME.fullmatch(path.name)
            if match and match["process"] == process:
                found.append((int(match["incarnation"]), int(match["number"]), path))
        for _, _, path in sorted(found)[: max(0, len(found) + 1 - self._limits.keep)]:
            path.unlink(missing_ok=True)

    def _write(self, kind: blocks.Kind, first: int, records: int, raw: bytes) -> int:
        assert self._file is not None
        stored = self._compress(raw)
        data = memoryview(blocks.pack_head(Head(kind, len(stored), len(raw), records, first)) + stored)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += written
        return written


class Writer:
    """The thread. `put` and `close` are for one other thread.

    `rework`, if given, makes of a batch's bytes what is to be written instead (see `redaction`).
    """

    def __init__(self, files: Files, counters: Counters, rework: Callable[[bytes], bytes] | None = None) -> None:
        self._files = files
        self._counters = counters
        self._rework = rework
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._put_bytes = 0  # by the other thread only
        self._done_bytes = 0  # by this thread only
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def files_begun(self) -> int:
        """Files that were begun so far."""
        return self._files.begun

    def put(self, batch: Batch) -> None:
        """Have records written soon; never waits. They are dropped while too many wait already."""
        if self._put_bytes - self._done_bytes > MAX_PENDING_BYTES:
            self._counters.add("journal_lost_records/slow_disk", batch.records)
            return
        self._put_bytes += batch.size
        self._queue.put(batch)

    def close(self, within_s: float) -> bool:
        """Write what waits and end; whether that was done in time."""
        self._queue.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                self._write(batch)
            except Exception as error:
                self._fail(batch, error)
            self._done_bytes += batch.size
        self._files.close()

    def _write(self, batch: Batch) -> None:
        raw = b"".join(batch.parts)
        if self._rework is not None:
            raw = self._rework(raw)
        size = self._files.append(b"R", batch.first, batch.records, raw)
        self._counters.add("journal_records", batch.records)
        self._counters.add("journal_written_bytes", size)
        if self._failing:
            self._failing = False
            log.info("the journal is written again", record=batch.first)

    def _fail(self, batch: Batch, error: Exception) -> None:
        self._counters.add("journal_lost_records/error", batch.records)
        if not self._failing:
            self._failing = True
            log.error("the journal cannot be written; records are lost", record=batch.first, detail=str(error))
