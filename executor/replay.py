"""How the executor's core is built, when it runs and when its journal is replayed, with or without the model."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np

from bus import model_files
from bus.config import Config
from bus.core import Core, Effect, Event, Posted
from bus.journal.items import Item
from bus.journal.reader import JournalError
from bus.journal.records import ENCODER, Header
from bus.messages import Adapter, AdapterRead, PlaceAdapter, ReadAdapter
from bus.replay import Differs, Subject, config_of, construction_of
from executor.adapter_files import AdapterError
from executor.adapter_loading import AdapterRunner
from executor.checks import Limits
from executor.core import DeviceFailed, ExecutorCore, RunStep, StepDone
from executor.pipeline import StepRunner
from executor.step import Float32, Int32, MergedStep, RowSetup, SampledStep

TABLES = 8
"""Block tables that are looked at in a step, the next ones in the next: all cost more than everything else."""


class Construction(msgspec.Struct, frozen=True):
    """What the core is built from beside the configuration; see `ExecutorCore`."""

    model: str
    limits: Limits
    programs: str = ""
    adapters: list[Adapter] = []


def build(config: Config, construction: Construction) -> ExecutorCore:
    """The executor's core."""
    return ExecutorCore(config, construction.model, construction.limits, construction.programs, construction.adapters)


class Plain:
    """For the journal, a step is its size and checksums of what is in it: all that follows from the schedules.

    Other values are as they are.
    """

    def __init__(self) -> None:
        self._rows: Int32 | None = None
        self._num_tokens: Int32 | None = None
        self._checksums = (0, 0)
        """Of these two, which are the same objects as long as the same rows run again."""

    def __call__(self, value: Any) -> Any:
        """What is recorded for a value."""
        if not isinstance(value, RunStep):
            return value
        step = value.step
        if step.rows is not self._rows or step.num_tokens is not self._num_tokens:
            self._rows, self._num_tokens = step.rows, step.num_tokens
            self._checksums = crc32(step.rows.data), crc32(step.num_tokens.data)
        size = step.rows.size
        first = value.number * TABLES % size if size else 0
        said = {
            "number": value.number,
            "parts": value.parts,
            "waited_for": value.waited_for,
            "sequences": size,
            "rows": self._checksums[0],
            "positions": crc32(step.positions.data),
            "num_tokens": self._checksums[1],
            "block_tables": crc32(step.block_tables[first : first + TABLES].data),
        }
        if step.drafts is not None:
            said["num_drafts"] = crc32(step.drafts.counts.data)
            said["drafts"] = crc32(step.drafts.tokens.data)
        if step.masks.at.size:
            said["masks"] = crc32(step.masks.at.data), crc32(step.masks.words.data)
        if step.setups:
            said["setups"] = crc32(ENCODER.encode(step.setups))
        return said


def subject(header: Header) -> Subject:
    """The recorded core, as it began, without the model: what the device drew is taken from the journal.

    Raises:
        JournalError: the journal is redacted: what a step drew, and the log-probabilities of it, are not in it.
    """
    if header.redacted:
        raise JournalError("this journal is redacted; an executor's is replayed only if it is not")
    core = build(config_of(header), construction_of(header, Construction))
    return Subject(core, (StepDone, DeviceFailed, AdapterRead), Plain())


def with_model(header: Header) -> Subject:
    """The recorded core, as it began, with the model: all steps are run again, by this process alone.

    Raises:
        JournalError: the journal is redacted, or the model is another than was recorded, or the devices are too few.
    """
    recorded = subject(header)
    construction = construction_of(header, Construction)
    limits = construction.limits
    config = msgspec.structs.replace(config_of(header), num_blocks=sum(limits.blocks_of_rank), executors=1)
    folder = model_files.resolve(config).folder
    if model_files.read(folder).fingerprint != header.model:
        raise JournalError(f"the model in {folder} is not the one that was recorded; --no-model replays without it")
    from executor.runner import Runner  # imports JAX

    runner = Runner(config, folder, lambda stage, done, total: None, keep_scores=True)
    if limits.first_blocks is not None and list(limits.first_blocks) != runner.first_blocks:
        raise JournalError(
            "the ranks' blocks were laid out for other devices than are here; --no-model replays without them "
            "(XLA_FLAGS=--xla_force_host_platform_device_count=N makes a CPU N devices)"
        )
    for slot, adapter in enumerate(construction.adapters, 1):
        runner.place_adapter(slot, _read_again(runner, adapter))
    rerun = Rerun(recorded.core, runner)
    return recorded._replace(core=rerun, summary=rerun.summary)


TIE = 1e-4
"""Scores that lie so close together may fall either way on another machine."""


class ScoringRunner(StepRunner, AdapterRunner, Protocol):
    """A runner that can say what the tokens of a collected step were the largest of."""

    def scores(self, handle: Any, index: int, place: int) -> Float32: ...


def _read_again(runner: ScoringRunner, adapter: Adapter) -> Any:
    """An adapter as the recorded executor read it.

    Raises:
        JournalError: it is not there any more, or is another one.
    """
    try:
        again = runner.read_adapter(adapter.name, adapter.path)
    except AdapterError as error:
        raise JournalError(f"an adapter cannot be read again: {error}; --no-model replays without it") from None
    if again.identity != adapter.identity:
        raise JournalError(
            f"the adapter in {adapter.path} is not the one that was recorded; --no-model replays without it"
        )
    return again


