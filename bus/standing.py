"""When what a rank has let stand is void: the rank and the executor judge by the same."""

import numpy as np
import numpy.typing as npt

from bus.messages import StepResult
from bus.wire import unpack_ints

FEW = 4
"""So many tokens are compared with one by one."""


def has_any(tokens: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> bool:
    """Whether one of `tokens` [n] is one of `wanted` [m]."""
    if wanted.size > FEW:
        return bool(np.isin(tokens, wanted).any())
    return any(np.count_nonzero(tokens == one) for one in wanted.tolist())


def may_end(result: StepResult, stops: npt.NDArray[np.int32]) -> bool:
    """Whether what a step gave may end a request, those that come to their full length left out.

    `stops` [m] are all tokens that any of its rows stops at.
    """
    tokens = unpack_ints(result.tokens)
    plain = not (result.logprobs or result.counts.nbytes or result.pooled)
    return not plain or int(np.count_nonzero(tokens < 0)) > 0 or has_any(tokens, stops)
