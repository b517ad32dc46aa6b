"""How a rank's core is built when its journal is replayed."""

import msgspec

from bus.counters import Counters
from bus.journal.reader import JournalError
from bus.journal.records import Header
from bus.replay import Subject, config_of
from ranks.core import RankCore
from ranks.native import NativeScheduler


class Construction(msgspec.Struct, frozen=True):
    """What a rank's core is built from beside the configuration: nothing. The executor tells it the rest."""


def subject(header: Header) -> Subject:
    """The recorded core, as it began.

    Raises:
        JournalError: it scheduled with vLLM's scheduler, which decides by more than the events it is given.
    """
    config = config_of(header)
    if config.scheduler != "native":
        raise JournalError(f"this rank had scheduler = {config.scheduler}; only scheduler = native is replayed")
    counters = Counters()
    core = RankCore(header.index, config, lambda pool: NativeScheduler(config, pool, counters), counters)
    return Subject(core)
