"""Reads journals back: all records that can be read, in order, and a word on each stretch that cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from bus.journal.blocks import HEAD, MAGIC, Damaged, Head, unpack_head, unpack_records
from bus.journal.records import FORMAT, HEADER_DECODER, TURN_DECODER, Header, Turn
from bus.journal.writer import FILE_NAME

LOST = "they were never written, or their file is missing"


class JournalError(Exception):
    """There is no journal to read where one was expected; the text is a sentence for people."""


class Record(NamedTuple):
    """A record and its number, which counts the events of a process from 1."""

    number: int
    turn: Turn


class _Block(NamedTuple):
    head: Head
    stored: bytes


class _Fault(NamedTuple):
    """In place of a block, or of several."""

    why: str


@dataclass(frozen=True)
class Journal:
    """The files of one start of a process, oldest first."""

    name: str
    """Path without number and ending: ``…/rank-0-1788000000000000000``."""
    files: tuple[Path, ...]

    @property
    def process(self) -> str:
        """Like ``rank-0``."""
        return Path(self.name).name.rsplit("-", 1)[0]

    def header(self) -> Header:
        """The first header that can be read.

        Raises:
            JournalError: there is none, or it is of a format this code does not know.
        """
        for path in self.files:
            for block in _blocks(path):
                if isinstance(block, _Block) and block.head.kind == b"H":
                    for item in unpack_records(block.head, block.stored):
                        if not isinstance(item, Damaged):
                            return _header(path, item[1])
        raise JournalError(f"{self.name} has no readable header; a journal file begins with one")

    def records(self) -> Iterator[Record | Damaged]:
        """Every record in order; where some cannot be read, what stands in their place."""
        expected = 1 if self.files[0].stem.endswith("-00000") else 0  # 0: whatever comes
        faults: list[str] = []
        for path in self.files:
            for block in _blocks(path):
                if isinstance(block, _Fault):
                    faults.append(block.why)
                    continue
                head = block.head
                if expected and head.first > expected:
                    yield Damaged(expected, head.first - 1, "; ".join(faults) or LOST)
                elif faults:
                    yield Damaged(0, 0, "; ".join(faults))
                faults.clear()
                expected = head.first
                if head.kind == b"R":
                    yield from _records(path, block)
                    expected += head.records
        if faults:
            yield Damaged(expected or 1, None, "; ".join(faults))


def find(paths: Sequence[str]) -> list[Journal]:
    """The journals in these paths: files, folders of files, or names of process starts as in `Journal.name`.

    Raises:
        JournalError: there is none.
    """
    starts: dict[str, set[Path]] = {}
    for text in paths:
        path = Path(text)
        if path.is_dir():
            files = [file for file in path.iterdir() if FILE_NAME.fullmatch(file.name)]
        elif path.is_file():
            files = [path]
        else:
            files = list(path.parent.glob(f"{path.name}-*.journal")) if path.name else []
        if not files:
            raise JournalError(f"{text} is no journal; give a file, a folder of them, or the name of a process's start")
        for file in files:
            starts.setdefault(str(file.with_name(file.stem.rsplit("-", 1)[0])), set()).add(file)
    return [Journal(name, tuple(sorted(files))) for name, files in sorted(starts.items())]


def find_one(paths: Sequence[str], role: str | None = None) -> Journal:
    """The only journal in these paths, of processes of `role` if that is given.

    Raises:
        JournalError: there is none, or more than one.
    """
    journals = [one for one in find(paths) if role is None or one.process.rsplit("-", 1)[0] == role]
    if not journals:
        raise JournalError(f"{', '.join(paths)}: there is no journal of a {role}")
    if len(journals) > 1:
        raise JournalError("there are several journals; name one of " + ", ".join(one.name for one in journals))
    return journals[0]


def _header(path: Path, data: bytes) -> Header:
    try:
        header = HEADER_DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise JournalError(f"{path} has a header of another format than {FORMAT}: {error}") from None
    if header.format != FORMAT:
        raise JournalError(f"{path} has format {header.format}; this code reads format {FORMAT}")
    return header


def _records(path: Path, block: _Block) -> Iterator[Record | Damaged]:
    for item in unpack_records(block.head, block.stored):
        if isinstance(item, Damaged):
            yield item._replace(why=f"{item.why}, in {path.name}")
            continue
        number, data = item
        try:
            yield Record(number, TURN_DECODER.decode(data))
        except msgspec.DecodeError as error:
            yield Damaged(number, number, f"it is none this code knows ({error}), in {path.name}")


def _blocks(path: Path) -> Iterator[_Block | _Fault]:
    """The blocks of a file. After damage it goes on at the next head that is whole."""
    data = path.read_bytes()
    position = 0
    while position < len(data):
        head = unpack_head(data[position : position + HEAD.size])
        if head is None:
            after = _next_head(data, position + 1)
            if after is None:
                yield _Fault(f"{path.name} is cut or damaged at byte {position}")
                return
            yield _Fault(f"{path.name} is damaged at byte {position}")
            position = after
            continue
        start, position = position + HEAD.size, position + HEAD.size + head.stored
        if position > len(data):
            yield _Fault(f"{path.name} is cut at byte {len(data)}")
            return
        yield _Block(head, data[start:position])


def _next_head(data: bytes, position: int) -> int | None:
    while (position := data.find(MAGIC, position)) >= 0:
        if unpack_head(data[position : position + HEAD.size]) is not None:
            return position
        position += 1
    return None
