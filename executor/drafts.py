"""The drafts of a step: who draws them, and which were right."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from bus import model_files
from bus.config import Config, ConfigError
from bus.model_files import ModelFacts
from executor.sampling import NAN_TOKEN
from executor.step import Drafts, Int32, MergedStep


class Judged(NamedTuple):
    """What is left of what a step drew: `tokens` and `counts` as in `SampledStep`, `lines` those that count."""

    tokens: Int32
    counts: Int32
    lines: Int32


def judge(size: int, drafts: Drafts, indices: Int32, drawn: Int32) -> Judged:
    """Keep of the tokens `drawn` [n] those up to the first of each sequence that is not the draft in its place.

    `indices` [n] are the entries, of the `size` of the step, that the tokens were drawn for, in rising order: of an
    entry with k drafts the token after its last known one, and one after each draft. Where one of those that are kept
    is not a number, the entry has nothing but that.
    """
    lines = np.bincount(indices, minlength=size).astype(np.int32)
    firsts = np.cumsum(lines, dtype=np.int32) - lines
    tried = np.full(drawn.size, -1, np.int32)
    tried[np.repeat(firsts, drafts.counts) + drafts.places] = drafts.tokens
    wrong = tried != drawn
    wrong_before = np.cumsum(wrong) - wrong
    kept = wrong_before == wrong_before[firsts[indices]]
    not_a_number = kept & (drawn == NAN_TOKEN)
    kept &= not_a_number | ~np.isin(indices, indices[not_a_number])
    drawing = lines > 0
    counts = np.where(drawing, np.bincount(indices[kept], minlength=size), 1).astype(np.int32)
    tokens = np.full(int(counts.sum()), -1, np.int32)
    tokens[np.repeat(drawing, counts)] = drawn[kept]
    return Judged(tokens, counts, np.flatnonzero(kept).astype(np.int32))


def draft_facts(config: Config, facts: ModelFacts) -> ModelFacts | None:
    """The draft model for the model of `facts`; None if none is to be used.

    Raises:
        ModelError: it cannot be served.
        ConfigError: it has other tokens, or a shorter context than is served.
    """
    if config.speculation != "model":
        return None
    own = model_files.read(model_files.resolve(msgspec.structs.replace(config, model=config.draft_model)).folder)
    if own.vocab_size != facts.vocab_size:
        raise ConfigError(
            f"draft_model: {config.draft_model} is not allowed; it has {own.vocab_size} tokens, and the model "
            f"{facts.vocab_size}"
        )
    longest = config.max_model_len or facts.max_positions
    if own.max_positions < longest:
        raise ConfigError(
            f"draft_model: {config.draft_model} is not allowed; it takes {own.max_positions} tokens, and "
            f"max_model_len is {longest}"
        )
    return own


def narrowed(step: MergedStep) -> Iterator[MergedStep]:
    """For each place that a draft may have, the step that draws it, for the sequences of `step` that have so many."""
    assert step.drafts is not None
    counts = step.drafts.counts
    for place in range(int(counts.max(initial=0))):
        some = np.flatnonzero(counts > place)
        yield MergedStep(
            setups=[],
            ranks=step.ranks[some],
            rows=step.rows[some],
            positions=(step.positions + step.num_tokens - counts)[some] - 1 + np.int32(place),
            num_tokens=np.ones(some.size, np.int32),
            samples=np.ones(some.size, np.bool_),
            block_tables=step.block_tables[some],
        )
