"""How a frontend's core is built, when it runs and when its journal is replayed."""

import msgspec

from bus.config import Config
from bus.journal.records import Header
from bus.replay import Subject, config_of, construction_of
from frontend.core import FrontendCore
from frontend.params import ModelLimits
from frontend.seam import (
    AbortCall,
    AddCall,
    CommandCall,
    ConnectionClosed,
    Detokenised,
    InputRendered,
    SessionCall,
    SessionOutput,
    TextOutput,
    TextRefused,
)

CALLS = (
    AddCall,
    AbortCall,
    CommandCall,
    Detokenised,
    TextOutput,
    TextRefused,
    SessionCall,
    ConnectionClosed,
    InputRendered,
    SessionOutput,
)


class Construction(msgspec.Struct, frozen=True, kw_only=True):
    """What the core is built from beside the configuration; see `FrontendCore`."""

    limits: ModelLimits
    seed_key: bytes


def build(index: int, config: Config, construction: Construction) -> FrontendCore:
    """The core of frontend `index`."""
    return FrontendCore(index, config, construction.limits, construction.seed_key)


def subject(header: Header) -> Subject:
    """The recorded core, as it began."""
    core = build(header.index, config_of(header), construction_of(header, Construction))
    return Subject(core, CALLS)
