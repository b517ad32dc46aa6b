"""What the shell tells of each event: encoded at once, gathered, and handed to the writer in batches."""

import hashlib
import importlib.metadata
import secrets
import time
from pathlib import Path

import msgspec

from bus.buses import SCHEMA
from bus.config import Config, ConfigError
from bus.core import Core, Effect, Event
from bus.counters import Counters
from bus.journal import blocks
from bus.journal.records import ENCODER, Header, Plain, as_is, effect_parts, event_parts
from bus.journal.redaction import Redactor
from bus.journal.state import StateError, capture
from bus.journal.writer import Batch, Files, Limits, Writer
from bus.journal.zstd import ZstdError, compressor
from bus.links import Identity
from bus.log import get_logger
from bus.model_files import ModelFacts

log = get_logger()

MB = 1 << 20
BATCH_BYTES = 256 << 10
BATCH_S = 0.1
"""The most that a killed process has not written yet."""
CLOSE_S = 5.0
STATE_RETRY_S = 5.0
"""Time until the state of a core is tried again that could not be written down."""


class Recorder:
    """Keeps the journal of one process. All calls come from the shell's thread."""

    def __init__(self, writer: Writer, counters: Counters, plain: Plain, core: Core | None) -> None:
        """With `core`, its state is recorded in every file but the first, so that a replay may begin there."""
        self._core = core
        self._files_with_state = 1
        self._next_state = 0.0
        self._writer = writer
        self._counters = counters
        self._plain = plain
        self._effects: list[tuple[Effect, bytes | None]] = []
        self._event: tuple[Event, bytes]
        self._at = 0.0
        self._first = 1
        self._count = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._due = 0.0

    def begin(self, event: Event, body: bytes) -> None:
        """The core is given an event; `body` is that of the frame if it is one."""
        self._at = time.monotonic()
        self._event = event, body

    def effect(self, effect: Effect, body: bytes | None) -> None:
        """An effect was performed; `body` is that of the frame if one went out."""
        self._effects.append((effect, body))

    def end(self, raised: str = "") -> None:
        """All effects of the event were performed, or `raised` ends the process."""
        now = time.monotonic()
        effects, self._effects = self._effects, []
        try:
            kind, subject, data = event_parts(*self._event, self._plain)
            answers = [effect_parts(effect, body, self._plain) for effect, body in effects]
            self._add(ENCODER.encode((self._at, time.time(), now - self._at, kind, subject, data, answers, raised)))
        except Exception as error:
            self._lose(error)
        if self._size >= BATCH_BYTES or now >= self._due:
            self._hand_over()
            self._due = now + BATCH_S
            if self._writer.files_begun > self._files_with_state and now >= self._next_state and not raised:
                self._record_state(now)

    def _lose(self, error: Exception) -> None:
        """A record cannot be encoded: its number stays empty, which a reader will tell."""
        self._hand_over()
        self._first += 1
        self._counters.add("journal_lost_records/encoding")
        log.error("a record is lost: it cannot be encoded", record=self._first - 1, detail=str(error))

    def _record_state(self, now: float) -> None:
        self._next_state = now + STATE_RETRY_S
        if self._core is None:
            return
        try:
            data = capture(self._core)
        except StateError as error:
            log.info("the state is not journaled now", detail=str(error))
            return
        self._files_with_state = self._writer.files_begun
        self._add(ENCODER.encode((now, time.time(), time.monotonic() - now, "state", None, data, (), "")))

    def _add(self, record: bytes) -> None:
        head = blocks.frame(record)
        self._parts += (head, record)
        self._count += 1
        self._size += len(head) + len(record)

    def counters(self) -> dict[str, float]:
        """What became of the records so far."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Write what is left; nothing may be recorded after that."""
        self._hand_over()
        if not self._writer.close(CLOSE_S):
            log.error("the end of the journal could not be written in time", waited_s=CLOSE_S)

    def _hand_over(self) -> None:
        if self._count:
            self._writer.put(Batch(self._first, self._count, self._parts, self._size))
            self._first += self._count
            self._count, self._parts, self._size = 0, [], 0


def start(
    config: Config,
    me: Identity,
    construction: msgspec.Struct,
    plain: Plain = as_is,
    model: ModelFacts | None = None,
    core: Core | None = None,
) -> Recorder | None:
    """Begin this process's journal, or return None if the configuration wants none of its role.

    `construction` is what the core is built from beside `config`, `model` what is served. Posted values and effects
    that msgspec cannot encode are made `plain` first. With `core`, its state is recorded now and then, so that a
    replay may begin there, unless the journal is redacted.

    Raises:
        ConfigError: a journal is wanted, and there is nothing to compress it with, or it is to be redacted and the
            model is not known.
    """
    if not config.journals(me.role):
        return None
    try:
        compress = compressor()
    except ZstdError as error:
        raise ConfigError(f"journal: {error}") from None
    redactor = None
    if config.journal_redact:
        if model is None:
            raise ConfigError("journal_redact needs a model: its vocabulary is what is permuted")
        redactor = Redactor(secrets.token_bytes(32), model.vocab_size, config.block_size)
    built_from = msgspec.msgpack.decode(ENCODER.encode(construction))
    header = Header(
        role=me.role,
        index=me.index,
        incarnation=me.incarnation,
        number=0,
        monotonic=time.monotonic(),
        wall=time.time(),
        config=msgspec.to_builtins(config),
        code=code_version(me.role),
        model=model.fingerprint if model else "",
        schema=SCHEMA,
        redacted=config.journal_redact,
        construction=msgspec.Raw(ENCODER.encode(redactor.value(built_from) if redactor else built_from)),
    )
    limits = Limits(config.journal_file_mb * MB, config.journal_file_minutes * 60.0, config.journal_keep)
    counters = Counters()
    files = Files(config.journal_path, header, limits, compress)
    return Recorder(
        Writer(files, counters, redactor.rework if redactor else None), counters, plain, None if redactor else core
    )


def code_version(role: str) -> str:
    """The package's version, and a hash of the sources that a role's core is made of."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for package in ("bus", {"rank": "ranks"}.get(role, role)):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        version = importlib.metadata.version("rankbus")
    except importlib.metadata.PackageNotFoundError:
        version = "source"
    return f"{version}+{digest.hexdigest()}"
