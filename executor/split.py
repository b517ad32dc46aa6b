"""From what a step drew to each rank's result."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bus.messages import Logprobs, StepResult
from bus.wire import pack_floats, pack_ints
from executor.merge import Part
from executor.step import SampledStep


def split(parts: Sequence[Part], sampled: SampledStep, max_num_seqs: int) -> list[StepResult]:
    """The results of a step, one for each of the `parts` it was merged from, in their order."""
    ends = list(accumulate(part.rows.size for part in parts))
    logprobs: list[list[Logprobs]] = [[] for _ in parts]
    for index in sorted(sampled.logprobs):
        token_ids, values, rank_of_token = sampled.logprobs[index]
        place = int(np.searchsorted(ends, index, side="right"))
        part = parts[place]
        logprobs[place].append(
            Logprobs(
                owner=int(part.rows[index - (ends[place] - part.rows.size)]) - part.rank * max_num_seqs,
                positions=1,
                token_ids=pack_ints(token_ids),
                values=pack_floats(values),
                ranks=pack_ints([rank_of_token]),
            )
        )
    return [
        StepResult(
            step=part.step,
            tokens=pack_ints(sampled.tokens[end - part.rows.size : end]),
            logprobs=logprobs[place],
        )
        for place, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]
