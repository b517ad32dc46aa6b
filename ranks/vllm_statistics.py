"""vLLM's scheduler statistics as plain numbers, added up since they were last asked for."""

from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from ranks.statistics import DraftCounts

_PREFIX = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")


class Statistics:
    """Counts of what vLLM reports at every step, and of draft tokens, for which it wants a fixed number per step."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._prefix = dict.fromkeys(_PREFIX, 0)
        self.drafts = DraftCounts()
        self._preemptions = 0

    def take_step(self, stats: SchedulerStats) -> None:
        """Add what vLLM handed out (and has cleared on its side)."""
        for name in _PREFIX:
            self._prefix[name] += getattr(stats.prefix_cache_stats, name)

    def take_preemption(self) -> None:
        self._preemptions += 1

    def report(self, stats: SchedulerStats) -> dict[str, Any]:
        """Everything since the last report, with what `stats` has on top."""
        self.take_step(stats)
        report = {
            "num_running_reqs": stats.num_running_reqs,
            "num_waiting_reqs": stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            "kv_cache_usage": stats.kv_cache_usage,
            "num_preemptions": self._preemptions,
            "prefix_cache_stats": self._prefix,
            "spec_decoding_stats": self.drafts.report(),
            "kv_connector_stats": None,
        }
        self._clear()
        return report
