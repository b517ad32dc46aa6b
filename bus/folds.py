"""How the answers of several ranks to one command become one answer: one rule per command."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bus.messages import (
    Adapter,
    Command,
    ComputedBlocks,
    Drain,
    FinishRequests,
    GetPauseState,
    GrammarBitmask,
    HasFinishedRequests,
    ListAdapters,
    LoadAdapter,
    MakeStats,
    MinRemainingOutput,
    PauseState,
    PendingPrefillTokens,
    RequestCounts,
    ResetEncoderCache,
    ResetPrefixCache,
    Resume,
    Schedule,
    SetPause,
    Shutdown,
    TokenCount,
    UnfinishedRequests,
    UnloadAdapter,
    UpdateDraftTokens,
    UpdateFromOutput,
)

Answers = Sequence[tuple[int, Any]]
"""(rank, its value), in rank order, of the ranks that answered."""


class FoldError(Exception):
    """A rank's answer is not of the type its command calls for."""


def _per_rank(answers: Answers) -> list[Any]:
    return [value for _, value in answers]


def _sum(answers: Answers) -> int:
    return sum(value for _, value in answers)


def _sums(answers: Answers) -> list[int]:
    return [sum(column) for column in zip(*(value for _, value in answers), strict=True)]


def _any(answers: Answers) -> bool:
    return any(value for _, value in answers)


def _only(answers: Answers) -> Any:
    """Of commands that one process answers."""
    ((_, value),) = answers
    return value


def _all(answers: Answers) -> bool:
    return all(value for _, value in answers)


def _concatenate(answers: Answers) -> list[str]:
    return [item for _, value in answers for item in value]


def _same(answers: Answers) -> Any:
    values = _per_rank(answers)
    return values[0] if all(value == values[0] for value in values) else values


def _stats(answers: Answers) -> dict[str, Any] | None:
    """Counts add up, `kv_cache_usage` is averaged, and nested statistics merge; None when no rank keeps any."""
    kept = [value for _, value in answers if value is not None]
    if not kept:
        return None
    merged: dict[str, Any] = {}
    for stats in kept:
        _merge_counts(merged, stats)
    merged["kv_cache_usage"] = sum(stats["kv_cache_usage"] for stats in kept) / len(kept)
    return merged


def _merge_counts(into: dict[str, Any], stats: dict[str, Any]) -> None:
    for name, value in stats.items():
        if isinstance(value, dict):
            _merge_counts(into.setdefault(name, {}), value)
        elif value is None:
            into.setdefault(name, None)
        elif isinstance(value, list):
            kept = into.get(name) or []
            longest = max(len(kept), len(value))
            pad = [list(side) + [0] * (longest - len(side)) for side in (kept, value)]
            into[name] = [a + b for a, b in zip(*pad, strict=True)]
        else:
            into[name] = (into.get(name) or 0) + value


def _bitmask(answers: Answers) -> list[Any] | None:
    present = [value for _, value in answers if value is not None]
    if not present:
        return None
    return [[request for ids, _ in present for request in ids], [row for _, rows in present for row in rows]]


def _schedule(answers: Answers) -> dict[str, Any]:
    """One rendering of all ranks' schedules, in rank order, with the rank of each request beside it."""
    merged: dict[str, Any] = {}
    rank_of: dict[str, int] = {}
    for rank, value in answers:
        rank_of |= dict.fromkeys(value["num_scheduled_tokens"], rank)
        _join(merged, value)
    return merged | {"rank_of": rank_of}


def _join(into: dict[str, Any], fields: dict[str, Any]) -> None:
    """Maps are united, lists concatenated, numbers added."""
    for name, field in fields.items():
        if isinstance(field, dict):
            _join(into.setdefault(name, {}), field)
        elif isinstance(field, list):
            into[name] = into.get(name, []) + field
        else:
            into[name] = into.get(name, 0) + field


def _outputs(answers: Answers) -> dict[str, Any]:
    return {request: output for _, value in answers for request, output in value.items()}


RULES: dict[type[Command], tuple[Any, Callable[[Answers], Any]]] = {
    FinishRequests: (list[str], _concatenate),
    UpdateDraftTokens: (list[str], _concatenate),
    TokenCount: (int, _per_rank),
    PendingPrefillTokens: (int, _per_rank),
    ComputedBlocks: (int, _per_rank),
    MinRemainingOutput: (int | None, _per_rank),
    UnfinishedRequests: (int, _sum),
    RequestCounts: (tuple[int, int], _sums),
    HasFinishedRequests: (bool, _any),
    ResetPrefixCache: (bool, _all),
    ResetEncoderCache: (bool, _all),
    MakeStats: (dict[str, Any] | None, _stats),
    GrammarBitmask: (tuple[list[str], list[bytes]] | None, _bitmask),
    Schedule: (dict[str, Any], _schedule),
    UpdateFromOutput: (dict[str, Any], _outputs),
    SetPause: (PauseState, _same),
    Resume: (PauseState, _same),
    GetPauseState: (PauseState, _same),
    Drain: (bool, _all),
    LoadAdapter: (str, _only),
    UnloadAdapter: (bool, _only),
    ListAdapters: (list[Adapter], _only),
    Shutdown: (bool, _all),
}
"""What type each rank's answer must have, and how the answers become one."""


def fold(command: type[Command], answers: Answers) -> Any:
    """One answer from the ranks' answers to `command`, which must not be empty.

    Raises:
        FoldError: an answer has the wrong type; the message names the rank.
    """
    kind, rule = RULES[command]
    checked = []
    for rank, value in answers:
        try:
            checked.append((rank, msgspec.convert(value, kind)))
        except msgspec.ValidationError as error:
            raise FoldError(f"rank {rank} answered {command.__name__} with something else: {error}") from None
    return rule(checked)
