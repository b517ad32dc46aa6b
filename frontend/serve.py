"""``rankbus serve``: prepare the model, run the processes under supervisord, say when and where the engine answers."""

import http.client
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from bus import config as configuration
from bus import model_files
from bus.config import EX_CONFIG, Config, ConfigError
from bus.model_files import ModelError, ModelFacts, ModelSource
from frontend.supervision import (
    CONFIG_NAME,
    POLL_S,
    STOP_S,
    STOP_SIGNALS,
    LogTail,
    Program,
    Supervisor,
    end_with_us,
    rpc,
)

TEMPLATE = Path(__file__).parent.parent / "supervisord.conf"
REPORT_S = 10.0
"""How often the progress of the start is told where there is no terminal to show it on."""


def main(arguments: list[str]) -> int:
    """Serve until a signal comes, or until nothing is left to run; returns the exit code.

    Raises:
        ConfigError: the configuration or the model cannot be used.
    """
    flags, rest = configuration.split_flags(arguments)
    if rest:
        raise ConfigError(f"{rest[0]} is not a setting; `rankbus config` lists them")
    config = configuration.load(flags)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    source = model_files.resolve(config)
    if source.prepared:
        code = _prepare(source, flags)
        if code:
            return code
    facts = model_files.read(source.folder)
    config = _absolute(config)
    _make_run_dir(config.run_path)
    _wait_for_former(config)
    _check_ports(config)
    return Watch(config, source, facts, console).run()


def _prepare(source: ModelSource, flags: dict[str, str]) -> int:
    """Have the model prepared if it is not; returns the exit code of the preparation, which has said what is wrong."""
    try:
        model_files.read(source.folder)
        return 0
    except ModelError:
        pass
    command = [sys.executable, "-m", "executor.prepare", *(f"--{name}={value}" for name, value in flags.items())]
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_us).returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _absolute(config: Config) -> Config:
    """The same configuration, independent of the directory a process runs in."""
    model = config.model if config.model == "embedded" else str(Path(config.model).expanduser().absolute())
    return msgspec.structs.replace(config, model=model, run_dir=str(config.run_path), cache_dir=str(config.cache_path))


def _make_run_dir(path: Path) -> None:
    """Make `path` a folder that only we can enter; never shut others out of a folder that is not ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = not any(path.iterdir()) or (path / CONFIG_NAME).exists()
        if path.stat().st_mode & 0o077 and not ours:
            raise ConfigError(
                f"run_dir: others can enter {path}, and it has files of theirs; it must be a folder of its own"
            )
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be used ({error.strerror}); choose another") from None


def _wait_for_former(config: Config) -> None:
    """Refuse to serve from a run_dir that is in use; wait for one whose supervisord is just ending."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            state: Any = rpc(config.run_path).supervisor.getState()
        except OSError:
            return
        except (http.client.HTTPException, xmlrpc.client.Error):
            state = {"statename": "SHUTDOWN"}  # it is ending, or it would have answered
        if state["statename"] != "SHUTDOWN":
            break
        time.sleep(POLL_S)
    raise ConfigError(f"run_dir: an engine is already running in {config.run_path}; stop it or choose another run_dir")


def _check_ports(config: Config) -> None:
    for port in _ports(config):
        _check_port("port", config.host, port)
    if config.executors > 1:
        _check_port("coordinator", "0.0.0.0", int(config.coordinator.rpartition(":")[2]))


