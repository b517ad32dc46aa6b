"""What /metrics says of the engine."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram

from bus.messages import ExecutorStatus, Load
from frontend.metrics import BusCollector, EngineStatus, RankStats, histograms
from frontend.seam import StatusUpdate
from frontend.sight import Histogram

ROOT = Path(__file__).parents[2]


def load(number: int = 1, prompt_tokens: float = 0, cached: float = 0, **given: int) -> Load:
    counters = {"scheduler_prompt_tokens": prompt_tokens, "scheduler_cached_prompt_tokens": cached}
    fields = {"running": 0, "waiting": 0, "pending_prefill_tokens": 0} | given
    return Load(number=number, acknowledged=0, counters=counters, **fields)


def test_rank_statistics_are_changes() -> None:
    stats = RankStats()
    ((rank, first),) = stats.changes({1: load(1, 100, 40, running=2, waiting=1, used_blocks=5, num_blocks=10)})
    assert (rank, first.num_running_reqs, first.num_waiting_reqs, first.kv_cache_usage) == (1, 2, 1, 0.5)
    assert (first.prefix_cache_stats.queries, first.prefix_cache_stats.hits) == (100, 40)
    ((_, second),) = stats.changes({1: load(2, 130, 50)})
    assert (second.prefix_cache_stats.queries, second.prefix_cache_stats.hits) == (30, 10)
    assert list(stats.changes({1: load(2, 130, 50)})) == []


def test_a_lost_rank_has_nothing_running_and_counts_anew_when_it_is_back() -> None:
    stats = RankStats()
    list(stats.changes({0: load(9, 100, 10, running=3)}))
    ((rank, lost),) = stats.changes({})
    assert (rank, lost.num_running_reqs) == (0, 0)
    ((_, back),) = stats.changes({0: load(1, 20, 5)})
    assert back.prefix_cache_stats.queries == 20
    ((_, restarted),) = stats.changes({0: load(1, 7, 0)})
    assert restarted.prefix_cache_stats.queries == 7


def exported(frontend: int) -> str:
    status = EngineStatus(frontend)
    executor = ExecutorStatus(
        model="m",
        max_model_len=10,
        num_blocks=4,
        block_size=16,
        counters={
            "bus_handling_seconds/Drained": 0.5,
            "bus_peers_down/step/rank": 2.0,
            "bus_sent_frames/step": 8.0,
            "executor_missed_ranks/1": 1.0,
            "executor_steps": 3.0,
            "executor_steps_in_flight": 2.0,
        },
    )
    counters = {"bus_rejected_frames/client/stale": 2.0, "requests_ended/stop": 5.0, "new/a/b": 1.0}
    status.last = StatusUpdate(True, {0: load(running=2)}, executor, counters)
    registry = CollectorRegistry()
    registry.register(BusCollector(status))
    return generate_latest(registry).decode()


def test_counters_and_labels() -> None:
    text = exported(0)
    for line in (
        "rankbus_ready 1.0",
        "rankbus_ranks_up 1.0",
        'rankbus_bus_rejected_frames_total{bus="client",process="frontend/0",reason="stale"} 2.0',
        'rankbus_bus_sent_frames_total{bus="step",process="executor"} 8.0',
        'rankbus_frontend_requests_ended_total{frontend="0",reason="stop"} 5.0',
        'rankbus_frontend_new_total{frontend="0",kind0="a",kind1="b"} 1.0',
        'rankbus_rank_running{rank="0"} 2.0',
        "rankbus_executor_steps_total 3.0",
        "rankbus_executor_steps_in_flight 2.0",
        'rankbus_bus_handling_seconds_total{event="Drained",process="executor"} 0.5',
        'rankbus_bus_peers_down_total{bus="step",process="executor",role="rank"} 2.0',
        'rankbus_executor_missed_ranks_total{rank="1"} 1.0',
    ):
        assert line in text.splitlines()


def test_only_frontend_0_exports_ranks_and_executor() -> None:
    text = exported(1)
    assert 'process="frontend/1"' in text
    assert "rankbus_rank" not in text
    assert "rankbus_executor" not in text


def test_vllms_latencies_are_summed_over_ranks() -> None:
    assert histograms()[0] == Histogram()
    metric = PrometheusHistogram("vllm:time_to_first_token_seconds", "doc", labelnames=["rank"], buckets=[0.5, 2.0])
    try:
        for rank, seconds in (("0", 0.25), ("1", 0.5), ("1", 1.0), ("0", 4.0)):
            metric.labels(rank).observe(seconds)
        first, between = histograms()
    finally:
        REGISTRY.unregister(metric)
    assert first == Histogram([0.5, 2.0], [2.0, 3.0], 4.0, 5.75)
    assert between == Histogram()


def grafana() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
    return board


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = grafana()
    assert board["schemaVersion"] >= 36
    assert board["title"]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            used = set(re.findall(r"\$(\w+)", json.dumps(target)) + re.findall(r"\$\{(\w+)\}", json.dumps(target)))
            assert used <= variables | {"__rate_interval"}
