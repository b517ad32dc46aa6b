"""How the executor's core is built, when it runs and when its journal is replayed."""

import msgspec

from bus.config import Config
from bus.journal.reader import JournalError
from bus.journal.records import Header
from bus.replay import Subject, config_of, construction_of
from executor.core import DeviceFailed, ExecutorCore, StepDone
from executor.merge import Limits


class Construction(msgspec.Struct, frozen=True):
    """What the core is built from beside the configuration; see `ExecutorCore`."""

    model: str
    limits: Limits


def build(config: Config, construction: Construction) -> ExecutorCore:
    """The executor's core."""
    return ExecutorCore(config, construction.model, construction.limits)


def subject(header: Header) -> Subject:
    """The recorded core, as it began.

    Raises:
        JournalError: the journal is redacted: what a step drew, and the log-probabilities of it, are not in it.
    """
    if header.redacted:
        raise JournalError("this journal is redacted; an executor's is replayed only if it is not")
    return Subject(build(config_of(header), construction_of(header, Construction)), (StepDone, DeviceFailed))
