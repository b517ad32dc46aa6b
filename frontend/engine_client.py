"""vLLM's `EngineCoreClient` on top of the bus: what `AsyncLLM` calls goes over the seam, and outputs come back."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PauseMode,
)
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from bus.messages import (
    AnyCommand,
    GetPauseState,
    Logprobs,
    PoolingKind,
    RequestStarted,
    ResetEncoderCache,
    ResetPrefixCache,
    Resume,
    SetPause,
)
from frontend.errors import RequestError, unsupported
from frontend.sampling import to_sampling
from frontend.seam import AbortCall, AddCall, Call, CommandCall, CommandResult, Deliver, Delivery, Detokenised

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""The reason error is not among them: such a request fails with its sentence instead of an output."""


@dataclass(slots=True)
class _Resources:
    """What `AsyncLLM.errored` looks at. The bus outlives every rank and executor, so it is never dead."""

    engine_dead: bool = False


@dataclass(slots=True)
class _Request:
    """An unfinished request.

    `started` waits for the first tokens, to go into vLLM's metrics with them; so do the `prompt_logprobs` that came.
    """

    prompt_len: int
    trace_headers: Mapping[str, str] | None = None
    started: RequestStarted | None = None
    started_at: float = 0.0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class BusClient(EngineCoreClient):
    """One engine core to AsyncLLM; behind it, all ranks. All methods are called on the event loop.

    `post` sends a call over the seam. `on_failed(request_id, error)` is told of requests that ended with an error:
    vLLM's outputs have no place for a sentence. `adapters` are those that are loaded, by name. Embeddings are pooled as
    `pooling` says. With `timed`, a `Detokenised` is posted for each step's outputs.
    """

    def __init__(
        self,
        post: Callable[[Call], None],
        on_failed: Callable[[str, GracefulHTTPError], None],
        *,
        ranks: int,
        max_model_len: Callable[[], int],
        adapters: Mapping[str, LoRARequest] = MappingProxyType({}),
        pooling: PoolingKind = "last",
        timed: bool = False,
    ) -> None:
        self._post = post
        self._on_failed = on_failed
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._pooling = pooling
        self._timed = timed
        self._under_way: tuple[int, int, float] | None = None
        """Rank, step and time of the outputs that AsyncLLM was given last."""
        self._outputs: asyncio.Queue[tuple[int, EngineCoreOutputs]] = asyncio.Queue()
        self._requests: dict[str, _Request] = {}
        self._commands: dict[int, asyncio.Future[CommandResult]] = {}
        self._call_ids = itertools.count(1)
        self.engine_ranks_managed = list(range(ranks))
        self.resources = _Resources()

    # Requests

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate", "embed")

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a request.

        Raises:
            RequestError: it asks for something this engine does not have.
        """
        sampling = to_sampling(request, self._max_model_len(), self._pooling)
        prompt = request.prompt_token_ids
        assert prompt is not None
        self._requests[request.request_id] = _Request(len(prompt), request.trace_headers)
        self._post(
            AddCall(
                request_id=request.request_id,
                prompt_token_ids=memoryview(np.asarray(prompt, dtype="<i4").tobytes()),
                sampling=sampling,
                arrival_time=request.arrival_time,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                rank=request.data_parallel_rank,
                adapter=request.lora_request.lora_name if request.lora_request else "",
            )
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.abort(request_ids)

    def abort(self, request_ids: list[str]) -> None:
        """Give up those of `request_ids` that are unfinished."""
        known = [request_id for request_id in request_ids if self._requests.pop(request_id, None) is not None]
        if known:
            self._post(AbortCall(request_ids=known))

    async def get_output_async(self) -> EngineCoreOutputs:
        if self._under_way is not None:  # AsyncLLM asks for more when it is through with what it has
            rank, given, begun = self._under_way
            self._under_way = None
            self._post(Detokenised(rank=rank, step=given, begun=begun, seconds=time.monotonic() - begun))
        step, outputs = await self._outputs.get()
        if self._timed and step:
            self._under_way = outputs.engine_index, step, time.monotonic()
        return outputs

    def dp_engines_running(self) -> bool:
        """Whether any request of this frontend is unfinished."""
        return bool(self._requests)

    def on_deliver(self, effect: Deliver) -> None:
        """Take the outputs of one rank's step."""
        now = time.monotonic()
        outputs = []
        for delivery in effect.outputs:
            request = self._requests.get(delivery.request_id)
            if request is None:
                continue  # given up meanwhile
            if delivery.started is not None:
                request.started, request.started_at = delivery.started, now
            if delivery.prompt_logprobs is not None:
                request.prompt_logprobs.append(delivery.prompt_logprobs)
            if delivery.ended is not None:
                del self._requests[delivery.request_id]
                if delivery.ended.reason == "error":
                    self._on_failed(delivery.request_id, RequestError(delivery.ended.code, delivery.ended.message))
                    continue
            elif not delivery.token_ids:
                continue  # to vLLM, the first output means the first token
            outputs.append(_output(delivery, request))
        if outputs:
            given = EngineCoreOutputs(engine_index=effect.rank, outputs=outputs, timestamp=now)
            self._outputs.put_nowait((effect.step, given))

    def record(self, rank: int, stats: SchedulerStats) -> None:
        """Give a rank's statistics to vLLM's metrics."""
        self._outputs.put_nowait((0, EngineCoreOutputs(engine_index=rank, scheduler_stats=stats)))

    # Commands

    async def command(self, body: AnyCommand, deadline_s: float | None = None) -> Any:
        """Run a command on all ranks; return its folded value.

        Raises:
            RequestError: it failed, or ranks did not answer in time.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._commands[call_id] = future
        try:
            self._post(CommandCall(call_id=call_id, body=body, deadline_s=deadline_s))
            result = await future
        finally:
            del self._commands[call_id]
        name = type(body).__name__
        if result.error:
            raise RequestError(result.code or "unavailable", result.error)
        if result.missing:
            missing = ", ".join(str(rank) for rank in result.missing)
            raise RequestError("unavailable", f"{name}: no answer in time from ranks {missing}")
        return result.value

    def on_command_result(self, effect: CommandResult) -> None:
        """Take the answer to a command."""
        future = self._commands.get(effect.call_id)
        if future is not None and not future.done():
            future.set_result(effect)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return bool(await self.command(ResetPrefixCache(reset_running_requests=reset_running_requests)))

    async def reset_encoder_cache_async(self) -> None:
        await self.command(ResetEncoderCache())

    async def reset_mm_cache_async(self) -> None:
        """Nothing to do: ranks keep no multimodal inputs."""

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        await self.command(SetPause(mode=mode))
        if clear_cache:
            await self.command(ResetPrefixCache(reset_running_requests=mode == "keep"))

    async def resume_scheduler_async(self) -> None:
        await self.command(Resume())

    async def is_scheduler_paused_async(self) -> bool:
        """Whether the ranks are paused.

        Raises:
            RequestError: some are, and some are not.
        """
        state = await self.command(GetPauseState())
        if isinstance(state, list):
            raise RequestError("unavailable", f"the ranks' pause states differ: {', '.join(map(str, state))}")
        return state != "unpaused"

    async def is_sleeping_async(self) -> bool:
        return False

    async def list_loras_async(self) -> set[int]:
        return {request.lora_int_id for request in self._adapters.values()}

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: the server stops the bus thread after the last response."""


