"""How a rank's core is built when its journal is replayed."""

from dataclasses import dataclass

import msgspec

from bus.config import Config
from bus.counters import Counters
from bus.journal.reader import JournalError
from bus.journal.records import Header
from bus.messages import KvPool
from bus.replay import Subject, config_of
from ranks.core import RankCore
from ranks.native import NativeScheduler


class Construction(msgspec.Struct, frozen=True):
    """What a rank's core is built from beside the configuration: nothing. The executor tells it the rest."""


@dataclass(frozen=True)
class NativeSchedulers:
    """Makes a scheduler for a KV pool. (A class: a function would hide the counters from `bus.journal.state`.)"""

    config: Config
    counters: Counters

    def __call__(self, pool: KvPool) -> NativeScheduler:
        return NativeScheduler(self.config, pool, self.counters)


def subject(header: Header) -> Subject:
    """The recorded core, as it began.

    Raises:
        JournalError: it scheduled with vLLM's scheduler, which decides by more than the events it is given.
    """
    config = config_of(header)
    if config.scheduler != "native":
        raise JournalError(f"this rank had scheduler = {config.scheduler}; only scheduler = native is replayed")
    counters = Counters()
    return Subject(RankCore(header.index, config, NativeSchedulers(config, counters), counters))
