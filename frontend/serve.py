"""``rankbus serve``: prepare the model, run the processes under supervisord, say when and where the engine answers."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.status import Status
from supervisor.xmlrpc import SupervisorTransport

from bus import config as configuration
from bus import model_files
from bus.config import EX_CONFIG, Config, ConfigError
from bus.model_files import ModelError, ModelFacts, ModelSource
from bus.process import end_with_parent

TEMPLATE = Path(__file__).parent.parent / "supervisord.conf"
POLL_S = 0.25
STOP_S = 20.0
"""How long supervisord may take to end: the programs have stopwaitsecs, and it looks once a second."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Serve until a signal comes, or until nothing is left to run; returns the exit code.

    Raises:
        ConfigError: the configuration or the model cannot be used.
    """
    flags, rest = configuration.split_flags(arguments)
    if rest:
        raise ConfigError(f"{rest[0]} is not a setting; `rankbus config` lists them")
    config = configuration.load(flags)
    console = Console(highlight=False, soft_wrap=True)
    source = model_files.resolve(config)
    if source.prepared:
        code = _prepare(source, flags)
        if code:
            return code
    facts = model_files.read(source.folder)
    config = _absolute(config)
    config.run_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.run_path.chmod(0o700)
    _wait_for_former(config)
    _check_ports(config)
    return _serve(config, source, facts, console)


def _prepare(source: ModelSource, flags: dict[str, str]) -> int:
    """Have the model prepared if it is not; returns the exit code of the preparation, which has said what is wrong."""
    try:
        model_files.read(source.folder)
        return 0
    except ModelError:
        pass
    command = [sys.executable, "-m", "executor.prepare", *(f"--{name}={value}" for name, value in flags.items())]
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, preexec_fn=_end_with_us).returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _absolute(config: Config) -> Config:
    """The same configuration, independent of the directory a process runs in."""
    model = config.model if config.model == "embedded" else str(Path(config.model).expanduser().absolute())
    return msgspec.structs.replace(config, model=model, run_dir=str(config.run_path), cache_dir=str(config.cache_path))


def _end_with_us() -> None:
    """In a child, before its program runs: end when this process ends, and take signals as usual."""
    end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


# ---------------------------------------------------------------------------------------------------------------------
# supervisord


class Program(NamedTuple):
    """What supervisord says of one process. `exit_code` is that of its last end, if it is not running."""

    name: str
    state: str
    pid: int
    exit_code: int
    log: Path


class Supervisor:
    """A supervisord of ours: its configuration, its process, and what it says over its socket."""

    def __init__(self, config: Config) -> None:
        self.conf = config.run_path / "supervisord.conf"
        self.log = config.run_path / "log" / "supervisord.log"
        self.log.parent.mkdir(exist_ok=True)
        toml = config.run_path / "config.toml"
        toml.write_text(configuration.to_toml(config))
        self.conf.write_text(fill_in(TEMPLATE.read_text(), config))
        settings = {f"RANKBUS_{field.name.upper()}" for field in msgspec.structs.fields(Config)}
        self._environ = {name: value for name, value in os.environ.items() if name not in settings}
        self._environ["RANKBUS_CONFIG"] = str(toml)
        self._rpc = rpc(config.run_path)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start supervisord, in a session of its own: Ctrl-C is for us, and we stop it in order."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "--silent", "-c", str(self.conf)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environ,
            preexec_fn=_end_with_us,
        )

    def exit_code(self) -> int | None:
        """The code supervisord ended with; None while it runs."""
        assert self._child is not None
        return self._child.poll()

    def programs(self) -> list[Program]:
        """All programs; empty while supervisord is starting or ending."""
        try:
            infos: Any = self._rpc.supervisor.getAllProcessInfo()
        except (OSError, http.client.HTTPException, xmlrpc.client.Error):
            return []
        return [
            Program(
                name=info["name"],
                state=info["statename"],
                pid=info["pid"],
                exit_code=info["exitstatus"],
                log=Path(info["stdout_logfile"]),
            )
            for info in infos
        ]

    def stop(self) -> None:
        """End supervisord and all programs. A second signal meanwhile ends them without asking."""
        assert self._child is not None
        deadline = time.monotonic() + STOP_S
        if self._child.poll() is None:
            self._child.terminate()
        while self._child.poll() is None:
            signalled = signal.sigtimedwait(_STOP_SIGNALS, POLL_S)
            if signalled or time.monotonic() > deadline:
                self._child.kill()  # the programs end with it (bus.process)
                self._child.wait()


def fill_in(template: str, config: Config) -> str:
    """Put the configuration into the text of supervisord.conf."""
    values = {
        "RANKBUS_RUN_DIR": str(config.run_path),
        "RANKBUS_FRONTENDS": str(config.frontends),
        "RANKBUS_RANKS": str(config.ranks),
        "RANKBUS_PYTHON": sys.executable,
    }
    return re.sub(r"%\(ENV_(\w+)\)s", lambda match: values[match[1]].replace("%", "%%"), template)


def rpc(run_path: Path) -> xmlrpc.client.ServerProxy:
    """supervisord's interface in `run_path`."""
    transport = SupervisorTransport("", "", f"unix://{run_path}/ctl")
    return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)


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
        with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                raise ConfigError(
                    f"port: {config.host} port {port} cannot be used ({error.strerror}); choose another"
                ) from None


