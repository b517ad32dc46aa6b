"""Which drafts of a step were right, from what was drawn after each of them."""

from typing import NamedTuple

import numpy as np

from executor.sampling import NAN_TOKEN
from executor.step import Drafts, Int32


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
