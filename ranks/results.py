"""A step's result as the executor sends it: what each row got, once it is sure that it may have that."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bus.messages import StepResult
from bus.wire import all_below, unpack_ints
from ranks.batch import NONE, Rows
from ranks.planning import Step
from ranks.pooling import POOLED
from ranks.request import Int32
from ranks.scheduler import NOT_A_NUMBER, BrokenResult

Places = npt.NDArray[np.intp]
"""Numbers of places in a step."""

NO_PLACES: Places = np.empty(0, np.intp)


class Drawn(NamedTuple):
    """What the rows of a step got: the first `lengths` [n] of each line of `table` [n, most], both int32.

    Of those that got none, `broken` are the places where logits were not numbers, `pooled` those that were pooled.
    """

    table: Int32
    lengths: Int32
    broken: Places
    pooled: Places


def read(result: StepResult, step: Step, pools: npt.NDArray[np.bool_], vocab_size: int) -> Drawn:
    """What a step's rows [n] got; `pools` [n] says which are pooled at their last token, and draw none.

    Raises:
        BrokenResult: it is not what that step can have given.
    """
    tokens = unpack_ints(result.tokens)
    if not result.counts.nbytes:
        all_draw = step.all_sample and tokens.size == step.rows.size and not np.count_nonzero(pools)
        if all_draw and all_below(tokens, vocab_size):  # as in most steps
            return Drawn(tokens[:, None], step.samples.astype(np.int32), NO_PLACES, NO_PLACES)
        _check(step.rows, step.samples, pools, tokens, vocab_size)
        table, counts = tokens[:, None], np.ones_like(tokens)
    else:
        counts = unpack_ints(result.counts)
        _check_counts(step, tokens, counts)
        of = np.repeat(np.arange(counts.size), counts)
        _check(step.rows[of], step.samples[of], pools[of], tokens, vocab_size)
        table = _as_table(tokens, counts)
    first = table[:, 0]
    return Drawn(table, counts * (first >= 0), (first == NOT_A_NUMBER).nonzero()[0], (first == POOLED).nonzero()[0])


def _check(
    rows: Rows, samples: npt.NDArray[np.bool_], pools: npt.NDArray[np.bool_], tokens: Int32, vocab_size: int
) -> None:
    """Look whether each of `rows` [n], which comes to its last token or does not, may have this of `tokens` [n]."""
    if tokens.size != rows.size:
        raise BrokenResult(f"it has {tokens.size} tokens for {rows.size} rows")
    drawn = (tokens >= 0) & (tokens < vocab_size)
    fitting = np.where(samples, np.where(pools, tokens == POOLED, drawn), tokens == NONE) | (tokens == NOT_A_NUMBER)
    if not fitting.all():
        place = int(fitting.argmin())
        does = "is pooled" if pools[place] else "samples"
        what = does if samples[place] else "does not sample"
        raise BrokenResult(f"row {rows[place]}, which {what}, has token {tokens[place]}")


def _check_counts(step: Step, tokens: Int32, counts: Int32) -> None:
    """Look whether the rows of a step may have so many tokens each."""
    if counts.size != step.rows.size:
        raise BrokenResult(f"it has counts for {counts.size} rows; {step.rows.size} ran")
    most = np.where(step.samples, 1 + step.num_drafts, 1)
    if not ((counts > 0) & (counts <= most)).all():
        place = int(((counts < 1) | (counts > most)).argmax())
        raise BrokenResult(f"row {step.rows[place]} has {counts[place]} tokens; it may have from 1 to {most[place]}")
    if int(counts.sum()) != tokens.size:
        raise BrokenResult(f"it has {tokens.size} tokens; the counts of the rows make {counts.sum()}")
    if ((tokens < 0) & (np.repeat(counts, counts) > 1)).any():
        raise BrokenResult("a row has several tokens of which one is none")


def _as_table(tokens: Int32, counts: Int32) -> Int32:
    """`tokens`, which come one after the other, with a line for each of `counts` [n]; int32 [n, most]."""
    if tokens.size == counts.size:
        return tokens[:, None]
    table = np.full((counts.size, int(counts.max())), NONE, np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = tokens
    return table
