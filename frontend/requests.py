"""Requests on their way: given to ranks, and their output to whoever asked."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from bus.core import Effect, Peer, Send
from bus.counters import Counters
from bus.messages import (
    EMPTY,
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
    TokenDeltas,
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
        return self._end(peer.index, "unavailable", f"rank {peer.index} was lost; send the request again")

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
        news = _News(rank, outputs.step)
        for item in outputs.started:
            if (entry := self._known(item.handle, rank)) is not None:
                entry.cached_tokens = item.cached_tokens
                news.start(entry, item)
        logprobs = {item.owner: item for item in outputs.logprobs}
        for handle, tokens in zip(handles, split_by_counts(outputs.tokens, counts, len(handles)), strict=True):
            if (entry := self._known(handle, rank)) is not None:
                entry.output += tokens
                news.add(entry, tokens, logprobs.get(handle))
        self._counters.add("output_tokens", outputs.tokens.nbytes // 4)
        for ended in outputs.ended:
            if (entry := self._known(ended.handle, rank)) is not None:
                self._finish(entry, ended, news)
        return news.effects()

    def _known(self, handle: int, rank: int) -> Entry | None:
        entry = self.ledger.get(handle)
        if entry is None or entry.rank != rank:
            self._counters.add("late_outputs")
            return None
        return entry

    def _finish(self, entry: Entry, ended: RequestEnded, news: "_News") -> None:
        self.ledger.remove(entry)
        self._counters.add(f"requests_ended/{ended.reason}")
        news.end(entry, ended)

    def _end(self, rank: int, code: str, sentence: str) -> list[Effect]:
        """End a rank's sequences with an error of this frontend's own."""
        news = _News(rank)
        for entry in self.ledger.of_rank(rank):
            self._finish(entry, RequestEnded(handle=entry.handle, reason="error", code=code, message=sentence), news)
        return news.effects()


class _Batch:
    """Tokens of several requests for one client, on their way into one message."""

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._indices: list[int] = []
        self._tokens: list[Ints] = []

    def add(self, entry: Entry, tokens: Ints) -> None:
        self._request_ids.append(entry.request_id)
        self._indices.append(entry.index)
        self._tokens.append(tokens)

    def message(self) -> TokenDeltas:
        counts = [tokens.nbytes // 4 for tokens in self._tokens]
        return TokenDeltas(
            request_ids=self._request_ids,
            tokens=memoryview(b"".join(self._tokens)),
            counts=pack_ints(counts) if set(counts) != {1} else EMPTY,
            indices=pack_ints(self._indices) if any(self._indices) else EMPTY,
        )


class _News:
    """What one step of a rank gave the HTTP side's requests and the clients', sorted by whom it is for."""

    def __init__(self, rank: int, step: int = 0) -> None:
        self._rank = rank
        self._step = step
        self._batches: dict[Peer, _Batch] = {}
        self._messages: list[Effect] = []
        self._deliveries: dict[int, Delivery] = {}

    def start(self, entry: Entry, started: RequestStarted) -> None:
        if entry.wanted and entry.owner is None:
            self._deliver(entry, started=started)

    def add(self, entry: Entry, tokens: Ints, logprobs: Logprobs | None) -> None:
        if not entry.wanted:
            return
        if entry.owner is None:
            self._deliver(entry, token_ids=tokens, logprobs=logprobs)
        elif logprobs is None:
            batch = self._batches.get(entry.owner)
            if batch is None:
                batch = self._batches[entry.owner] = _Batch()
            batch.add(entry, tokens)
        else:
            own = structs.replace(logprobs, owner=entry.index)
            delta = Delta(request_id=entry.request_id, index=entry.index, token_ids=tokens, logprobs=own)
            self._messages.append(Send(entry.owner, delta))

    def end(self, entry: Entry, ended: RequestEnded) -> None:
        if not entry.wanted:
            return
        if entry.owner is None:
            self._deliver(entry, ended=ended)
        else:
            self._messages.append(Send(entry.owner, _finished(entry, ended)))

    def effects(self) -> list[Effect]:
        """The messages and the delivery, tokens before ends."""
        effects: list[Effect] = [Send(owner, batch.message()) for owner, batch in self._batches.items()]
        effects += self._messages
        if self._deliveries:
            effects.append(Deliver(self._rank, list(self._deliveries.values()), self._step))
        return effects

    def _deliver(self, entry: Entry, **fields: Any) -> None:
        delivery = self._deliveries.get(entry.handle)
        if delivery is None:
            delivery = Delivery(entry.request_id, EMPTY, None, None, None)
        self._deliveries[entry.handle] = structs.replace(delivery, **fields)


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
