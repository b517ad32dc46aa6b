"""Vectors of prompts, on their way to a frontend."""

from bus.messages import Floats, Sampling, StepResult
from ranks.scheduler import BrokenResult

POOLED = -3
"""In results: the prompt of this row was pooled."""


def takes_all(sampling: Sampling) -> bool:
    """Whether all of a prompt is pooled, so that all of it has to be computed whatever the prefix cache holds."""
    return sampling.pooling is not None and sampling.pooling.kind == "mean"


def vectors_of(rows: list[int], result: StepResult) -> dict[int, Floats]:
    """The vectors of the rows that a result says were pooled.

    Raises:
        BrokenResult: it does not have the vector of one.
    """
    vectors = {item.owner: item.vector for item in result.pooled}
    for row in rows:
        if row not in vectors:
            raise BrokenResult(f"row {row} was pooled, and there is no vector of it")
    return {row: vectors[row] for row in rows}