def _check_port(setting: str, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", error)
            raise ConfigError(f"{setting}: {host} port {port} cannot be used ({why}); choose another") from None


def _ports(config: Config) -> range:
    return range(config.port, config.port + config.frontends)


class Watch:
    """Runs the programs and watches them until there is a reason to stop."""

    def __init__(self, config: Config, source: ModelSource, facts: ModelFacts, console: Console) -> None:
        self._config = config
        self._source = source
        self._facts = facts
        self._console = console
        self._supervisor = Supervisor(config, TEMPLATE.read_text())
        self._tails = {path: LogTail(path) for path in _log_paths(config)}
        self._status = console.status("Starting", refresh_per_second=4)
        self._waiting = list(_ports(config))
        self._pids: dict[str, int] = {}
        self._begun = self._reported = time.monotonic()

    def run(self) -> int:
        """Start everything, wait for an end, and stop everything; returns the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._supervisor.start()
        if self._console.is_terminal:
            self._status.start()
        code = None
        try:
            while code is None:
                code = 0 if signal.sigtimedwait(STOP_SIGNALS, POLL_S) else self._look()
            return code
        finally:
            self._status.stop()
            self._console.print("Stopping")
            self._supervisor.stop()

    def _look(self) -> int | None:
        """Look after everything once; the exit code if it is time to stop."""
        ended = self._supervisor.exit_code()
        if ended is not None:
            self._console.print(f"supervisord ended with code {ended}; see {self._supervisor.log}", style="red")
            return ended or int(bool(self._waiting))
        programs = self._supervisor.programs()
        for program in programs:
            if program.state == "EXITED" and program.exit_code == EX_CONFIG:
                self._console.print(f"{program.name}: {_sentence(self._tails[program.log], program.log)}", style="red")
                return EX_CONFIG
            if program.pid and self._pids.setdefault(program.name, program.pid) != program.pid:
                self._pids[program.name] = program.pid
                how = self._supervisor.last_end(program.name)
                self._console.print(
                    f"{program.name} ended ({how}) and was started again; see {program.log}", style="yellow"
                )
        if programs and all(program.state == "EXITED" for program in programs):
            self._console.print("All processes have ended")
            return int(any(program.exit_code for program in programs))
        if self._waiting:
            self._wait(programs)
        return None

    def _wait(self, programs: list[Program]) -> None:
        """See who is ready, and tell how far the others are."""
        now = time.monotonic()
        self._waiting = [port for port in self._waiting if not _healthy(self._config, port)]
        if not self._waiting:
            self._status.stop()
            self._console.print(self._ready(programs, now - self._begun))
            return
        progress = _progress(programs, self._tails, now - self._begun)
        self._status.update(Text(progress))
        if not self._console.is_terminal and now - self._reported >= REPORT_S:
            self._reported = now
            self._console.print(progress)

    def _ready(self, programs: list[Program], seconds: float) -> str:
        """What to do with the engine now that it is ready, and what took long."""
        host = _connect_host(self._config)
        host = f"[{host}]" if ":" in host else host
        lines = [f"Ready after {seconds:.1f} s: {self._source.name} with {self._config.ranks} ranks"]
        for program in programs:
            timed = [line for line in self._tails[program.log].last() if isinstance(line.get("seconds"), int | float)]
            parts = ", ".join(f"{line.get('event')} {line['seconds']:.1f} s" for line in timed)
            lines += [f"  {program.name:12} {parts}"] if parts else []
        lines.append("")
        for index, port in enumerate(_ports(self._config)):
            lines.append(f"  OpenAI API   http://{host}:{port}/v1")
            lines.append(f"  zmq          {self._config.client_endpoint(index)}")
        control = [str(Path(sys.executable).parent / "supervisorctl"), "-c", str(self._supervisor.conf), "status"]
        lines += [f"  logs         {self._supervisor.log.parent}/*.jsonl", f"  processes    {shlex.join(control)}"]
        question = "What is the capital of France?"
        path = "chat/completions" if self._facts.chat else "completions"
        ask: Any = {"messages": [{"role": "user", "content": question}]} if self._facts.chat else {"prompt": question}
        body = json.dumps({"model": self._source.name, **ask, "max_tokens": 32, "temperature": 0})
        url = f"http://{host}:{self._config.port}/v1/{path}"
        lines += ["", "Try it:", f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"]
        return "\n".join(lines)


def _log_paths(config: Config) -> list[Path]:
    names = [f"frontend-{index}" for index in range(config.frontends)]
    names += [f"rank-{index}" for index in range(config.ranks)]
    names += [f"executor-{index}" for index in range(config.local_executors)]
    return [config.run_path / "log" / f"{name}.jsonl" for name in names]


def _sentence(tail: LogTail, path: Path) -> str:
    """What a process that ended with code 78 had to say."""
    for line in reversed(tail.last()):
        if line.get("exit_code") == EX_CONFIG:
            return str(line["event"])
    return f"its configuration cannot be used; see {path}"


def _progress(programs: list[Program], tails: dict[Path, LogTail], seconds: float) -> str:
    """One line per process: what it logged last. A line with `percent` on it becomes a bar."""
    lines = [f"Starting, {seconds:.0f} s"]
    for program in programs:
        last: dict[str, Any] = next(reversed(tails[program.log].last()), {})
        text = last.get("event") or program.state.lower()
        match last:
            case {"percent": int(percent)} if 0 <= percent <= 100:
                filled = 30 * percent // 100
                text = f"{text} {'━' * filled}{'╌' * (30 - filled)} {percent} %"
        lines.append(f"  {program.name:12} {text}"[:110])
    return "\n".join(lines)


def _connect_host(config: Config) -> str:
    """Where this machine reaches what is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)


def _healthy(config: Config, port: int) -> bool:
    connection = http.client.HTTPConnection(_connect_host(config), port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
