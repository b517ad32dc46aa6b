"""What /metrics says of the engine: vLLM's statistics per rank, and the processes' own counters.

Each metric has one exporter: a frontend tells its own counters, and frontend 0 those of ranks and executor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from bus.messages import Load
from frontend.seam import StatusUpdate
from frontend.sight import Histogram

LABELS = {
    "bus_received_frames": ("bus",),
    "bus_received_bytes": ("bus",),
    "bus_sent_frames": ("bus",),
    "bus_sent_bytes": ("bus",),
    "bus_rejected_frames": ("bus", "reason"),
    "bus_lost_peers": ("bus", "reason"),
    "bus_handled_events": ("event",),
    "bus_handling_seconds": ("event",),
    "bus_peers_down": ("bus", "role"),
    "bus_peers_up": ("bus", "role"),
    "executor_missed_ranks": ("rank",),
    "journal_lost_records": ("reason",),
    "rank_errors_received": ("role",),
    "rank_refused_requests": ("code",),
    "errors_received": ("role",),
    "inputs_refused": ("code",),
    "requests_ended": ("reason",),
    "requests_refused": ("code",),
    "scheduler_accepted_tokens_per_pos": ("position",),
    "scheduler_draft_tokens_per_pos": ("position",),
    "sessions_ended": ("reason",),
    "turns_ended": ("reason",),
}
"""Label names of the counters whose names carry label values (see `bus.counters`); of others, ``kind0`` and so on."""

GAUGES = frozenset(
    {
        "executor_steps_in_flight",
        "rank_steps_in_flight",
        "scheduler_idle_sessions",
        "sessions",
        "unfinished_requests",
        "unfinished_text_requests",
    }
)
"""What goes up and down among the counters."""


class EngineStatus:
    """The last `StatusUpdate`. `frontend` is this frontend's index."""

    def __init__(self, frontend: int) -> None:
        self.frontend = frontend
        self.last = StatusUpdate(ready=False, loads={}, executor=None, counters={})

    @property
    def exports_ranks(self) -> bool:
        """Whether this frontend is the one to export what ranks and executor count."""
        return self.frontend == 0


@dataclass
class RankSchedulerStats(SchedulerStats):
    """vLLM's statistics of a scheduler, and what it counts elsewhere, but ranks tell with the rest."""

    preemptions: int = 0


class RankStats:
    """Turns the totals in `Load` into vLLM's statistics, which are changes since the last time."""

    def __init__(self) -> None:
        self._last: dict[int, Load] = {}

    def changes(self, loads: Mapping[int, Load]) -> Iterator[tuple[int, SchedulerStats]]:
        """Statistics of the ranks whose load has changed, and zeros of those that went down."""
        for rank, load in loads.items():
            last = self._last.get(rank)
            if load != last:
                yield rank, _scheduler_stats(load, last)
        for rank in self._last.keys() - loads.keys():
            yield rank, SchedulerStats()
        self._last = dict(loads)


def _scheduler_stats(load: Load, last: Load | None) -> SchedulerStats:
    return RankSchedulerStats(
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        kv_cache_usage=load.used_blocks / load.num_blocks if load.num_blocks else 0.0,
        preemptions=_increase("scheduler_preemptions", load, last),
        prefix_cache_stats=PrefixCacheStats(
            queries=_increase("scheduler_prompt_tokens", load, last),
            hits=_increase("scheduler_cached_prompt_tokens", load, last),
        ),
        spec_decoding_stats=SpecDecodingStats(
            num_spec_tokens=0,
            num_drafts=_increase("scheduler_drafts", load, last),
            num_draft_tokens=_increase("scheduler_draft_tokens", load, last),
            num_accepted_tokens=_increase("scheduler_accepted_tokens", load, last),
            num_accepted_tokens_per_pos=_increases("scheduler_accepted_tokens_per_pos", load, last),
        ),
    )


def _increase(name: str, load: Load, last: Load | None) -> int:
    total = load.counters.get(name, 0.0)
    before = last.counters.get(name, 0.0) if last is not None else 0.0
    return int(total - before if total >= before else total)  # a smaller total is that of a rank started anew


def _increases(name: str, load: Load, last: Load | None) -> list[int]:
    """Of totals whose names end with places, by place."""
    places = [int(key.partition("/")[2]) for key in load.counters if key.startswith(f"{name}/")]
    return [_increase(f"{name}/{place}", load, last) for place in range(max(places, default=-1) + 1)]


def histograms() -> tuple[Histogram, Histogram]:
    """vLLM's times to the first token, and between tokens, of all ranks together."""
    return _histogram("vllm:time_to_first_token_seconds"), _histogram("vllm:inter_token_latency_seconds")


def _histogram(name: str) -> Histogram:
    """A histogram that is registered, over all its labels; empty if it is not."""
    buckets: dict[float, float] = {}
    count = total = 0.0
    for metric in REGISTRY.restricted_registry([f"{name}{end}" for end in ("_bucket", "_count", "_sum")]).collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_count"):
                count += sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
    bounds = sorted(bound for bound in buckets if bound != float("inf"))
    return Histogram(bounds, [buckets[bound] for bound in bounds], count, total)


class BusCollector(Collector):
    """Exports the engine's own counters under ``rankbus_``."""

    def __init__(self, status: EngineStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        status = self._status
        families = _Families()
        families.gauge("ready", {}, float(status.last.ready))
        families.counters("frontend", {"frontend": str(status.frontend)}, status.last.counters)
        if status.exports_ranks:
            families.gauge("ranks_up", {}, len(status.last.loads))
            for rank, load in status.last.loads.items():
                labels = {"rank": str(rank)}
                families.counters("rank", labels, load.counters)
                for name in ("running", "waiting", "pending_prefill_tokens", "used_blocks", "num_blocks", "draining"):
                    families.gauge(f"rank_{name}", labels, float(getattr(load, name)))
            if (executor := status.last.executor) is not None:
                families.counters("executor", {}, executor.counters)
        return families.metrics()


class _Families:
    """Metric families by name, each made when its first sample comes."""

    def __init__(self) -> None:
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def gauge(self, name: str, labels: Mapping[str, str], value: float) -> None:
        family = self._families.get(name)
        if family is None:
            family = GaugeMetricFamily(f"rankbus_{name}", name.replace("_", " "), labels=list(labels))
            self._families[name] = family
        family.add_metric(list(labels.values()), value)

    def counters(self, role: str, labels: Mapping[str, str], totals: Mapping[str, float]) -> None:
        """Add all counters of one process. Those of the buses are one family, whatever the role of the process."""
        for key, total in totals.items():
            name, *values = key.split("/")
            names = LABELS.get(name) or [f"kind{number}" for number in range(len(values))]
            own = dict(zip(names, values, strict=True))
            if name in GAUGES:
                self.gauge(f"{role}_{name.removeprefix(f'{role}_')}", dict(labels), total)
                continue
            if name.startswith("bus_"):
                all_labels = {"process": "/".join([role, *labels.values()])} | own
            else:
                name = f"{role}_{name.removeprefix(f'{role}_')}"
                all_labels = dict(labels) | own
            family = self._families.get(name)
            if family is None:
                family = CounterMetricFamily(f"rankbus_{name}", name.replace("_", " "), labels=list(all_labels))
                self._families[name] = family
            family.add_metric(list(all_labels.values()), total)

    def metrics(self) -> Iterable[Metric]:
        return self._families.values()