def _ports(config: Config) -> range:
    return range(config.port, config.port + config.frontends)


# ---------------------------------------------------------------------------------------------------------------------
# Watching


class LogTail:
    """What a process has logged since this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def last(self) -> list[dict[str, Any]]:
        """The newest lines (up to 64 KiB of them) that are JSON objects, oldest first."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = self._start if size >= self._start else 0  # it was rotated
                file.seek(max(start, size - 65536))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:  # some library's own text, or half a line
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


def _serve(config: Config, source: ModelSource, facts: ModelFacts, console: Console) -> int:
    """Run the programs and watch them until there is a reason to stop; returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    supervisor = Supervisor(config)
    begun = time.monotonic()
    tails = {path: LogTail(path) for path in _log_paths(config)}
    supervisor.start()
    status = console.status("Starting")
    if console.is_terminal:
        status.start()
    else:
        console.print(f"Starting {source.name}: {config.frontends} frontends, {config.ranks} ranks, 1 executor")
    try:
        return _watch(config, source, facts, supervisor, tails, status, begun, console)
    finally:
        status.stop()
        console.print("Stopping")
        supervisor.stop()


def _watch(
    config: Config,
    source: ModelSource,
    facts: ModelFacts,
    supervisor: Supervisor,
    tails: dict[Path, LogTail],
    status: Status,
    begun: float,
    console: Console,
) -> int:
    waiting = list(_ports(config))
    pids: dict[str, int] = {}
    while not signal.sigtimedwait(_STOP_SIGNALS, POLL_S):
        code = supervisor.exit_code()
        if code is not None:
            console.print(f"supervisord ended with code {code}; see {supervisor.log}", style="red")
            return code or int(bool(waiting))
        programs = supervisor.programs()
        for program in programs:
            if program.state == "EXITED" and program.exit_code == EX_CONFIG:
                console.print(f"{program.name}: {_sentence(tails[program.log], program.log)}", style="red")
                return EX_CONFIG
            if program.pid and pids.setdefault(program.name, program.pid) != program.pid:
                pids[program.name] = program.pid
                console.print(f"{program.name} was started again; see {program.log}", style="yellow")
        if programs and all(program.state == "EXITED" for program in programs):
            console.print("All processes have ended")
            return int(any(program.exit_code for program in programs))
        if waiting:
            waiting = [port for port in waiting if not _healthy(config, port)]
            status.update(_progress(programs, tails, time.monotonic() - begun))
            if not waiting:
                status.stop()
                console.print(_ready(config, source, facts, supervisor, time.monotonic() - begun))
    return 0


def _log_paths(config: Config) -> Iterable[Path]:
    folder = config.run_path / "log"
    yield from (folder / f"frontend-{index}.jsonl" for index in range(config.frontends))
    yield from (folder / f"rank-{index}.jsonl" for index in range(config.ranks))
    yield folder / "executor-0.jsonl"


def _sentence(tail: LogTail, path: Path) -> str:
    """What a process that ended with code 78 had to say."""
    for line in reversed(tail.last()):
        if line.get("exit_code") == EX_CONFIG:
            return str(line["event"])
    return f"its configuration cannot be used; see {path}"


def _progress(programs: list[Program], tails: dict[Path, LogTail], seconds: float) -> str:
    """One line per process: what it logged last. A line with `done` and `total` on it is shown as so far."""
    lines = [f"Starting, {seconds:.0f} s"]
    for program in programs:
        last: dict[str, Any] = next(reversed(tails[program.log].last()), {})
        part = f" ({last['done']} of {last['total']})" if "done" in last and "total" in last else ""
        lines.append(f"  {program.name:12} {last.get('event', program.state.lower())}{part}"[:100])
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


def _ready(config: Config, source: ModelSource, facts: ModelFacts, supervisor: Supervisor, seconds: float) -> str:
    """What to do with the engine now that it is ready."""
    host = _connect_host(config)
    host = f"[{host}]" if ":" in host else host
    lines = [f"Ready after {seconds:.1f} s: {source.name} with {config.ranks} ranks", ""]
    for index, port in enumerate(_ports(config)):
        lines.append(f"  OpenAI API   http://{host}:{port}/v1")
        lines.append(f"  zmq          {config.client_endpoint(index)}")
    control = shlex.join([str(Path(sys.executable).parent / "supervisorctl"), "-c", str(supervisor.conf), "status"])
    lines += [f"  logs         {supervisor.log.parent}/*.jsonl", f"  processes    {control}", "", "Try it:"]
    question = "What is the capital of France?"
    path = "chat/completions" if facts.chat else "completions"
    ask: Any = {"messages": [{"role": "user", "content": question}]} if facts.chat else {"prompt": question}
    body = json.dumps({"model": source.name, **ask, "max_tokens": 32, "temperature": 0})
    url = f"http://{host}:{config.port}/v1/{path}"
    lines.append(f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    return "\n".join(lines)