_UNSUPPORTED = {
    "profiling": ("profile", "profile_async"),
    "sleeping": ("sleep", "sleep_async", "wake_up", "wake_up_async", "is_sleeping", "release_kv_cache_memory"),
    "releasing the KV cache": ("release_kv_cache_memory_async",),
    "vLLM's own way to load LoRA adapters": (
        "add_lora",
        "add_lora_async",
        "remove_lora",
        "remove_lora_async",
        "list_loras",
    ),
    "pinning a LoRA adapter": ("pin_lora", "pin_lora_async"),
    "changing weights": ("set_weight_version", "set_weight_version_async", "get_weight_version"),
    "a weight version": ("get_weight_version_async",),
    "weight checksums": ("compute_weight_checksums_async",),
    "saving the model's state": ("save_sharded_state", "save_sharded_state_async"),
    "calling methods of vLLM's workers": ("collective_rpc", "collective_rpc_async"),
    "a dummy batch": ("execute_dummy_batch", "execute_dummy_batch_async"),
    "elastic expert parallelism": ("commit_elastic_ep", "prepare_elastic_ep"),
    "vLLM's fault tolerance": ("handle_fault", "get_status"),
    "vLLM's synchronous engine": (
        "get_output",
        "get_supported_tasks",
        "add_request",
        "abort_requests",
        "reset_mm_cache",
        "reset_prefix_cache",
        "reset_encoder_cache",
    ),
}


def _refuser(name: str, feature: str) -> Callable[..., NoReturn]:
    def refuse(self: BusClient, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported(feature)

    refuse.__name__ = name
    return refuse


for _feature, _names in _UNSUPPORTED.items():
    for _name in _names:
        setattr(BusClient, _name, _refuser(_name, _feature))


def _output(delivery: Delivery, request: _Request) -> EngineCoreOutput:
    output = EngineCoreOutput(delivery.request_id, np.frombuffer(delivery.token_ids, "<i4").tolist())
    if delivery.logprobs is not None:
        output.new_logprobs = _logprobs(delivery.logprobs)
    if delivery.vector is not None:
        output.pooling_output = torch.from_numpy(np.frombuffer(delivery.vector, "<f4").copy())
    if request.prompt_logprobs:
        output.new_prompt_logprobs_tensors = _prompt_logprobs(request.prompt_logprobs)
        request.prompt_logprobs = []
    if (started := request.started) is not None:
        output.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, request.started_at - started.queued_s),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, request.started_at),
        ]
        output.prefill_stats = PrefillStats()
        output.prefill_stats.set(request.prompt_len, started.cached_tokens, 0)
        request.started = None
    if (ended := delivery.ended) is not None:
        output.finish_reason = FINISH_REASONS[ended.reason]
        output.trace_headers = request.trace_headers
        output.stop_reason = ended.stop_reason
    return output


def _logprobs(logprobs: Logprobs) -> LogprobsLists:
    shape = (logprobs.positions, -1)
    return LogprobsLists(
        np.frombuffer(logprobs.token_ids, "<i4").reshape(shape),
        np.frombuffer(logprobs.values, "<f4").reshape(shape),
        np.frombuffer(logprobs.ranks, "<i4"),
    )


def _prompt_logprobs(parts: list[Logprobs]) -> LogprobsTensors:
    """Those of a whole prompt, which came in parts."""
    lists = [_logprobs(part) for part in parts]
    return LogprobsTensors(
        torch.from_numpy(np.concatenate([part.logprob_token_ids for part in lists])),
        torch.from_numpy(np.concatenate([part.logprobs for part in lists])),
        torch.from_numpy(np.concatenate([part.sampled_token_ranks for part in lists])),
    )
