"""vLLM's own metrics with the label ``rank``, each exported by one frontend only.

vLLM calls the index of a data-parallel engine ``engine``; here that is the rank. Dashboards made for vLLM find their
labels as ever.
"""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.perf import PerfMetricsProm
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from frontend.metrics import RankSchedulerStats

OF_RANKS = frozenset(
    {
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_queries",
        "vllm:prompt_tokens_cached_by_source",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_drafts",
    }
)
"""What is told of a rank as a whole, whichever frontend its requests came from. The rest is of a frontend's own."""


class _Ranked:
    """A metric of prometheus_client that has ``rank`` as its last label if it has ``engine``, with the same value."""

    exports_ranks = True

    def __init__(self, name: str, *args: Any, labelnames: Any = (), **options: Any) -> None:
        if "engine" in labelnames and "rank" not in labelnames:
            labelnames = [*labelnames, "rank"]
        if not self.exports_ranks and name in OF_RANKS:
            options["registry"] = None  # it can be set, and is exported nowhere
        super().__init__(name, *args, labelnames=labelnames, **options)  # type: ignore[call-arg]

    def labels(self, *values: Any, **named: Any) -> Any:
        names = self._labelnames  # type: ignore[attr-defined]
        if "engine" in named:
            named["rank"] = named["engine"]
        elif values and names[-1] == "rank" and len(values) == len(names) - 1:
            values = (*values, values[names.index("engine")])
        return super().labels(*values, **named)  # type: ignore[misc]


class _Gauge(_Ranked, Gauge):
    pass


class _Counter(_Ranked, Counter):
    pass


class _Histogram(_Ranked, Histogram):
    pass


class _Estimates(PerfMetricsProm):
    _counter_cls = _Counter


class _Drafts:
    """What became of drafts, under vLLM's names. vLLM's own class asks its configuration, which knows of none."""

    _counter_cls: type[_Counter] = _Counter

    def __init__(
        self, _: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]], **__: Any
    ) -> None:
        self._drafts, self._tokens, self._accepted = (
            create_metric_per_engine(
                self._counter_cls(f"vllm:spec_decode_{name}", documentation, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, documentation in (
                ("num_drafts", "Number of times that a request had drafts."),
                ("num_draft_tokens", "Number of draft tokens."),
                ("num_accepted_tokens", "Number of draft tokens that were right."),
            )
        )

        self._labels = per_engine_labelvalues
        self._accepted_per_pos = self._counter_cls(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of draft tokens that were right, by their place among those of a request in a step, from 0.",
            labelnames=[*labelnames, "position"],
        )

    def observe(self, stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count what a rank tells."""
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted_per_pos.labels(*self._labels[engine_idx], str(position)).inc(count)
        self._drafts[engine_idx].inc(stats.num_drafts)
        self._tokens[engine_idx].inc(stats.num_draft_tokens)
        self._accepted[engine_idx].inc(stats.num_accepted_tokens)


class RankLogger(PrometheusStatLogger):
    """vLLM's metrics at the frontend that exports those of the ranks."""

    _gauge_cls = _Gauge
    _counter_cls = _Counter
    _histogram_cls = _Histogram
    _perf_metrics_cls = _Estimates
    _spec_decoding_cls = _Drafts

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take a rank's statistics, its preemptions too: vLLM counts those by outputs, which have no word of them."""
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if isinstance(scheduler_stats, RankSchedulerStats):
            self.counter_num_preempted_reqs[engine_idx].inc(scheduler_stats.preemptions)


class _OwnGauge(_Gauge):
    exports_ranks = False


class _OwnCounter(_Counter):
    exports_ranks = False


class _OwnDrafts(_Drafts):
    _counter_cls = _OwnCounter


class OwnLogger(PrometheusStatLogger):
    """vLLM's metrics at another frontend: of its own requests only."""

    _gauge_cls = _OwnGauge
    _counter_cls = _OwnCounter
    _histogram_cls = _Histogram
    _perf_metrics_cls = _Estimates
    _spec_decoding_cls = _OwnDrafts
