"""The HTTP side of a frontend: vLLM's OpenAI server on a `BusLLM`. Importing this module imports vLLM."""

import logging
import socket
import time
from argparse import Namespace
from collections.abc import Callable

from prometheus_client import REGISTRY
from vllm.config import LoRAConfig, PoolerConfig, VllmConfig
from vllm.config.pooler import SequencePoolingType
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.tracing import is_tracing_available
from vllm.usage.usage_lib import UsageContext

from bus.config import Config, ConfigError
from bus.log import get_logger
from bus.messages import PoolingKind
from bus.model_files import ModelSource
from frontend import parsers
from frontend.adapter_models import served_models
from frontend.bridge import Bridge
from frontend.engine import BusLLM
from frontend.metrics import BusCollector, EngineStatus, histograms
from frontend.params import ModelLimits
from frontend.seam import (
    AbortText,
    BeginTurn,
    Call,
    CommandResult,
    Deliver,
    RenderInput,
    RenderText,
    StatusUpdate,
    ToConnection,
)
from frontend.session_text import SessionTexts
from frontend.sight import Sight
from frontend.text import TextRequests
from frontend.websocket import SessionSockets

log = get_logger()

_POOLING_TYPES: dict[PoolingKind, SequencePoolingType] = {"last": "LAST", "mean": "MEAN"}

GRACEFUL_SHUTDOWN_S = 3
"""How long responses under way may take to end after SIGTERM; their requests are ended at once."""


async def serve(
    config: Config,
    index: int,
    source: ModelSource,
    limits: ModelLimits,
    sock: socket.socket,
    bridge: Bridge,
    post: Callable[[Call], None],
) -> None:
    """Serve HTTP on the bound socket `sock` until SIGTERM or SIGINT.

    Effects come from `bridge`, calls go to `post`.

    Raises:
        ConfigError: traces are wanted, and there is nothing to make them with, or a parser cannot be used.
        RuntimeError: the server ended without being told to.
    """
    start = time.monotonic()
    if config.otlp_traces_endpoint and not is_tracing_available():
        raise ConfigError(
            "otlp_traces_endpoint: traces need packages that are not installed; pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http"
        )
    _quieten_logs()
    args = _arguments(config, index, source, limits)
    parsers.choose(args, config)
    vllm_config = _vllm_config(config, args)
    status = EngineStatus(index)
    engine = BusLLM(
        vllm_config,
        post,
        status,
        log_stats=config.log_stats,
        ranks=config.ranks,
        pooling=config.pooling,
        sight=Sight(index, config.ranks, histograms),
        timed=config.journals("frontend"),
    )
    parsers.try_out(config, engine.renderer.get_tokenizer())
    log.info("vLLM's engine is built", seconds=round(time.monotonic() - start, 1))
    texts = TextRequests(engine, engine.adapters, post)
    sessions = SessionTexts(engine, post)
    engine.sockets = SessionSockets(sessions, post, config.allowed_origins)

    def deliver(effect: Deliver) -> None:
        engine.client.on_deliver(effect)
        sessions.on_deliver(effect)

    bridge.attach(
        {
            Deliver: deliver,
            CommandResult: engine.client.on_command_result,
            StatusUpdate: engine.on_status,
            RenderText: texts.on_render,
            AbortText: texts.on_abort,
            RenderInput: sessions.on_render,
            BeginTurn: sessions.on_begin,
            ToConnection: sessions.on_message,
        }
    )
    collector = BusCollector(status)
    REGISTRY.register(collector)
    try:
        address = f"http://{args.host}:{args.port}"
        with served_models():
            shut_down = await build_and_serve(
                engine, address, sock, args, timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S, log_config=None
            )
        await shut_down
        if not engine.ending:
            raise RuntimeError("vLLM has ended its HTTP server: its output processing failed")
    finally:
        REGISTRY.unregister(collector)
        bridge.detach()
        engine.shutdown()


def _quieten_logs() -> None:
    """Leave out what says nothing to whoever runs this engine."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_ours)
    logging.getLogger("vllm.config").setLevel(logging.ERROR)  # about compiling and running a model, which vLLM does not


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a log record is not about a client's mistake: vLLM logs those of streamed requests with a traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, VLLMClientError | GracefulHTTPError)


def _arguments(config: Config, index: int, source: ModelSource, limits: ModelLimits) -> Namespace:
    """vLLM's command line, as if it had been parsed: its defaults, and what of our configuration matters up here."""
    engine = AsyncEngineArgs(
        model=str(source.folder),
        served_model_name=source.name,
        max_model_len=limits.max_model_len,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        disable_log_stats=not config.log_stats,
        otlp_traces_endpoint=config.otlp_traces_endpoint or None,
        generation_config="vllm",  # parameters that are left out mean the same over HTTP and on the client bus
    )
    http = FrontendArgs(
        host=config.host,
        port=config.port + index,
        disable_uvicorn_access_log=True,
        uvicorn_log_level="warning",
        middleware=[
            "frontend.middleware.StrictRequests",
            "frontend.websocket.SessionRoute",
            "frontend.dashboard.Dashboard",
        ],
    )
    return Namespace(**(vars(engine) | vars(http) | {"served_model_name": [source.name]}))


def _vllm_config(config: Config, args: Namespace) -> VllmConfig:
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    # Set afterwards: vLLM's own engine either generates or pools, but its server does both for an engine that does.
    # As the model is one that generates, vLLM wants room for a token of output.
    pooling_type, longest = _POOLING_TYPES[config.pooling], vllm_config.model_config.max_model_len - 1
    vllm_config.model_config.pooler_config = PoolerConfig(pooling_type=pooling_type, max_embed_len=longest)
    # Set afterwards: vLLM would otherwise prepare to start and coordinate ranks of its own. Requests name one of them.
    vllm_config.parallel_config.data_parallel_size = config.ranks
    vllm_config.parallel_config.data_parallel_size_local = config.ranks
    if config.max_loras:  # so that vLLM lets requests have adapters; how large they may be is the executor's to say
        vllm_config.lora_config = LoRAConfig(max_loras=config.max_loras)
    return vllm_config
