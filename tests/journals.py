"""Journals for tests: events fed to a core as the shell does it, with a recorder listening."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from bus.config import Config
from bus.core import Core, Event, Peer, Received
from bus.journal import recorder
from bus.journal.blocks import Damaged, frame
from bus.journal.reader import Journal, Record, find_one
from bus.journal.records import ENCODER, Header, Turn, as_is
from bus.journal.state import capture, restore
from bus.journal.writer import Batch, Files, Limits, Writer
from bus.journal.zstd import compressor
from bus.links import Identity
from bus.messages import Role
from bus.model_files import ModelFacts, Rope

INCARNATION = 1_700_000_000_000_000_000
PLENTY = Limits(file_bytes=1 << 30, file_s=1e9, keep=1000)


class Nothing(msgspec.Struct):
    """The construction of a core that takes nothing."""


def model(vocab_size: int) -> ModelFacts:
    """Facts of a model of which a journal needs only the vocabulary."""
    return ModelFacts(
        folder=Path("/nowhere"),
        architecture="none",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_eps=1.0,
        rope=Rope(1.0, "default"),
        tie_word_embeddings=True,
        max_positions=1,
        eos_token_ids=(),
        chat=False,
        weight_files=(),
        fingerprint="fingerprint",
        query_scale=1.0,
    )


def header(role: Role = "rank", index: int = 0) -> Header:
    return Header(
        role=role,
        index=index,
        incarnation=INCARNATION,
        number=0,
        monotonic=0.0,
        wall=0.0,
        config=msgspec.to_builtins(Config()),
        code="test",
        model="",
        schema="",
        redacted=False,
        construction=msgspec.Raw(ENCODER.encode(Nothing())),
    )


def files(folder: Path, limits: Limits = PLENTY) -> Files:
    return Files(folder, header(), limits, compressor())


def turn(number: int) -> Turn:
    """Something to record, of a size that depends on the number."""
    reason = f"{number} " * (number % 7 * 9)
    peer = Peer("step", "executor", number, 1)
    return Turn(0.25 * number, 1e9 + number, 1e-4, "down", peer, msgspec.Raw(ENCODER.encode(reason)), [])


def write(folder: Path, blocks: Iterable[Iterable[int]], limits: Limits = PLENTY) -> list[Path]:
    """Write the turns with these numbers, each inner list in a block of its own; the files."""
    out = files(folder, limits)
    for block in blocks:
        numbers = list(block)
        datas = [ENCODER.encode(turn(number)) for number in numbers]
        out.append(b"R", numbers[0], len(numbers), b"".join(frame(data) + data for data in datas))
    out.close()
    return sorted(folder.iterdir())


def read(folder: Path) -> tuple[dict[int, Turn], list[Damaged]]:
    """All that can be read, by number, and what is said of the rest."""
    found = list(find_one([str(folder)]).records())
    return (
        {one.number: one.turn for one in found if isinstance(one, Record)},
        [one for one in found if isinstance(one, Damaged)],
    )


class Inline(Writer):
    """A writer without a thread: each batch is on disk when `put` returns."""

    def put(self, batch: Batch) -> None:
        self._write(batch)


class Recording:
    """A core whose events and effects are journaled, without a shell."""

    def __init__(
        self,
        folder: Path,
        me: Identity,
        core: Core,
        construction: msgspec.Struct,
        config: Config,
        plain: Callable[[Any], Any] = as_is,
        model: ModelFacts | None = None,
    ) -> None:
        self._config = msgspec.structs.replace(config, journal="on", journal_dir=str(folder))
        recording = recorder.start(self._config, me, construction, plain, model, core)
        assert recording is not None
        self._recorder = recording
        self._core = core

    def handle(self, event: Event) -> list[Any]:
        """Give the core an event, as the shell does."""
        body = ENCODER.encode(event.message) if isinstance(event, Received) else b""
        self._recorder.begin(event, body)
        effects = list(self._core.handle(event))
        for effect in effects:
            self._recorder.effect(effect, None)
        self._recorder.end()
        return effects

    def end(self) -> Journal:
        """Write all; what was written."""
        self._recorder.close()
        return find_one([self._config.journal_dir])


class Twins:
    """A core, and another that is made of its state after every few events: both must always answer alike."""

    EVENTS = 25

    def __init__(self, build: Callable[[], Core]) -> None:
        self._build = build
        self._core = build()
        self._twin = build()
        self._events = 0
        self.compared = 0
        """How often the other was made anew."""

    def handle(self, event: Event) -> list[Any]:
        """What both cores answer."""
        effects, other = (list(core.handle(event)) for core in (self._core, self._twin))
        assert effects == other
        self._events += 1
        if self._events % self.EVENTS == 0:
            state = capture(self._core)
            self._twin = restore(state, self._build())
            assert capture(self._twin) == state
            self.compared += 1
        return effects
