"""vLLM's `AsyncLLM` with the bus in place of its engine core."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

from bus.messages import Adapter, ExecutorStatus, PoolingKind
from frontend.engine_client import BusClient
from frontend.errors import RequestError
from frontend.metrics import EngineStatus, RankStats
from frontend.rank_logger import OwnLogger, RankLogger
from frontend.seam import Call, StatusUpdate
from frontend.sight import Sight
from frontend.websocket import SessionSockets


class BusLLM(AsyncLLM):
    """The engine behind vLLM's HTTP server.

    `client` is its way to the bus; `ending` tells that it was shut down. With `timed`, the journal is told how long
    outputs take up here. `adapters` are those that requests may name. `sockets` are the WebSocket connections. `sight`
    is what the dashboard shows.
    """

    sockets: SessionSockets

    def __init__(
        self,
        vllm_config: VllmConfig,
        post: Callable[[Call], None],
        status: EngineStatus,
        *,
        log_stats: bool,
        ranks: int,
        sight: Sight,
        pooling: PoolingKind,
        timed: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ending = False
        self.adapters: dict[str, LoRARequest] = {}
        self._adapter_ids: dict[str, int] = {}
        self.client = BusClient(
            post,
            self.fail,
            ranks=ranks,
            max_model_len=lambda: self.vllm_config.model_config.max_model_len,
            adapters=self.adapters,
            pooling=pooling,
            timed=timed,
        )
        self._status = status
        self.sight = sight
        self._rank_stats = RankStats() if log_stats and status.exports_ranks else None
        with _core_client(self.client):
            loggers: list[Any] = [RankLogger if status.exports_ranks else OwnLogger] if log_stats else []
            super().__init__(vllm_config, Executor, log_stats, log_requests=False, stat_loggers=loggers)
        # Without it, vLLM compiles no grammar itself, with libraries and in time that the ranks spend already
        self.input_processor.structured_outputs_config = None

    def fail(self, request_id: str, error: GracefulHTTPError) -> None:
        """End a request, and with it its siblings of one `n`, with an error instead of an output."""
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return
        state.queue.put(error)
        request_ids = [state.parent_req.request_id] if state.parent_req else [request_id]
        self.client.abort(self.output_processor.abort_requests(request_ids, internal=True))

    def on_status(self, update: StatusUpdate) -> None:
        """Take how the engine does: for /health and /metrics, and for the longest context it has room for."""
        self._status.last = update
        self.sight.update(update, time.time())
        if update.executor is not None:
            self._limit_context(update.executor)
            self._show_adapters(update.executor.adapters)
        if self._rank_stats is not None:
            for rank, stats in self._rank_stats.changes(update.loads):
                self.client.record(rank, stats)

    async def check_health(self) -> None:
        """Raise if a request could not be served now: no executor or no rank is up.

        Raises:
            EngineDeadError: /health answers 503.
        """
        if not self._status.last.ready:
            raise EngineDeadError()

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests, so that their connections do not hold the server up. Called in a thread, and by vLLM."""
        self.ending = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all)
        super().shutdown(timeout)

    def _fail_all(self) -> None:
        self.sight.close()
        for request_id in list(self.output_processor.request_states):
            self.fail(request_id, RequestError("unavailable", "the frontend is ending; send the request again"))

    def _show_adapters(self, loaded: list[Adapter]) -> None:
        """Have `adapters` be those that are loaded. vLLM numbers them; equal ones keep their numbers."""
        self.adapters.clear()
        for adapter in loaded:
            number = self._adapter_ids.setdefault(adapter.identity, len(self._adapter_ids) + 1)
            self.adapters[adapter.name] = LoRARequest(adapter.name, number, adapter.path)

    def _limit_context(self, executor: ExecutorStatus) -> None:
        model_config = self.vllm_config.model_config
        model_config.max_model_len = min(model_config.max_model_len, executor.max_model_len)
        if model_config.pooler_config is not None:
            model_config.pooler_config.max_embed_len = model_config.max_model_len - 1


@contextlib.contextmanager
def _core_client(client: EngineCoreClient) -> Iterator[None]:
    """Let AsyncLLM find `client` where it makes its engine core client."""

    def make(*args: Any, **kwargs: Any) -> EngineCoreClient:
        return client

    original = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original
