"""A frontend process: the bus on a thread of its own, vLLM's HTTP server on the main one."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import threading
import time
from types import FrameType
from typing import Never

from bus import model_files, process
from bus.config import Config, ConfigError
from bus.journal import recorder as journal
from bus.links import Identity
from bus.log import get_logger
from bus.model_files import ModelFacts
from bus.shell import Shell
from frontend.bridge import Bridge
from frontend.params import MAX_CHILDREN, ModelLimits
from frontend.replay import Construction, build

log = get_logger()

STOP_TIMEOUT_S = 5.0


class _Terminated(BaseException):
    """SIGTERM or SIGINT before the HTTP server was there to take it."""


_terminated = threading.Event()
"""Set with `_Terminated`, which a library may catch while it is being imported."""


def run(config: Config, me: Identity) -> None:
    """Be frontend `me` until SIGTERM, SIGINT, or a Shutdown command.

    Raises:
        ConfigError: the model cannot be served.
        OSError: the HTTP port is taken.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    bus: BusThread | None = None
    try:
        if not 0 <= me.index < config.frontends:
            raise ConfigError(f"--index {me.index} is not allowed; it must be less than frontends, {config.frontends}")
        source = model_files.resolve(config)
        facts = model_files.read(source.folder)
        limits = _limits(config, facts)
        sock = _bind(config.host, config.port + me.index)
        bridge = Bridge()
        bus = BusThread(config, me, limits, facts, bridge)
        bus.start()
        _import_vllm(config)
        if _terminated.is_set():
            return
        from frontend.server import serve

        asyncio.run(serve(config, me.index, source, limits, sock, bridge, bus.shell.post))
    except _Terminated:
        pass
    finally:
        if bus is not None:
            bus.stop()


class BusThread(threading.Thread):
    """Runs the frontend's core and its sockets. When it ends by itself, it ends the process by SIGTERM."""

    def __init__(self, config: Config, me: Identity, limits: ModelLimits, model: ModelFacts, bridge: Bridge) -> None:
        super().__init__(name="bus", daemon=True)
        construction = Construction(limits=limits, seed_key=secrets.token_bytes(32))
        core = build(me.index, config, construction)
        recorder = journal.start(config, me, construction, model=model, core=core)
        self.shell = Shell(me, config, core, bridge.deliver, recorder)
        self.shell.bind("client", config.client_endpoint(me.index))
        self.shell.bind("command", config.command_endpoint(me.index))
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            reason = self.shell.run()
            log.info("the bus has ended", reason=reason)
        except BaseException as error:
            self._error = error
        os.kill(os.getpid(), signal.SIGTERM)  # without effect when it was SIGTERM that ended the bus

    def stop(self) -> None:
        """End the bus and wait for that.

        Raises:
            Exception: what ended it, if it did not end in an orderly way.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending
        if self.is_alive():
            self.shell.stop("the frontend ends")
            self.join(STOP_TIMEOUT_S)
        if self._error is not None:
            raise self._error


def _limits(config: Config, facts: ModelFacts) -> ModelLimits:
    longest = config.max_model_len or facts.max_positions
    if longest > facts.max_positions:
        raise ConfigError(f"max_model_len: {longest} is more than the model allows, {facts.max_positions}")
    return ModelLimits(facts.vocab_size, longest, facts.eos_token_ids)


def _terminate(number: int, frame: FrameType | None) -> Never:
    _terminated.set()
    raise _Terminated


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet: connections are refused until the server is ready."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except socket.gaierror:
        raise ConfigError(f"host: {host!r} is not an address of this machine") from None
    except OSError as error:
        raise OSError(f"HTTP cannot listen on {host}, port {port}: {error.strerror}") from None
    return sock


def _import_vllm(config: Config) -> None:
    """Import vLLM, which takes seconds, and tell how long it took."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(config.cache_path / "vllm"))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its loggers hand on to ours
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(MAX_CHILDREN))
    # Forced tool calls are asked for by their schema, and not by tags that only one of vLLM's compilers knows
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    start = time.monotonic()
    gc.disable()  # imports make much that lives for ever; looking through it again and again costs seconds
    try:
        import frontend.server  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    log.info("vLLM is imported", seconds=round(time.monotonic() - start, 1))


if __name__ == "__main__":
    process.main("frontend", run)
