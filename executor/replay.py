"""How the executor's core is built, when it runs and when its journal is replayed, with or without the model."""

from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from bus import model_files
from bus.config import Config
from bus.core import Core, Effect, Event, Posted
from bus.journal.items import Item
from bus.journal.reader import JournalError
from bus.journal.records import ENCODER, Header
from bus.replay import Differs, Subject, config_of, construction_of
from executor.core import DeviceFailed, ExecutorCore, RunStep, StepDone
from executor.merge import Limits
from executor.pipeline import StepRunner
from executor.step import MergedStep


class Construction(msgspec.Struct, frozen=True):
    """What the core is built from beside the configuration; see `ExecutorCore`."""

    model: str
    limits: Limits


def build(config: Config, construction: Construction) -> ExecutorCore:
    """The executor's core."""
    return ExecutorCore(config, construction.model, construction.limits)


def plain(value: Any) -> Any:
    """For the journal, a step is its size and a checksum of each of its fields: all in it follows from the schedules.

    Other values are as they are.
    """
    if not isinstance(value, RunStep):
        return value
    step = value.step
    checksums = {field.name: _checksum(getattr(step, field.name)) for field in fields(MergedStep)}
    return {"number": value.number, "sequences": step.rows.size, "checksums": checksums}


def _checksum(value: Any) -> int:
    return crc32(np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else ENCODER.encode(value))


def subject(header: Header) -> Subject:
    """The recorded core, as it began, without the model: what the device drew is taken from the journal.

    Raises:
        JournalError: the journal is redacted: what a step drew, and the log-probabilities of it, are not in it.
    """
    if header.redacted:
        raise JournalError("this journal is redacted; an executor's is replayed only if it is not")
    core = build(config_of(header), construction_of(header, Construction))
    return Subject(core, (StepDone, DeviceFailed), plain)


def with_model(header: Header) -> Subject:
    """The recorded core, as it began, with the model: all steps are run again.

    Raises:
        JournalError: the journal is redacted, or the model is another than was recorded.
    """
    recorded = subject(header)
    limits = construction_of(header, Construction).limits
    config = msgspec.structs.replace(config_of(header), num_blocks=sum(limits.blocks_of_rank))
    folder = model_files.resolve(config).folder
    if model_files.read(folder).fingerprint != header.model:
        raise JournalError(f"the model in {folder} is not the one that was recorded; --no-model replays without it")
    from executor.runner import Runner  # imports JAX

    runner = Runner(config, folder, lambda stage, done, total: None)
    return recorded._replace(core=Rerun(recorded.core, runner))


class Rerun:
    """An executor's core, whose steps are run again: each when its recorded result comes, to be compared with it.

    What the device drew before is what it goes on from, so all tokens of a journal are compared.
    """

    def __init__(self, core: Core, runner: StepRunner) -> None:
        self._core = core
        self._runner = runner
        self._given: deque[RunStep] = deque()

    def handle(self, event: Event) -> Iterable[Effect]:
        """See `bus.core.Core`.

        Raises:
            Differs: the model draws other tokens than were recorded.
        """
        if isinstance(event, Posted) and isinstance(event.value, StepDone):
            self._run_again(event.value)
        effects = list(self._core.handle(event))
        self._given += [effect for effect in effects if isinstance(effect, RunStep)]
        return effects

    def _run_again(self, done: StepDone) -> None:
        run = self._given.popleft()
        sampled = self._runner.collect(self._runner.dispatch(run.step))
        if not np.array_equal(sampled.tokens, done.sampled.tokens):
            raise Differs(_said(run.number, done.sampled.tokens), _said(run.number, sampled.tokens))


def _said(number: int, tokens: Any) -> Item:
    return Item("StepDone", None, {"number": number, "tokens": tokens.tolist()}, is_effect=False)
