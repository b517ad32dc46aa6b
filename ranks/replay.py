"""How a rank's core is built when its journal is replayed."""

import msgspec

from bus.journal.reader import JournalError
from bus.journal.records import Header
from bus.replay import Subject, config_of


class Construction(msgspec.Struct, frozen=True):
    """What a rank's core is built from beside the configuration: nothing. The executor tells it the rest."""


def subject(header: Header) -> Subject:
    """The recorded core, as it began.

    Raises:
        JournalError: it scheduled with vLLM's scheduler, which decides by more than the events it is given.
    """
    scheduler = config_of(header).scheduler
    raise JournalError(f"this rank had scheduler = {scheduler}, which is not replayed")
