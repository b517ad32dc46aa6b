"""Where requests go, and what a frontend knows of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import KvEvents, Load
from bus.prefix import block_hashes
from bus.wire import pack_ints
from frontend.routing import RankView, Router, Unroutable

BLOCK = 16
ROWS = 64


def load(number: int = 1, acknowledged: int = 0, **fields: object) -> Load:
    values = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0, "num_blocks": 100} | fields
    return Load(number=number, acknowledged=acknowledged, **values)  # type: ignore[arg-type]


def router(*loads: Load, policy: str = "least_loaded", frontend: int = 0) -> Router:
    router = Router(policy, frontend, BLOCK, ROWS)
    for rank, report in enumerate(loads):
        router.ranks[rank] = RankView()
        router.ranks[rank].see_load(report)
    return router


def hashes(num_tokens: int, first: int = 0) -> bytes:
    return block_hashes(pack_ints(range(first, first + num_tokens)), BLOCK)


def cache(router: Router, rank: int, names: bytes) -> None:
    router.ranks[rank].see_kv_events(KvEvents(number=1, snapshot=True, stored=memoryview(names)))


def test_the_least_resulting_maximum_wins() -> None:
    busy = router(load(pending_prefill_tokens=500), load(pending_prefill_tokens=90), load(pending_prefill_tokens=100))
    assert busy.choose(50, b"", None) == (1, 50)


def test_a_rank_without_a_free_row_comes_last() -> None:
    full = router(load(running=40, waiting=24), load(running=63, pending_prefill_tokens=900))
    assert full.choose(10, b"", None) == (1, 10)
    both = router(load(running=64), load(running=64, pending_prefill_tokens=900))
    assert both.choose(10, b"", None) == (0, 10)


def test_cached_tokens_need_no_prefill() -> None:
    ranks = router(load(), load())
    cache(ranks, 1, hashes(64))
    assert ranks.choose(100, hashes(96), None) == (1, 36)
    assert ranks.choose(64, hashes(64), None) == (1, 1)
    assert ranks.choose(100, hashes(96, first=7), None) == (0, 100)


def test_a_chain_counts_only_from_its_start() -> None:
    ranks = router(load(), load())
    cache(ranks, 1, hashes(64)[16:])
    assert ranks.choose(100, hashes(96), None) == (0, 100)


def test_ties_go_to_fewer_in_flight_then_to_the_sooner_free_row_then_rotate_by_frontend() -> None:
    assert router(load(running=2), load(running=1)).choose(10, b"", None)[0] == 1
    assert (
        router(load(running=1, min_remaining_output=9), load(running=1, min_remaining_output=3)).choose(10, b"", None)[
            0
        ]
        == 1
    )
    for frontend, expected in ((0, 0), (1, 1), (2, 0)):
        assert router(load(), load(), frontend=frontend).choose(10, b"", None)[0] == expected


def test_a_shared_prefix_does_not_pile_up_on_one_rank() -> None:
    """Requests come one after the other, each when the one before has its prefill done: the worst case for affinity."""
    ranks = router(load(), load())
    names, running = hashes(4096), [0, 0]
    for number in range(2, 18):
        rank, to_prefill = ranks.choose(4100, names, None)
        sequence = ranks.ranks[rank].place(to_prefill)
        running[rank] += 1
        ranks.ranks[rank].see_load(load(number, sequence, running=running[rank]))
        cache(ranks, rank, names)
    assert min(running) >= 5, running


def test_requests_sent_at_once_are_spread_before_any_load_comes_back() -> None:
    ranks = router(load(), load(), load(), load())
    chosen = []
    for _ in range(16):
        rank, to_prefill = ranks.choose(100, hashes(96), None)
        ranks.ranks[rank].place(to_prefill)
        chosen.append(rank)
    assert [chosen.count(rank) for rank in range(4)] == [4, 4, 4, 4]


def test_a_conversation_returns_to_its_rank_at_low_load() -> None:
    ranks = router(load(), load(), frontend=1)
    cache(ranks, 0, hashes(160))
    assert [ranks.choose(170, hashes(160), None)[0] for _ in range(5)] == [0] * 5


def test_round_robin_takes_turns() -> None:
    ranks = router(load(), load(draining=True), load(), policy="round_robin")
    assert [ranks.choose(10, b"", None)[0] for _ in range(4)] == [0, 2, 0, 2]


def test_a_pinned_rank_is_taken_or_refused_with_a_sentence() -> None:
    ranks = router(load(pending_prefill_tokens=900), load(), load(draining=True))
    assert ranks.choose(10, b"", 0)[0] == 0
    for rank in (2, 7):
        with pytest.raises(Unroutable, match=f"rank {rank} takes no requests now; ranks that do: 0, 1"):
            ranks.choose(10, b"", rank)
    with pytest.raises(Unroutable, match="no rank takes requests"):
        router(load(num_blocks=0)).choose(10, b"", None)


def test_a_gap_in_kv_events_voids_what_was_known_until_a_snapshot() -> None:
    view = RankView()
    names = hashes(48)
    view.see_kv_events(KvEvents(number=5, snapshot=True, stored=memoryview(names[:16])))
    view.see_kv_events(KvEvents(number=6, stored=memoryview(names[16:])))
    assert view.cached_blocks(names) == 3
    view.see_kv_events(KvEvents(number=7, removed=memoryview(names[32:])))
    assert view.cached_blocks(names) == 2
    view.see_kv_events(KvEvents(number=9, stored=memoryview(names[32:])))
    assert view.cached_blocks(names) == 0
    view.see_kv_events(KvEvents(number=10, stored=memoryview(names)))
    assert view.cached_blocks(names) == 0
    view.see_kv_events(KvEvents(number=11, snapshot=True, stored=memoryview(names)))
    assert view.cached_blocks(names) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=40))
def test_work_counts_once_whether_reported_or_not(steps: list[tuple[bool, int]]) -> None:
    """What a rank has seen moves from this side's count to its own; nothing is lost or doubled."""
    view, total, requests = RankView(), 0, 0
    for number, (report, tokens) in enumerate(steps, start=1):
        view.place(tokens)
        total, requests = total + tokens, requests + 1
        if report:
            view.see_load(load(number, view.sequence, waiting=requests, pending_prefill_tokens=total))
        assert (view.pending_tokens, view.in_flight) == (total, requests)


def test_an_older_load_report_is_ignored() -> None:
    view = RankView()
    view.see_load(load(4, running=1))
    view.see_load(load(3, running=9))
    assert view.in_flight == 1
