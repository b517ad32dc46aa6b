"""Journals in which every time is known, for tests: written turn by turn, without a core."""

from pathlib import Path
from typing import Any

import msgspec

from bus.config import Config
from bus.core import Peer
from bus.journal.blocks import frame
from bus.journal.records import ENCODER, EffectRecord, Turn
from bus.journal.writer import Files
from bus.journal.zstd import compressor
from bus.messages import Message, Role
from tests.journals import PLENTY, header

WALL = 1e9


class TimedJournals:
    """The journals of a run that is told in milliseconds, into one folder."""

    def __init__(self, folder: Path, apart: dict[str, float] | None = None, depth: int = 2) -> None:
        """`apart` is how far the monotonic clock of a process is behind that of the others, by its name."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._config = msgspec.to_builtins(Config(async_depth=depth))
        self._apart = apart or {}
        self._turns: dict[tuple[Role, int], list[Turn]] = {}

    def turn(self, who: tuple[Role, int], begin: float, end: float, event: Any, *effects: tuple[Any, Any]) -> None:
        """Something a process handled. `event` is (kind, subject, data), an effect (peer or type name, value)."""
        at = begin / 1e3 - self._apart.get(f"{who[0]}-{who[1]}", 0.0)
        kind, subject, data = event
        recorded = [EffectRecord(to, msgspec.Raw(ENCODER.encode(_body(value)))) for to, value in effects]
        raw = msgspec.Raw(ENCODER.encode(_body(data)))
        turn = Turn(at, WALL + begin / 1e3, (end - begin) / 1e3, kind, subject, raw, recorded)
        self._turns.setdefault(who, []).append(turn)

    def write(self) -> Path:
        """Write all; the folder."""
        for (role, index), turns in self._turns.items():
            apart = self._apart.get(f"{role}-{index}", 0.0)
            begun = msgspec.structs.replace(header(role, index), wall=WALL, monotonic=-apart, config=self._config)
            files = _FixedTimes(self._folder, begun, PLENTY, compressor())
            datas = [ENCODER.encode(turn) for turn in turns]
            files.append(b"R", 1, len(datas), b"".join(frame(data) + data for data in datas))
            files.close()
        return self._folder


class _FixedTimes(Files):
    """Files whose header has the times it was made with."""

    def _open(self, now: float, first: int) -> None:
        super()._open(now, first)
        (path,) = self._folder.glob(f"{self._header.role}-{self._header.index}-*.journal")
        data = ENCODER.encode(self._header)
        path.write_bytes(b"")
        self._size = 0
        self._write(b"H", first, 1, frame(data) + data)


def received(peer: Peer, message: Message) -> tuple[str, Peer, Message]:
    """The event that a message is, for `TimedJournals.turn`."""
    return "received", peer, message


def _body(value: Any) -> Any:
    return ENCODER.encode(value) if isinstance(value, Message) else value
