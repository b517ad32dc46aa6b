"""Gathers what a step gave, for each frontend one message."""

from dataclasses import dataclass, field
from typing import Any

from bus.messages import Logprobs, Outputs, Pooled, RequestEnded, RequestStarted, TurnEnded
from bus.wire import pack_ints, unpack_ints
from ranks.scheduler import Ended, StepOutputs


@dataclass(slots=True)
class _Parcel:
    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    started: list[RequestStarted] = field(default_factory=list)
    turns: list[TurnEnded] = field(default_factory=list)
    ended: list[RequestEnded] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)


class Outbox:
    """Made for one step, filled, and closed."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._parcels: dict[int, _Parcel] = {}

    def started(self, frontend: int, started: RequestStarted) -> None:
        self._parcel(frontend).started.append(started)

    def tokens(self, frontend: int, handle: int, tokens: list[int]) -> None:
        parcel = self._parcel(frontend)
        parcel.handles.append(handle)
        parcel.tokens += tokens
        parcel.counts.append(len(tokens))

    def logprobs(self, frontend: int, logprobs: Logprobs) -> None:
        self._parcel(frontend).logprobs.append(logprobs)

    def turn(self, frontend: int, turn: TurnEnded) -> None:
        self._parcel(frontend).turns.append(turn)

    def ended(self, ended: Ended) -> None:
        self._parcel(ended.frontend).ended.append(ended.ended)

    def pooled(self, frontend: int, pooled: Pooled) -> None:
        self._parcel(frontend).pooled.append(pooled)

    def close(self) -> StepOutputs:
        return [(frontend, self._message(self._parcels[frontend])) for frontend in sorted(self._parcels)]

    def _parcel(self, frontend: int) -> _Parcel:
        return self._parcels.setdefault(frontend, _Parcel())

    def _message(self, parcel: _Parcel) -> Outputs:
        one_each = all(count == 1 for count in parcel.counts)
        return Outputs(
            step=self._step,
            handles=pack_ints(parcel.handles),
            tokens=pack_ints(parcel.tokens),
            counts=pack_ints([] if one_each else parcel.counts),
            logprobs=parcel.logprobs,
            started=parcel.started,
            turns=parcel.turns,
            ended=parcel.ended,
            pooled=parcel.pooled,
        )


def by_id(outputs: StepOutputs, names: dict[tuple[int, int], str]) -> dict[str, Any]:
    """Outputs by request id: {"new_token_ids", "finish_reason", "stop_reason"} of each that has any.

    The end of a session's turn has a reason, too; that of a session that is closed with it adds nothing.

    `names` has the id of each request by frontend and handle.
    """
    emitted: dict[str, Any] = {}

    def of(frontend: int, handle: int) -> dict[str, Any]:
        fresh: dict[str, Any] = {"new_token_ids": [], "finish_reason": None, "stop_reason": None}
        return emitted.setdefault(names[frontend, handle], fresh)

    for frontend, message in outputs:
        handles, tokens = unpack_ints(message.handles).tolist(), unpack_ints(message.tokens).tolist()
        begin = 0
        for handle, count in zip(handles, unpack_ints(message.counts).tolist() or [1] * len(handles), strict=True):
            of(frontend, handle)["new_token_ids"] += tokens[begin : begin + count]
            begin += count
        for turn in message.turns:
            if (frontend, turn.handle) in names:
                of(frontend, turn.handle).update(finish_reason=turn.reason, stop_reason=turn.stop_reason)
        for ended in message.ended:
            if ended.reason == "closed":
                continue
            of(frontend, ended.handle).update(finish_reason=ended.reason, stop_reason=ended.stop_reason)
    return emitted