class Rerun:
    """An executor's core, whose steps are run again: each when its recorded result comes, to be compared with it.

    The device goes on from what it drew itself. Where it drew another token than was recorded and both score alike, it
    is a tie: it is counted, and the recorded token put in its place.
    """

    def __init__(self, core: Core, runner: ScoringRunner) -> None:
        self._core = core
        self._runner = runner
        self._given: deque[RunStep | PlaceAdapter] = deque()
        self._adapters: dict[int, Adapter] = {}
        """What was read, by the number of its `ReadAdapter`, until it is placed."""
        self._last_setup: dict[int, RowSetup] = {}
        self._corrections: list[RowSetup] = []
        self._tokens = 0
        self._ties = 0

    def handle(self, event: Event) -> Iterable[Effect]:
        """See `bus.core.Core`.

        Raises:
            Differs: the model draws other tokens than were recorded.
        """
        if isinstance(event, Posted) and isinstance(event.value, StepDone):
            self._run_again(event.value)
        if isinstance(event, Posted) and isinstance(event.value, AdapterRead):
            number, identity = event.value.number, event.value.identity
            self._adapters[number] = msgspec.structs.replace(self._adapters[number], identity=identity)
        effects = list(self._core.handle(event))
        for effect in effects:
            if isinstance(effect, ReadAdapter):
                self._adapters[effect.number] = Adapter(name=effect.name, path=effect.path, identity="")
        self._given += [effect for effect in effects if isinstance(effect, RunStep | PlaceAdapter)]
        return effects

    def summary(self) -> str:
        """What was compared, in words."""
        return f"{self._tokens} tokens drawn again, {self._ties} of them ties that fell the other way"

    def _run_again(self, done: StepDone) -> None:
        run = self._next_run()
        step = run.step
        self._last_setup |= {setup.row: setup for setup in step.setups}
        fresh = {setup.row for setup in step.setups}
        corrections = [setup for setup in self._corrections if setup.row not in fresh]
        handle = self._runner.dispatch(replace(step, setups=[*corrections, *step.setups]))
        sampled = self._runner.collect(handle)
        recorded = done.sampled
        self._tokens += int((recorded.tokens >= 0).sum())
        different = _different(sampled, recorded)
        if not all(self._is_tie(handle, one) for one in different):
            raise Differs(_said(run.number, recorded), _said(run.number, sampled))
        self._ties += len(different)
        self._corrections = [self._correction(step, one) for one in different]

    def _next_run(self) -> RunStep:
        """The next step; the adapters that were placed before it are placed again."""
        while isinstance(given := self._given.popleft(), PlaceAdapter):
            adapter = self._adapters.pop(given.number)
            if given.slot:
                self._runner.place_adapter(given.slot, _read_again(self._runner, adapter))
        return given

    def _is_tie(self, handle: Any, different: "_Different") -> bool:
        drawn, recorded = different.drawn, int(different.recorded[0])
        if drawn < 0 or recorded < 0:
            return False
        scores = self._runner.scores(handle, different.entry, different.place)
        return abs(float(scores[drawn]) - float(scores[recorded])) <= TIE

    def _correction(self, step: MergedStep, different: "_Different") -> RowSetup:
        entry = different.entry
        known = int(step.positions[entry] + step.num_tokens[entry])
        if step.drafts is not None:
            known -= int(step.drafts.counts[entry])
        setup = self._last_setup[int(step.rows[entry])]
        return msgspec.structs.replace(setup, start=known + different.place, tokens=different.recorded)


class _Different(NamedTuple):
    """An entry of a step that drew another token than was recorded, the first at `place` of its tokens.

    `recorded` has what was recorded from there on.
    """

    entry: int
    place: int
    drawn: int
    recorded: Int32


def _different(drawn: SampledStep, recorded: SampledStep) -> list[_Different]:
    """What two runs of a step do not have in common."""
    if drawn.counts is None and recorded.counts is None:
        return [
            _Different(index, 0, int(drawn.tokens[index]), recorded.tokens[index : index + 1])
            for index in np.flatnonzero(drawn.tokens != recorded.tokens).tolist()
        ]
    found = []
    for index, (own, theirs) in enumerate(zip(_by_entry(drawn), _by_entry(recorded), strict=True)):
        # With the same drafts, neither can be a part of the other
        unequal = np.flatnonzero(own[: theirs.size] != theirs[: own.size])
        if unequal.size:
            place = int(unequal[0])
            found.append(_Different(index, place, int(own[place]), theirs[place:]))
    return found


def _by_entry(sampled: SampledStep) -> list[Int32]:
    counts = np.ones(sampled.tokens.size, np.int32) if sampled.counts is None else sampled.counts
    return np.split(sampled.tokens, np.cumsum(counts)[:-1])


def _said(number: int, sampled: SampledStep) -> Item:
    return Item("StepDone", None, {"number": number, "tokens": sampled.tokens.tolist()}, is_effect=False)
