"""What a step gave, as one message for each frontend that has requests in it."""

from collections.abc import Sequence

import numpy as np

from bus.messages import EMPTY, Logprobs, Outputs, Pooled, RequestStarted, TurnEnded
from bus.wire import pack_ints, unpack_ints
from ranks.request import Int32
from ranks.scheduler import Ended, StepOutputs


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


def joined(outputs: StepOutputs) -> StepOutputs:
    """What is told of steps of steady decode, in their order, in one message for each frontend as far as that goes."""
    runs: dict[int, list[list[Outputs]]] = {}
    for frontend, message in outputs:
        own = runs.setdefault(frontend, [])
        if own and own[-1][-1].handles is message.handles:
            own[-1].append(message)
        else:
            own.append([message])
    return [(frontend, _as_one(run)) for frontend, own in runs.items() for run in own]


def _as_one(run: list[Outputs]) -> Outputs:
    """Steps that give each of the same handles a token."""
    first, last = run[0], run[-1]
    if first is last:
        return first
    tokens = np.stack([unpack_ints(message.tokens) for message in run], axis=1)
    counts = np.full(tokens.shape[0], len(run), np.int32)
    return Outputs(step=last.step, handles=first.handles, tokens=pack_ints(tokens), counts=pack_ints(counts))
