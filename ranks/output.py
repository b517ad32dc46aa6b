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
    addressees = [*np.unique(frontends).tolist(), *(place for place, _ in started), *(item.frontend for item in ended)]
    addressees += [place for place, _ in (*turns, *logprobs)]  # who is in `pooled` has ended
    messages = []
    for frontend in sorted(dict.fromkeys(addressees)):
        mine = frontends == frontend
        messages.append(
            (
                frontend,
                Outputs(
                    step=step,
                    handles=pack_ints(handles[mine]),
                    tokens=pack_ints(tokens[mine if counts is None else np.repeat(mine, counts)]),
                    counts=EMPTY if counts is None else pack_ints(counts[mine]),
                    started=[item for place, item in started if place == frontend],
                    turns=[item for place, item in turns if place == frontend],
                    ended=[item.ended for item in ended if item.frontend == frontend],
                    logprobs=[item for place, item in logprobs if place == frontend],
                    pooled=[item for place, item in pooled if place == frontend],
                ),
            )
        )
    return messages
