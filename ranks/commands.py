"""The commands that ask or change one thing of the scheduler and are answered at once."""

from collections.abc import Callable
from typing import Any

from bus.messages import (
    Command,
    ComputedBlocks,
    GetPauseState,
    GrammarBitmask,
    HasFinishedRequests,
    MakeStats,
    MinRemainingOutput,
    PendingPrefillTokens,
    RequestCounts,
    ResetEncoderCache,
    ResetPrefixCache,
    Schedule,
    TokenCount,
    UnfinishedRequests,
    UpdateDraftTokens,
    UpdateFromOutput,
)
from bus.wire import pack_ints
from ranks.scheduler import Refused, Scheduler


def _computed_blocks(scheduler: Scheduler, body: ComputedBlocks) -> int:
    try:
        prompt = pack_ints(body.prompt_token_ids)
    except OverflowError:
        raise Refused("prompt_token_ids has a number that is no token; tokens are below 2^31") from None
    return scheduler.computed_tokens(prompt, body.cache_salt, body.adapter)


SIMPLE: dict[type[Command], Callable[[Scheduler, Any], Any]] = {
    TokenCount: lambda scheduler, _: scheduler.token_count(),
    PendingPrefillTokens: lambda scheduler, _: scheduler.load().pending_prefill_tokens,
    ComputedBlocks: _computed_blocks,
    MinRemainingOutput: lambda scheduler, _: scheduler.load().min_remaining_output,
    UnfinishedRequests: lambda scheduler, _: scheduler.unfinished(),
    RequestCounts: lambda scheduler, _: scheduler.request_counts(),
    HasFinishedRequests: lambda scheduler, _: scheduler.has_finished(),
    ResetPrefixCache: lambda scheduler, body: scheduler.reset_prefix_cache(body.reset_running_requests),
    ResetEncoderCache: lambda scheduler, _: scheduler.reset_encoder_cache(),
    MakeStats: lambda scheduler, _: scheduler.stats(),
    UpdateDraftTokens: lambda scheduler, body: scheduler.set_drafts(body.drafts),
    GrammarBitmask: lambda scheduler, _: scheduler.bitmask(),
}
"""The value of each, from the scheduler and the command. May raise `Refused`."""

PROBES = frozenset(
    (
        TokenCount,
        PendingPrefillTokens,
        ComputedBlocks,
        MinRemainingOutput,
        UnfinishedRequests,
        RequestCounts,
        HasFinishedRequests,
        MakeStats,
        GetPauseState,
    )
)
"""Commands that change nothing."""

SINGLE_STEP = frozenset((UpdateDraftTokens, GrammarBitmask, Schedule, UpdateFromOutput))
"""Commands that are only for single-step mode."""

HELD = frozenset((GrammarBitmask, UpdateFromOutput))
"""Commands about the schedule that is held."""
