"""From what a step drew to each rank's result."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bus.messages import EMPTY, Logprobs, Pooled, StepResult
from bus.wire import pack_floats, pack_ints
from executor.step import Part, SampledStep


def split(parts: Sequence[Part], sampled: SampledStep, max_num_seqs: int) -> list[StepResult]:
    """The results of a step, one for each of the `parts` it was merged from, in their order."""
    counts = sampled.counts
    tokens = pack_ints(sampled.tokens)
    ends = list(accumulate([part.rows.size for part in parts]))
    token_ends = ends if counts is None else np.cumsum(counts)[np.array(ends) - 1].tolist()
    logprobs: list[list[Logprobs]] = [[] for _ in parts]

    def where(index: int) -> tuple[int, int]:
        """The part that an entry of the step is in, and its row there."""
        place = int(np.searchsorted(ends, index, side="right"))
        part = parts[place]
        return place, int(part.rows[index - (ends[place] - part.rows.size)]) - part.rank * max_num_seqs

    for found in sampled.prompt_logprobs:
        place, row = where(found.entry)
        logprobs[place].append(
            Logprobs(
                owner=row,
                positions=found.ranks.size,
                token_ids=pack_ints(found.token_ids),
                values=pack_floats(found.values),
                ranks=pack_ints(found.ranks),
                prompt_position=found.position,
            )
        )
    pooled: list[list[Pooled]] = [[] for _ in parts]
    for entry, vector in sampled.pooled:
        place, row = where(entry)
        pooled[place].append(Pooled(owner=row, vector=pack_floats(vector)))
    for index in sorted(sampled.logprobs):
        token_ids, values, ranks = zip(*sampled.logprobs[index], strict=True)
        place, row = where(index)
        logprobs[place].append(
            Logprobs(
                owner=row,
                positions=len(ranks),
                token_ids=pack_ints(np.concatenate(token_ids)),
                values=pack_floats(np.concatenate(values)),
                ranks=pack_ints(ranks),
            )
        )
    return [
        StepResult(
            step=part.step,
            tokens=tokens[4 * begin : 4 * token_end],
            counts=EMPTY if counts is None or part.drafts is None else pack_ints(counts[end - part.rows.size : end]),
            logprobs=logprobs[place],
            pooled=pooled[place],
        )
        for place, (part, end, begin, token_end) in enumerate(
            zip(parts, ends, [0, *token_ends[:-1]], token_ends, strict=True)
        )
    ]
