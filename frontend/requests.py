"""Requests on their way: given to ranks, and their output to whoever asked."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import structs

from bus.core import Effect, Peer, Send
from bus.counters import Counters
from bus.messages import (
    EMPTY,
    AbortRequests,
    AddRequest,
    AppendInput,
    Delta,
    Embedding,
    Finished,
    Floats,
    Ints,
    Logprobs,
    MultimodalFeature,
    Outputs,
    RequestEnded,
    RequestStarted,
    Sampling,
    StopTurn,
    TokenDeltas,
    TurnEnded,
    TurnFinished,
)
from bus.prefix import block_hashes
from bus.wire import pack_ints, unpack_ints
from frontend.ledger import Entry, Ledger, split_by_counts
from frontend.routing import Router
from frontend.seam import Deliver, Delivery
from frontend.session import Input, Session
from frontend.steady import SteadyOutputs, is_plain


class Turns(Protocol):
    """Who is told what becomes of sessions: `frontend.sessions.Sessions`."""

    def turn_ended(self, entry: Entry, ended: TurnEnded, news: "News") -> list[Effect]:
        """A turn has ended, and all its tokens are in `entry`. The effects come after those of `news`."""
        ...

    def ended(self, entry: Entry, ended: RequestEnded, news: "News") -> list[Effect]:
        """A session has ended. The effects come after those of `news`."""
        ...


class Requests:
    """Routes requests to ranks and their output back. The ranks that are up are told by `rank_up` and `rank_down`."""

    def __init__(self, router: Router, block_size: int, counters: Counters) -> None:
        self._router = router
        self._block_size = block_size
        self._counters = counters
        self._ranks: dict[int, Peer] = {}
        self._steady: dict[int, SteadyOutputs] = {}
        """Of each rank that is up."""
        self.ledger = Ledger()

    @property
    def ranks(self) -> Mapping[int, Peer]:
        """The ranks that are up."""
        return self._ranks

    def rank_up(self, peer: Peer) -> None:
        """Use a rank from now on."""
        self._ranks[peer.index] = peer
        self._steady[peer.index] = SteadyOutputs(peer.index, self.ledger)

    def rank_down(self, peer: Peer, turns: Turns) -> list[Effect]:
        """Stop using a rank, and end its requests."""
        self._ranks.pop(peer.index, None)
        if (steady := self._steady.pop(peer.index, None)) is not None:
            steady.leave()
        return self._end(peer.index, "unavailable", f"rank {peer.index} was lost; send the request again", turns)

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
        features: list[MultimodalFeature],
        adapter: str,
    ) -> list[Effect]:
        """Start one sequence per element of `samplings`, all with the same prompt, numbered in that order.

        `adapter` is the identity of an adapter, or empty.

        Raises:
            Unroutable: no rank can take them; nothing was started.
        """
        hashes = block_hashes(prompt_token_ids, self._block_size, cache_salt, adapter=adapter)
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
                mm_features=features,
                adapter=adapter,
            )
            effects.append(Send(self._ranks[rank], message))
            self._counters.add("requests_started")
        return effects

    def open_session(self, session: Session, first: Input) -> Effect:
        """Start a session with its first turn.

        Raises:
            Unroutable: no rank can take it; nothing was started.
        """
        prompt = first.tokens
        assert prompt is not None
        request = session.request
        hashes = block_hashes(prompt, self._block_size, request.cache_salt, adapter=session.adapter)
        rank, to_prefill = self._router.choose(first.length, hashes, request.rank)
        bus, index = session.client
        owner = None if session.over_seam else session.peer or Peer(bus, "client", index, 0)
        handle = self.ledger.new_handle()
        entry = Entry(handle, owner, session.delivery, 0, rank, prompt, session.sampling, session=session)
        entry.wanted = session.over_seam or session.peer is not None
        self.ledger.add(entry)
        session.entry = entry
        first.sequence = self._router.ranks[rank].place(to_prefill)
        message = AddRequest(
            handle=handle,
            sequence=first.sequence,
            request_id=session.delivery,
            prompt_token_ids=prompt,
            sampling=session.sampling,
            arrival_time=session.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            block_hashes=memoryview(hashes),
            resumable=True,
            mm_features=first.features,
            adapter=session.adapter,
        )
        self._counters.add("sessions_started")
        return Send(self._ranks[rank], message)

    def append(self, entry: Entry, one: Input) -> Effect:
        """Give a session's rank an input, or its close."""
        assert one.tokens is not None
        one.sequence = self._router.ranks[entry.rank].place(one.length)
        message = AppendInput(
            handle=entry.handle,
            sequence=one.sequence,
            prompt_token_ids=one.tokens,
            sampling=one.sampling,
            close=one.close,
            mm_features=one.features,
        )
        return Send(self._ranks[entry.rank], message)

    def stop_turn(self, entry: Entry, turn: int, n: int) -> Effect:
        """Have a session's rank stop a turn, and keep `n` tokens of its output."""
        sequence = self._router.ranks[entry.rank].place(0)
        return Send(self._ranks[entry.rank], StopTurn(handle=entry.handle, sequence=sequence, turn=turn, n=n))

    def abort(self, entries: list[Entry], wanted: bool) -> list[Effect]:
        """Ask the ranks to end these sequences. If not `wanted`, what still comes of them is dropped."""
        by_rank: dict[int, list[int]] = defaultdict(list)
        for entry in entries:
            entry.on_its_own()
            entry.wanted = entry.wanted and wanted
            by_rank[entry.rank].append(entry.handle)
        return [
            Send(self._ranks[rank], AbortRequests(handles=pack_ints(handles)))
            for rank, handles in by_rank.items()
            if rank in self._ranks
        ]

    def outputs(self, rank: int, outputs: Outputs, turns: Turns) -> list[Effect]:
        """Pass a step's output on to whom it is for."""
        steady = self._steady.get(rank)
        if steady is not None and outputs.handles.nbytes:
            if self._is_steady(outputs) and (effects := steady.take(outputs)) is not None:
                self._counters.add("output_tokens", outputs.tokens.nbytes // 4)
                if outputs.started or outputs.ended:
                    news = News(rank, outputs.step)
                    after = self._begin_and_end(rank, outputs, news, turns)
                    effects += [*news.effects(), *after]
                return effects
            steady.leave()
        handles = unpack_ints(outputs.handles).tolist()
        counts = unpack_ints(outputs.counts) if outputs.counts.nbytes else None
        if counts is not None and ((counts < 0).any() or int(counts.sum()) * 4 != outputs.tokens.nbytes):
            self._counters.add("invalid_outputs")
            return []
        news = News(rank, outputs.step)
        logprobs = {item.owner: item for item in outputs.logprobs if not item.prompt_position}
        for item in outputs.logprobs:
            if item.prompt_position and (entry := self._known(item.owner, rank)) is not None:
                news.add_prompt(entry, item)
        for handle, tokens in zip(handles, split_by_counts(outputs.tokens, counts, len(handles)), strict=True):
            if (entry := self._known(handle, rank)) is not None:
                entry.add_output(tokens)
                news.add(entry, tokens, logprobs.get(handle))
        for pooled in outputs.pooled:
            if (entry := self._known(pooled.owner, rank)) is not None:
                news.pool(entry, pooled.vector)
        self._counters.add("output_tokens", outputs.tokens.nbytes // 4)
        after = self._begin_and_end(rank, outputs, news, turns)
        return [*news.effects(), *after]

    def _is_steady(self, outputs: Outputs) -> bool:
        """Whether clients' sequences alone begin or end, and there is one token for each sequence."""
        changed = [item.handle for item in outputs.started] + [item.handle for item in outputs.ended]
        return is_plain(outputs) and all(
            (entry := self.ledger.get(handle)) is not None and entry.owner is not None and entry.session is None
            for handle in changed
        )

    def _begin_and_end(self, rank: int, outputs: Outputs, news: "News", turns: Turns) -> list[Effect]:
        """Note what else has happened to sequences; the effects come after those of `news`."""
        for item in outputs.started:
            if (entry := self._known(item.handle, rank)) is not None:
                entry.cached_tokens = item.cached_tokens
                news.start(entry, item)
        after: list[Effect] = []
        for turn in outputs.turns:
            if (entry := self._known(turn.handle, rank)) is not None and entry.session is not None:
                after += turns.turn_ended(entry, turn, news)
        for ended in outputs.ended:
            if (entry := self._known(ended.handle, rank)) is not None:
                after += self._finish(entry, ended, news, turns)
        return after

    def _known(self, handle: int, rank: int) -> Entry | None:
        entry = self.ledger.get(handle)
        if entry is None or entry.rank != rank:
            self._counters.add("late_outputs")
            return None
        return entry

    def _finish(self, entry: Entry, ended: RequestEnded, news: "News", turns: Turns) -> list[Effect]:
        if entry.session is not None:
            entry.on_its_own()
            self.ledger.remove(entry)
            self._counters.add(f"sessions_ended/{ended.reason}")
            return turns.ended(entry, ended, news)
        news.end(entry, ended)
        if entry.steady is not None:
            entry.steady.remove(entry)
        self.ledger.remove(entry)
        self._counters.add(f"requests_ended/{ended.reason}")
        return []

    def _end(self, rank: int, code: str, sentence: str, turns: Turns) -> list[Effect]:
        """End a rank's sequences with an error of this frontend's own."""
        news = News(rank)
        after: list[Effect] = []
        for entry in self.ledger.of_rank(rank):
            ended = RequestEnded(handle=entry.handle, reason="error", code=code, message=sentence)
            after += self._finish(entry, ended, news, turns)
        return [*news.effects(), *after]


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


class News:
    """What one step of a rank gave the HTTP side's requests and the clients', sorted by whom it is for."""

    def __init__(self, rank: int, step: int = 0) -> None:
        self._rank = rank
        self._step = step
        self._prompts: list[Effect] = []
        self._batches: dict[Peer, _Batch] = {}
        self._messages: list[Effect] = []
        self._deliveries: dict[int, Delivery] = {}
        self._vectors: dict[int, Floats] = {}

    def start(self, entry: Entry, started: RequestStarted) -> None:
        if entry.wanted and entry.owner is None:
            self._deliver(entry, started=started)

    def add_prompt(self, entry: Entry, logprobs: Logprobs) -> None:
        """Deliver log-probabilities of a prompt, before its tokens."""
        if not entry.wanted:
            return
        if entry.owner is None:
            self._deliver(entry, prompt_logprobs=logprobs)
        else:
            self._prompts.append(Send(entry.owner, _delta(entry, EMPTY, logprobs)))

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
            self._messages.append(Send(entry.owner, _delta(entry, tokens, logprobs)))

    def pool(self, entry: Entry, vector: Floats) -> None:
        """Keep what a prompt was pooled to until its request ends, which it does in the same step."""
        self._vectors[entry.handle] = vector

    def end(self, entry: Entry, ended: RequestEnded) -> None:
        if not entry.wanted:
            return
        vector = self._vectors.get(entry.handle)
        if entry.owner is None:
            self._deliver(entry, ended=ended, vector=vector)
        elif vector is not None:
            self._messages.append(Send(entry.owner, _embedding(entry, vector)))
        else:
            self._messages.append(Send(entry.owner, _finished(entry, ended)))

    def tell(self, entry: Entry, message: TurnFinished | Finished) -> None:
        """Deliver the end of a turn, or of a session, after its tokens."""
        delivery = self._deliveries.get(entry.handle)
        before = delivery.messages if delivery is not None else ()
        self._deliver(entry, messages=(*before, message))

    def effects(self) -> list[Effect]:
        """The messages and the delivery, prompts before tokens before ends."""
        effects = [*self._prompts, *(Send(owner, batch.message()) for owner, batch in self._batches.items())]
        effects += self._messages
        if self._deliveries:
            effects.append(Deliver(self._rank, list(self._deliveries.values()), self._step))
        return effects

    def _deliver(self, entry: Entry, **fields: Any) -> None:
        delivery = self._deliveries.get(entry.handle)
        if delivery is None:
            delivery = Delivery(entry.request_id, EMPTY, None, None, None)
        self._deliveries[entry.handle] = structs.replace(delivery, **fields)


def _delta(entry: Entry, tokens: Ints, logprobs: Logprobs) -> Delta:
    own = structs.replace(logprobs, owner=entry.index)
    return Delta(request_id=entry.request_id, index=entry.index, token_ids=tokens, logprobs=own)


def _embedding(entry: Entry, vector: Floats) -> Embedding:
    return Embedding(
        request_id=entry.request_id,
        vector=vector,
        prompt_tokens=entry.num_prompt_tokens,
        cached_tokens=entry.cached_tokens,
    )


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
