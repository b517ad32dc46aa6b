"""The frontend's state machine: what lies below vLLM's EngineCoreClient seam, plus the client bus.

It routes requests to ranks, keeps the ledger of those it answers for, passes output on, and folds the ranks' answers
to commands. It knows nothing of text: what needs a tokenizer goes up over the seam (`RenderText`).
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from msgspec import structs

from bus.config import Config
from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick
from bus.counters import Counters
from bus.messages import (
    Abort,
    Append,
    CommandRequest,
    ComputedBlocks,
    Embed,
    EndTurn,
    Error,
    ExecutorStatus,
    Finished,
    Generate,
    Ints,
    KvEvents,
    ListAdapters,
    Load,
    Message,
    MultimodalFeature,
    Outputs,
    Pooling,
    Reply,
    RequestEnded,
    Sampling,
    Shutdown,
)
from bus.sampling import pooled
from bus.wire import pack_ints, unpack_ints
from frontend.adapters import Adapters
from frontend.commands import EXECUTOR, FOR_EXECUTOR, Commands, answer
from frontend.gathering import Gathering
from frontend.params import BadRequest, ModelLimits, Samplings, check_features, check_prompt
from frontend.requests import Requests
from frontend.routing import RankView, Router, Unroutable
from frontend.seam import (
    AbortCall,
    AbortText,
    AddCall,
    Call,
    CommandCall,
    ConnectionClosed,
    Deliver,
    Delivery,
    Detokenised,
    InputRendered,
    RenderText,
    SessionCall,
    SessionOutput,
    StatusUpdate,
    TextOutput,
    TextRefused,
    TextRendered,
)
from frontend.sessions import CONNECTIONS, Sessions, to_client

_OF_READINESS = frozenset((Load, ExecutorStatus))
"""Messages that may change whether the engine is ready."""


class FrontendCore:
    """Pure state machine of one frontend; see `bus.core.Core`."""

    def __init__(self, index: int, config: Config, limits: ModelLimits, seed_key: bytes) -> None:
        """`index` is this frontend's number, `limits` what the model allows.

        `seed_key` is random bytes of this start, from which seeds of unseeded requests are derived.
        """
        self._limits = limits
        self._samplings = Samplings()
        self._by_priority = config.policy == "priority"
        self._pooling = config.pooling
        self._seed_key = seed_key
        self._seeds_drawn = 0
        self._counters = Counters()
        self._router = Router(config.routing, index, config.block_size, config.max_num_seqs)
        self._requests = Requests(self._router, config.block_size, self._counters)
        self._sessions = Sessions(self._requests, self._counters, limits, self._draw_seed, config.session_idle_s)
        self._commands = Commands(config.command_deadline_s)
        self._adapters = Adapters()
        self._gathering = Gathering(config.max_message_bytes)
        self._executor: Peer | None = None
        self._executor_status: ExecutorStatus | None = None
        self._text_requests: dict[tuple[Peer, str], int] = {}  # children that have not finished
        self._was_ready = False
        self._shutting_down: tuple[Peer | None, int] | None = None
        self._now = 0.0
        self._wall = 0.0
        self._bus_counters: dict[str, float] = {}
        self._on_message: dict[type[Message], Callable[[Peer, Any], list[Effect]]] = {
            Outputs: self._outputs,
            Load: self._load,
            KvEvents: self._kv_events,
            ExecutorStatus: self._status_of_executor,
            Reply: self._reply,
            Generate: self._start,
            Embed: self._start,
            Abort: self._abort,
            CommandRequest: self._client_command,
            Append: self._sessions.append,
            EndTurn: self._sessions.end_turn,
            Error: self._error,
        }

    def handle(self, event: Event) -> list[Effect]:
        """Take the next event; return what is to be done, in order."""
        if isinstance(event, Received):
            effects = self._gathering.take(self._receive(event.peer, event.message))
            if type(event.message) not in _OF_READINESS:
                return effects
        elif isinstance(event, Posted):
            effects = self._gathering.take(self._call(event.value))
        elif isinstance(event, Drained):
            self._now = event.now
            return self._gathering.release()
        elif isinstance(event, PeerUp):
            self._gathering.peer_up(event.peer, event.minor)
            effects = [*self._gathering.release(), *self._peer_up(event.peer)]
        elif isinstance(event, PeerDown):
            self._gathering.peer_down(event.peer)
            effects = [*self._gathering.release(), *self._peer_down(event.peer)]
        else:
            effects = [*self._gathering.release(), *self._tick(event)]
        if self._is_ready() != self._was_ready:
            self._was_ready = not self._was_ready
            effects.append(self._status())
        return effects

    # Peers

    def _peer_up(self, peer: Peer) -> list[Effect]:
        if peer.role == "rank":
            self._router.ranks[peer.index] = RankView()
            self._requests.rank_up(peer)
        elif peer.role == "executor":
            self._executor = peer
        else:
            return self._sessions.client_up(peer)
        return []

    def _peer_down(self, peer: Peer) -> list[Effect]:
        if peer.role == "rank":
            self._router.ranks.pop(peer.index, None)
            return [*self._requests.rank_down(peer, self._sessions), *self._commands.rank_lost(peer.index)]
        if peer.role == "executor":
            self._executor = self._executor_status = None
            self._adapters.executor_lost()
            return self._commands.rank_lost(EXECUTOR)
        self._commands.asker_lost(peer)
        texts = [key for key in self._text_requests if key[0] == peer]
        for key in texts:
            del self._text_requests[key]
        entries = [entry for entry in self._requests.ledger.of_owner(peer) if entry.session is None]
        return [
            *(AbortText(*key) for key in texts),
            *self._requests.abort(entries, wanted=False),
            *self._sessions.client_down(peer, self._now),
        ]

    def _tick(self, tick: Tick) -> list[Effect]:
        self._now, self._wall, self._bus_counters = tick.now, tick.wall, tick.bus_counters
        return [*self._commands.expire(tick.now), *self._sessions.expire(tick.now), self._status()]

    def _is_ready(self) -> bool:
        return self._executor_status is not None and any(view.available for view in self._router.ranks.values())

    def _status(self) -> StatusUpdate:
        loads = {rank: view.load for rank, view in sorted(self._router.ranks.items()) if view.load is not None}
        own = self._counters.snapshot() | {
            "unfinished_requests": len(self._requests.ledger) - self._sessions.waiting,
            "unfinished_text_requests": len(self._text_requests),
            "sessions": len(self._sessions),
        }
        executor = self._executor_status
        if executor is not None:
            executor = structs.replace(executor, adapters=self._adapters.known)
        return StatusUpdate(self._is_ready(), loads, executor, self._bus_counters | own)

    # Messages

    def _receive(self, peer: Peer, message: Message) -> list[Effect]:
        take = self._on_message.get(type(message))
        return [] if take is None else take(peer, message)

    def _outputs(self, peer: Peer, outputs: Outputs) -> list[Effect]:
        return self._requests.outputs(peer.index, outputs, self._sessions)

    def _load(self, peer: Peer, load: Load) -> list[Effect]:
        self._router.ranks[peer.index].see_load(load)
        return []

    def _kv_events(self, peer: Peer, events: KvEvents) -> list[Effect]:
        self._router.ranks[peer.index].see_kv_events(events)
        return []

    def _status_of_executor(self, peer: Peer, status: ExecutorStatus) -> list[Effect]:
        self._executor_status = status
        room = min(self._limits.max_model_len, status.max_model_len)
        self._limits = self._sessions.limits = replace(self._limits, max_model_len=room)
        known = self._adapters.known
        effects = self._adapters.see(peer, status)
        return effects if self._adapters.known == known else [*effects, self._status()]

    def _reply(self, peer: Peer, reply: Reply) -> list[Effect]:
        if self._adapters.answered(reply.command_id, loaded=True):
            return []
        return self._commands.replied(_number(peer), reply)

    def _client_command(self, peer: Peer, request: CommandRequest) -> list[Effect]:
        return self._command((peer, request.command_id), request)

    def _error(self, peer: Peer, error: Error) -> list[Effect]:
        self._counters.add(f"errors_received/{peer.role}")
        if error.command_id and peer.role != "client":
            known = self._adapters.answered(error.command_id, loaded=False)
            return [] if known else self._commands.failed(_number(peer), error)
        if peer.role != "rank":
            return []
        entry = self._requests.ledger.get(error.handle)
        if entry is not None and entry.session is not None and entry.rank == peer.index:
            return self._sessions.refused(entry, error)
        return []

    def _start(self, peer: Peer, request: Generate | Embed) -> list[Effect]:
        try:
            self._check_new(peer, request)
            adapter = self._adapters.identity(request.adapter)
            if isinstance(request, Embed):
                return self._embed(peer, request, adapter)
            return self._generate(peer, request, adapter)
        except BadRequest as error:
            code, sentence = "invalid", str(error)
        except Unroutable as error:
            code, sentence = "unavailable", str(error)
        self._counters.add(f"requests_refused/{code}")
        turn = 1 if isinstance(request, Generate) and request.resumable else 0
        return [to_client(peer, Error(code=code, message=sentence, request_id=request.request_id, turn=turn))]

    def _generate(self, peer: Peer, request: Generate, adapter: str) -> list[Effect]:
        if request.resumable:
            return self._sessions.open(peer, request, adapter, self._wall)
        if request.text_output or request.prompt_token_ids is None:
            return self._as_text(peer, request)
        prompt = self._checked(request.prompt_token_ids, room=1)
        num_tokens = prompt.nbytes // 4
        check_features(request.mm_features, num_tokens)
        seed = self._draw_seed() if request.params.seed is None else request.params.seed
        samplings = [
            self._samplings.make(request.params, num_tokens, self._limits, self._child_seed(seed, index))
            for index in range(request.num_sequences)
        ]
        return self._add_tokens(peer, request, prompt, samplings, request.mm_features, adapter)

    def _embed(self, peer: Peer, request: Embed, adapter: str) -> list[Effect]:
        if request.prompt_token_ids is None:
            return self._as_text(peer, request)
        prompt = self._checked(request.prompt_token_ids, room=0)
        pooling = Pooling(kind=request.pooling or self._pooling, normalize=request.normalize)
        return self._add_tokens(peer, request, prompt, [pooled(pooling)], [], adapter)

    def _as_text(self, peer: Peer, request: Generate | Embed) -> list[Effect]:
        self._text_requests[peer, request.request_id] = request.num_sequences
        return [RenderText(peer, request)]

    def _checked(self, tokens: list[int] | Ints, room: int) -> Ints:
        """A prompt that leaves `room` for output."""
        if isinstance(tokens, memoryview):
            check_prompt(unpack_ints(tokens), self._limits, room)
            return tokens
        return pack_ints(check_prompt(tokens, self._limits, room))

    def _add_tokens(
        self,
        peer: Peer,
        request: Generate | Embed,
        prompt: Ints,
        samplings: list[Sampling],
        features: list[MultimodalFeature],
        adapter: str,
    ) -> list[Effect]:
        return self._requests.add(
            peer,
            request.request_id,
            prompt,
            samplings,
            self._wall,
            request.priority,
            request.cache_salt,
            request.rank,
            features,
            adapter,
        )

    def _check_new(self, peer: Peer, request: Generate | Embed) -> None:
        if not request.request_id:
            raise BadRequest("request_id is empty; give each request an id of its own")
        key = (peer, request.request_id)
        in_use = key in self._text_requests or self._requests.ledger.of_request(*key)
        if in_use or self._sessions.find(*key) is not None:
            raise BadRequest(f"request_id {request.request_id} is in use; wait for its Finished, or choose another")
        prompts = [request.text, request.messages, request.prompt_token_ids]
        opens = isinstance(request, Generate) and request.resumable
        if prompts.count(None) != len(prompts) - 1 and not opens:
            raise BadRequest("give the prompt as exactly one of text, messages and prompt_token_ids")
        if isinstance(request, Generate) and request.mm_features and request.text_output and not opens:
            raise BadRequest("mm_features are for requests of tokens: set text_output to false")
        self._check_priority(request.priority)
        if not self._was_ready:
            raise Unroutable("the engine is not ready: it needs an executor and a rank; try again soon")

    def _check_priority(self, priority: int) -> None:
        if priority and not self._by_priority:
            raise BadRequest(f"priority {priority} would change nothing with policy fcfs; leave it out")

    def _abort(self, peer: Peer, abort: Abort) -> list[Effect]:
        if self._sessions.find(peer, abort.request_id) is not None:
            return self._sessions.abort(peer, abort)
        if (peer, abort.request_id) in self._text_requests:
            return [AbortText(peer, abort.request_id)]
        entries = self._requests.ledger.of_request(peer, abort.request_id)
        if not entries:
            sentence = f"request_id {abort.request_id} is not an unfinished request of yours"
            return [to_client(peer, Error(code="unknown_request", message=sentence, request_id=abort.request_id))]
        return self._requests.abort(entries, wanted=True)

    # Commands

    def _command(self, asker: tuple[Peer | None, int], request: CommandRequest | CommandCall) -> list[Effect]:
        if isinstance(request, CommandRequest) and request.command_id < 1:
            return [answer(asker, error=f"command_id {request.command_id} is not allowed; it must be 1 or more")]
        if isinstance(request.body, Shutdown):
            return self._shut_down(asker)
        body = request.body
        if isinstance(body, ListAdapters | FOR_EXECUTOR) and request.ranks is not None:
            return [answer(asker, error=f"{type(body).__name__} is not for ranks; leave them out")]
        if isinstance(body, ListAdapters):
            return [answer(asker, value=self._adapters.usable)]
        if isinstance(body, FOR_EXECUTOR):
            return self._commands.ask_executor(asker, body, request.deadline_s, self._executor, self._now)
        if isinstance(body, ComputedBlocks) and body.adapter:
            try:
                body = structs.replace(body, adapter=self._adapters.identity(body.adapter))
            except (BadRequest, Unroutable) as error:
                return [answer(asker, error=str(error))]
        return self._commands.ask(asker, body, request.deadline_s, request.ranks, self._requests.ranks, self._now)

    def _shut_down(self, asker: tuple[Peer | None, int]) -> list[Effect]:
        """End the ranks, then the executor, then this process; other frontends are not this one's to end."""
        down = CommandRequest(command_id=2**62, body=Shutdown())
        peers = [self._requests.ranks[rank] for rank in sorted(self._requests.ranks)]
        if self._executor is not None:
            peers.append(self._executor)
        return [*(Send(peer, down) for peer in peers), answer(asker, value=True), Stop("a Shutdown command")]

    # Calls over the seam

    def _call(self, call: Call) -> list[Effect]:
        if isinstance(call, AddCall):
            return self._add(call)
        if isinstance(call, AbortCall):
            entries = [entry for name in call.request_ids for entry in self._requests.ledger.of_request(None, name)]
            return self._requests.abort(entries, wanted=False)
        if isinstance(call, CommandCall):
            return self._command((None, call.call_id), call)
        if isinstance(call, Detokenised):
            return []
        if isinstance(call, TextRendered):
            return self._rendered(call)
        if isinstance(call, SessionCall):
            return self._receive(_connection(call.connection), call.message)
        if isinstance(call, ConnectionClosed):
            return self._sessions.client_down(_connection(call.connection), self._now)
        if isinstance(call, InputRendered):
            return self._sessions.rendered(call)
        if isinstance(call, SessionOutput):
            return self._sessions.output(call)
        return self._text(call)

    def _text(self, call: TextOutput | TextRefused) -> list[Effect]:
        request_id = call.request_id if isinstance(call, TextRefused) else call.message.request_id
        key = (call.peer, request_id)
        if key not in self._text_requests:
            return []  # the client is gone
        if isinstance(call, TextRefused):
            del self._text_requests[key]
            self._counters.add(f"requests_refused/{call.code}")
            return [Send(call.peer, Error(code=call.code, message=call.message, request_id=request_id))]
        if isinstance(call.message, Finished):
            self._text_requests[key] -= 1
            if not self._text_requests[key]:
                del self._text_requests[key]
        return [Send(call.peer, call.message)]

    def _rendered(self, call: TextRendered) -> list[Effect]:
        """An embedding is asked for that has its tokens now."""
        if self._text_requests.pop((call.peer, call.request.request_id), None) is None:
            return []  # the client is gone
        return self._start(call.peer, call.request)

    def _add(self, call: AddCall) -> list[Effect]:
        try:
            self._check_priority(call.priority)
            return self._requests.add(
                None,
                call.request_id,
                call.prompt_token_ids,
                [call.sampling],
                call.arrival_time,
                call.priority,
                call.cache_salt,
                call.rank,
                [],
                self._adapters.identity(call.adapter),
            )
        except (BadRequest, Unroutable) as error:
            code = "invalid" if isinstance(error, BadRequest) else "unavailable"
            self._counters.add(f"requests_refused/{code}")
            ended = RequestEnded(handle=0, reason="error", code=code, message=str(error))
            return [Deliver(call.rank or 0, [Delivery(call.request_id, memoryview(b""), None, None, ended)])]

    # Seeds

    def _draw_seed(self) -> int:
        self._seeds_drawn += 1
        data = self._seed_key + self._seeds_drawn.to_bytes(8, "little")
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1

    @staticmethod
    def _child_seed(seed: int, index: int) -> int:
        """Children of a seeded request draw from consecutive seeds, as in vLLM's ParentRequest."""
        return (seed + index) % 2**63


def _number(peer: Peer) -> int:
    """What a rank, or the executor, is called where commands are asked of it."""
    return EXECUTOR if peer.role == "executor" else peer.index


def _connection(number: int) -> Peer:
    """A WebSocket connection, as the peer that it is to sessions."""
    return Peer(CONNECTIONS, "client", number, 1)
