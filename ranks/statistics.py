"""What a rank's scheduler counts: totals for metrics, and what `MakeStats` answers with, under vLLM's names."""

from typing import Any

from bus.counters import Counters
from ranks.request import Request


class DraftCounts:
    """What became of drafts, also by their places: the first after a row's last token, the second, and so on."""

    def __init__(self) -> None:
        self._counts = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        self._tried: list[int] = []
        self._accepted: list[int] = []

    def take(self, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts have been judged."""
        self._counts["num_drafts"] += 1
        self._counts["num_draft_tokens"] += num_drafts
        self._counts["num_accepted_tokens"] += num_accepted
        for places, count in ((self._tried, num_drafts), (self._accepted, num_accepted)):
            places.extend([0] * (num_drafts - len(places)))
            for place in range(count):
                places[place] += 1

    def report(self) -> dict[str, Any] | None:
        """All that was taken; None if that is nothing."""
        if not self._counts["num_drafts"]:
            return None
        per_place = {"num_accepted_tokens_per_pos": self._accepted, "num_draft_tokens_per_pos": self._tried}
        return self._counts | per_place


class Statistics:
    """Counts since the last report. Totals go to the process's counters as well."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._clear()

    def _clear(self) -> None:
        self._fresh = [0, 0, 0]
        self._again = [0, 0, 0]
        self._drafts = DraftCounts()
        self._preemptions = 0

    def scheduled(self, num_tokens: int) -> None:
        """A step was made."""
        self._counters.add("scheduler_steps")
        self._counters.add("scheduler_scheduled_tokens", num_tokens)

    def steady(self, num_steps: int, num_rows: int) -> None:
        """Steps were made that gave each of as many rows a token."""
        self._counters.add("scheduler_steps", num_steps)
        self._counters.add("scheduler_scheduled_tokens", num_steps * num_rows)
        self.generated(num_steps * num_rows, 0)

    def started(self, num_prompt: int, num_cached: int) -> None:
        """Requests have got their first rows: so many tokens have their prompts, and of these so many were cached."""
        self._counters.add("scheduler_prompt_tokens", num_prompt)
        self._counters.add("scheduler_cached_prompt_tokens", num_cached)

    def looked_up(self, request: Request, num_cached: int) -> None:
        """A request that enters a row has asked the prefix cache for all its tokens, and found `num_cached`."""
        counts = self._again if request.num_preemptions else self._fresh
        counts[0] += 1
        counts[1] += request.tokens.size
        counts[2] += num_cached

    def preempted(self) -> None:
        """A request has lost its row."""
        self._counters.add("scheduler_preemptions")
        self._preemptions += 1

    def drafted(self, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts have been judged."""
        self._counters.add("scheduler_drafts")
        self._counters.add("scheduler_draft_tokens", num_drafts)
        self._counters.add("scheduler_accepted_tokens", num_accepted)
        for place in range(num_drafts):
            self._counters.add(f"scheduler_draft_tokens_per_pos/{place}")
        for place in range(num_accepted):
            self._counters.add(f"scheduler_accepted_tokens_per_pos/{place}")
        self._drafts.take(num_drafts, num_accepted)

    def generated(self, num_delivered: int, num_dropped: int) -> None:
        """A step's tokens have come; those dropped were for requests that had left their rows."""
        self._counters.add("scheduler_generated_tokens", num_delivered)
        self._counters.add("scheduler_dropped_tokens", num_dropped)

    def turn_ended(self) -> None:
        """A session's turn has ended."""
        self._counters.add("scheduler_turns")

    def turn_continued(self) -> None:
        """A session's turn goes on in the row of the one before."""
        self._counters.add("scheduler_continued_turns")

    def idle_sessions(self, number: int) -> None:
        """So many sessions wait for input now."""
        self._counters.set("scheduler_idle_sessions", number)

    def reclaimed(self) -> None:
        """A session that had no row has lost blocks to others."""
        self._counters.add("scheduler_reclaimed_sessions")

    def not_a_number(self) -> None:
        """A request's logits were not numbers."""
        self._counters.add("scheduler_nan_requests")

    def report(self, running: int, waiting: int, kv_usage: float) -> dict[str, Any]:
        """Everything since the last report."""
        requests, queries, hits = self._fresh
        again_requests, again_queries, again_hits = self._again
        report = {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "kv_cache_usage": kv_usage,
            "num_preemptions": self._preemptions,
            "prefix_cache_stats": {
                "requests": requests,
                "queries": queries,
                "hits": hits,
                "preempted_requests": again_requests,
                "preempted_queries": again_queries,
                "preempted_hits": again_hits,
            },
            "spec_decoding_stats": self._drafts.report(),
            "kv_connector_stats": None,
        }
        self._clear()
        return report
