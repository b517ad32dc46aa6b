"""One rule per command, with right answers and wrong ones."""

from typing import Any, get_args

import pytest

from bus import messages as m
from bus.folds import RULES, FoldError, fold


def test_every_command_has_a_rule() -> None:
    assert set(RULES) == set(get_args(m.AnyCommand))


@pytest.mark.parametrize(
    ("command", "values", "folded"),
    [
        (m.FinishRequests, [["a"], [], ["b", "c"]], ["a", "b", "c"]),
        (m.UpdateDraftTokens, [["a"], ["b"]], ["a", "b"]),
        (m.TokenCount, [3, 4], [3, 4]),
        (m.PendingPrefillTokens, [3, 4], [3, 4]),
        (m.ComputedBlocks, [16, 0], [16, 0]),
        (m.MinRemainingOutput, [None, 4], [None, 4]),
        (m.UnfinishedRequests, [3, 4], 7),
        (m.RequestCounts, [[1, 2], [10, 20]], [11, 22]),
        (m.HasFinishedRequests, [False, True], True),
        (m.HasFinishedRequests, [False, False], False),
        (m.ResetPrefixCache, [True, False], False),
        (m.ResetPrefixCache, [True, True], True),
        (m.ResetEncoderCache, [True, True], True),
        (m.MakeStats, [None, None], None),
        (m.GrammarBitmask, [None, None], None),
        (m.GrammarBitmask, [[["a"], [b"1"]], None, [["b"], [b"2"]]], [["a", "b"], [b"1", b"2"]]),
        (m.SetPause, ["paused_all", "paused_all"], "paused_all"),
        (m.GetPauseState, ["paused_all", "unpaused"], ["paused_all", "unpaused"]),
        (m.Resume, ["unpaused", "unpaused"], "unpaused"),
        (m.Drain, [True, True], True),
        (m.LoadAdapter, ["identity"], "identity"),
        (m.UnloadAdapter, [True], True),
        (m.ListAdapters, [[]], []),
        (m.Shutdown, [True, True], True),
        (m.UpdateFromOutput, [{"a": {"x": 1}}, {"b": {"x": 2}}], {"a": {"x": 1}, "b": {"x": 2}}),
    ],
)
def test_fold(command: Any, values: list[Any], folded: Any) -> None:
    assert fold(command, list(enumerate(values))) == folded


def test_stats_add_up_and_usage_is_averaged() -> None:
    one = {"running": 1, "kv_cache_usage": 0.2, "prefix": {"queries": 10, "hits": 5}, "spec": {"accepted": [3, 1]}}
    two = {"running": 2, "kv_cache_usage": 0.6, "prefix": {"queries": 1, "hits": 1}, "spec": {"accepted": [1, 1, 1]}}
    assert fold(m.MakeStats, [(0, one), (1, None), (2, two)]) == {
        "running": 3,
        "kv_cache_usage": pytest.approx(0.4),
        "prefix": {"queries": 11, "hits": 6},
        "spec": {"accepted": [4, 2, 1]},
    }
    assert one["prefix"] == {"queries": 10, "hits": 5}


def test_schedules_merge_with_the_rank_of_each_request() -> None:
    def part(name: str, tokens: int) -> dict[str, Any]:
        return {
            "num_scheduled_tokens": {name: tokens},
            "total_num_scheduled_tokens": tokens,
            "scheduled_new_reqs": [{"req_id": name}],
            "scheduled_cached_reqs": {"req_ids": [name]},
        }

    merged = fold(m.Schedule, [(0, part("a", 3)), (2, part("b", 4))])
    assert merged["num_scheduled_tokens"] == {"a": 3, "b": 4}
    assert merged["total_num_scheduled_tokens"] == 7
    assert merged["rank_of"] == {"a": 0, "b": 2}
    assert [new["req_id"] for new in merged["scheduled_new_reqs"]] == ["a", "b"]
    assert merged["scheduled_cached_reqs"] == {"req_ids": ["a", "b"]}


@pytest.mark.parametrize(
    ("command", "value"), [(m.TokenCount, "3"), (m.RequestCounts, [1]), (m.SetPause, "asleep"), (m.MakeStats, [1])]
)
def test_a_wrong_answer_names_the_rank(command: Any, value: Any) -> None:
    with pytest.raises(FoldError, match="rank 5"):
        fold(command, [(5, value)])
