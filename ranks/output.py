"""What a step gave, as one message for each frontend that has requests in it."""

from collections.abc import Sequence

import numpy as np

from bus.messages import EMPTY, Logprobs, Outputs, Pooled, RequestStarted, TurnEnded
from bus.wire import pack_ints
from ranks.request import Int32
from ranks.scheduler import Ended


def outputs(
    step: int,
    frontends: Int32,
    handles: Int32,
    tokens: Int32,
    counts: Int32 | None,
    started: list[tuple[int, RequestStarted]],
    turns: list[tuple[int, TurnEnded]],
    ended: list[Ended],
    logprobs: list[tuple[int, Logprobs]],
    pooled: Sequence[tuple[int, Pooled]] = (),
) -> list[tuple[int, Outputs]]:
    """The messages, by frontend, in rising order.

    `frontends` and `handles` [n] say whose the tokens are: one each, or, with `counts` [n], that many of `tokens`.
    """
    alike = np.count_nonzero(frontends != frontends[:1]) == 0
    addressees = dict.fromkeys((frontends[:1] if alike else frontends).tolist())
    for items in (started, turns, logprobs):  # who is in `pooled` has ended
        addressees |= dict.fromkeys(frontend for frontend, _ in items)
    addressees |= dict.fromkeys(item.frontend for item in ended)
    messages = []
    for frontend in sorted(addressees):
        own_handles, own_tokens, own_counts = handles, tokens, counts
        if len(addressees) > 1:
            mine = frontends == frontend
            own_handles = handles[mine]
            own_tokens = tokens[mine if counts is None else np.repeat(mine, counts)]
            own_counts = None if counts is None else counts[mine]
        messages.append(
            (
                frontend,
                Outputs(
                    step=step,
                    handles=pack_ints(own_handles),
                    tokens=pack_ints(own_tokens),
                    counts=EMPTY if own_counts is None else pack_ints(own_counts),
                    started=[item for place, item in started if place == frontend],
                    turns=[item for place, item in turns if place == frontend],
                    ended=[item.ended for item in ended if item.frontend == frontend],
                    logprobs=[item for place, item in logprobs if place == frontend],
                    pooled=[item for place, item in pooled if place == frontend],
                ),
            )
        )
    return messages
