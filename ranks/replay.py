"""How a rank's core is built when its journal is replayed."""

from dataclasses import dataclass

import msgspec

from bus.config import Config
from bus.counters import Counters
from bus.journal.reader import JournalError
from bus.journal.records import Header
from bus.messages import Grammar, KvPool
from bus.replay import Subject, config_of, construction_of
from ranks.compiling import Compiled, plain
from ranks.core import RankCore
from ranks.grammars import Grammars, Matcher, Vocabulary
from ranks.native import NativeScheduler


class Construction(msgspec.Struct, frozen=True):
    """What a rank's core is built from beside the configuration, and what the executor tells it.

    `vocabulary` is what grammars of requests are compiled for; None where the rank found no model.
    """

    vocabulary: Vocabulary | None = None


@dataclass(frozen=True)
class NativeSchedulers:
    """Makes a scheduler for a KV pool. (A class: a function would hide the counters from `bus.journal.state`.)

    `grammars` None are those of the served model.
    """

    config: Config
    counters: Counters
    grammars: Grammars | None = None

    def __call__(self, pool: KvPool) -> NativeScheduler:
        return NativeScheduler(self.config, pool, self.counters, self.grammars)


class UnknownMatcher(Matcher):
    """A place in a grammar of which nothing is known but that it allows what came. Its masks are zeros, as redacted."""

    def accept(self, tokens: list[int]) -> bool:
        return True

    def allowed_of(self, tokens: list[int]) -> list[int]:
        return tokens

    def masks(self, drafts: list[int]) -> list[bytes]:
        return [bytes(4 * self._grammars.num_words)] * (1 + len(drafts))


class UnknownGrammars(Grammars):
    """The grammars of a redacted journal."""

    @property
    def num_words(self) -> int:
        return -(-self.vocabulary.size // 32) if self.vocabulary else 0

    def matcher(self, grammar: Grammar) -> Matcher:
        return UnknownMatcher(self, grammar)


def subject(header: Header) -> Subject:
    """The recorded core, as it began.

    Raises:
        JournalError: it scheduled with vLLM's scheduler, which decides by more than the events it is given.
    """
    config = config_of(header)
    if config.scheduler != "native":
        raise JournalError(f"this rank had scheduler = {config.scheduler}; only scheduler = native is replayed")
    counters = Counters()
    vocabulary = construction_of(header, Construction).vocabulary
    grammars = UnknownGrammars(config, vocabulary) if header.redacted else Grammars(config, vocabulary)
    core = RankCore(header.index, config, NativeSchedulers(config, counters, grammars), counters)
    return Subject(core, (Compiled,), plain)
