"""Gathers what a step gave, for each frontend one message."""

from dataclasses import dataclass, field
from typing import Any

from bus.messages import Logprobs, Outputs, RequestStarted
from bus.wire import pack_ints
from ranks.scheduler import Ended, StepOutputs


@dataclass(slots=True)
class _Parcel:
    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    started: list[RequestStarted] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)


class Outbox:
    """Made for one step, filled, and closed. `name` is the request's id in single-step mode."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._parcels: dict[int, _Parcel] = {}
        self._emitted: dict[str, Any] = {}

    def started(self, frontend: int, started: RequestStarted) -> None:
        self._parcel(frontend).started.append(started)

    def tokens(self, frontend: int, handle: int, name: str, tokens: list[int]) -> None:
        if tokens:
            parcel = self._parcel(frontend)
            parcel.handles.append(handle)
            parcel.tokens += tokens
            parcel.counts.append(len(tokens))
        self._emitted[name] = {"new_token_ids": tokens, "finish_reason": None, "stop_reason": None}

    def logprobs(self, frontend: int, logprobs: Logprobs) -> None:
        self._parcel(frontend).logprobs.append(logprobs)

    def turn_ended(self, name: str, reason: str, stop_reason: int | None) -> None:
        self._emitted[name] |= {"finish_reason": reason, "stop_reason": stop_reason}

    def ended(self, ended: Ended, name: str) -> None:
        self._parcel(ended.frontend).ended.append(ended.ended)
        emitted = self._emitted.setdefault(name, {"new_token_ids": []})
        emitted |= {"finish_reason": ended.ended.reason, "stop_reason": ended.ended.stop_reason}

    def close(self) -> StepOutputs:
        return StepOutputs([(i, self._message(self._parcels[i])) for i in sorted(self._parcels)], self._emitted)

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
            ended=parcel.ended,
        )
