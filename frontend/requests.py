"""Requests on their way: given to ranks, and their output to whoever asked."""

from collections import defaultdict
from collections.abc import Mapping

from bus.core import Effect, Peer, Send
from bus.counters import Counters
from bus.messages import (
    AbortRequests,
    AddRequest,
    Delta,
    Finished,
    Ints,
    Logprobs,
    Outputs,
    RequestEnded,
    RequestStarted,
    Sampling,
)
from bus.prefix import block_hashes
from bus.wire import pack_ints, unpack_ints
from frontend.ledger import Entry, Ledger, split_by_counts
from frontend.routing import Router
from frontend.seam import Deliver, Delivery


class Requests:
    """Routes requests to ranks and their output back. The ranks that are up are told by `rank_up` and `rank_down`."""

    def __init__(self, router: Router, block_size: int, counters: Counters) -> None:
        self._router = router
        self._block_size = block_size
        self._counters = counters
        self._ranks: dict[int, Peer] = {}
        self.ledger = Ledger()

    @property
    def ranks(self) -> Mapping[int, Peer]:
        """The ranks that are up."""
        return self._ranks

    def rank_up(self, peer: Peer) -> None:
        """Use a rank from now on."""
        self._ranks[peer.index] = peer

    def rank_down(self, peer: Peer) -> list[Effect]:
        """Stop using a rank, and end its requests."""
        self._ranks.pop(peer.index, None)
        return self._end(
            self.ledger.of_rank(peer.index), "unavailable", f"rank {peer.index} was lost; send the request again"
        )

    def add(
        self,
        owner: Peer | None,
        request_id: str,
        prompt_token_ids: Ints,
        samplings: list[Sampling],
        arrival_time: float,
        priority: int,
        cache_salt: str,
        pinned: int | None,
    ) -> list[Effect]:
        """Start one sequence per element of `samplings`, all with the same prompt, numbered in that order.

        Raises:
            Unroutable: no rank can take them; nothing was started.
        """
        hashes = block_hashes(prompt_token_ids, self._block_size, cache_salt)
        num_tokens = prompt_token_ids.nbytes // 4
        effects: list[Effect] = []
        for index, sampling in enumerate(samplings):
            rank, to_prefill = self._router.choose(num_tokens, hashes, pinned)
            handle = self.ledger.new_handle()
            self.ledger.add(Entry(handle, owner, request_id, index, rank, prompt_token_ids, sampling))
            message = AddRequest(
                handle=handle,
                sequence=self._router.ranks[rank].place(to_prefill),
                request_id=request_id if len(samplings) == 1 else f"{request_id}/{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                block_hashes=memoryview(hashes),
            )
            effects.append(Send(self._ranks[rank], message))
            self._counters.add("requests_started")
        return effects

    def abort(self, entries: list[Entry], wanted: bool) -> list[Effect]:
        """Ask the ranks to end these sequences. If not `wanted`, what still comes of them is dropped."""
        by_rank: dict[int, list[int]] = defaultdict(list)
        for entry in entries:
            entry.wanted = entry.wanted and wanted
            by_rank[entry.rank].append(entry.handle)
        return [
            Send(self._ranks[rank], AbortRequests(handles=pack_ints(handles)))
            for rank, handles in by_rank.items()
            if rank in self._ranks
        ]

    def outputs(self, rank: int, outputs: Outputs) -> list[Effect]:
        """Pass a step's output on to whom it is for."""
        handles = unpack_ints(outputs.handles).tolist()
        counts = unpack_ints(outputs.counts) if outputs.counts.nbytes else None
        if counts is not None and ((counts < 0).any() or int(counts.sum()) * 4 != outputs.tokens.nbytes):
            self._counters.add("invalid_outputs")
            return []
        tokens = dict(zip(handles, split_by_counts(outputs.tokens, counts, len(handles)), strict=True))
        started = {item.handle: item for item in outputs.started}
        ended = {item.handle: item for item in outputs.ended}
        logprobs = {item.owner: item for item in outputs.logprobs}
        deliveries: list[Delivery] = []
        effects: list[Effect] = []
        for handle in dict.fromkeys([*started, *handles, *ended]):
            entry = self.ledger.get(handle)
            if entry is None or entry.rank != rank:
                self._counters.add("late_outputs")
                continue
            new = tokens.get(handle, memoryview(b""))
            self._give(entry, new, logprobs.get(handle), started.get(handle), ended.get(handle), deliveries, effects)
        if deliveries:
            effects.append(Deliver(rank, deliveries))
        return effects

    def _give(
        self,
        entry: Entry,
        tokens: Ints,
        logprobs: Logprobs | None,
        started: RequestStarted | None,
        ended: RequestEnded | None,
        deliveries: list[Delivery],
        effects: list[Effect],
    ) -> None:
        """Record one sequence's news in the ledger, and add it to the deliveries or to a client's messages."""
        entry.output += tokens
        self._counters.add("output_tokens", tokens.nbytes // 4)
        if started is not None:
            entry.cached_tokens = started.cached_tokens
        if ended is not None:
            self.ledger.remove(entry)
            self._counters.add(f"requests_ended/{ended.reason}")
        if not entry.wanted:
            return
        if entry.owner is None:
            deliveries.append(Delivery(entry.request_id, tokens, logprobs, started, ended))
            return
        if tokens.nbytes:
            delta = Delta(request_id=entry.request_id, index=entry.index, token_ids=tokens, logprobs=logprobs)
            effects.append(Send(entry.owner, delta))
        if ended is not None:
            effects.append(Send(entry.owner, _finished(entry, ended)))

    def _end(self, entries: list[Entry], code: str, sentence: str) -> list[Effect]:
        """End sequences with an error of this frontend's own."""
        deliveries: list[Delivery] = []
        effects: list[Effect] = []
        for entry in entries:
            ended = RequestEnded(handle=entry.handle, reason="error", code=code, message=sentence)
            self._give(entry, memoryview(b""), None, None, ended, deliveries, effects)
        if deliveries:
            effects.append(Deliver(entries[0].rank, deliveries))
        return effects


def _finished(entry: Entry, ended: RequestEnded) -> Finished:
    return Finished(
        request_id=entry.request_id,
        index=entry.index,
        reason=ended.reason,
        stop_reason=ended.stop_reason,
        message=ended.message,
        prompt_tokens=entry.num_prompt_tokens,
        output_tokens=entry.num_output_tokens,
        cached_tokens=entry.cached_tokens,
    )
