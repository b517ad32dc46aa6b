"""supervisord as `rankbus serve` runs it: its configuration, its process, what it says, and what its programs log."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import xmlrpc.client
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from supervisor.xmlrpc import SupervisorTransport

from bus import config as configuration
from bus.config import Config
from bus.process import end_with_parent

CONFIG_NAME = "config.toml"
"""The file in run_dir with the configuration that all processes read."""
POLL_S = 0.25
STOP_S = 20.0
"""How long supervisord may take to end: the programs have stopwaitsecs, and it looks once a second."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Program(NamedTuple):
    """What supervisord says of one process. `exit_code` is that of its last end, if it is not running."""

    name: str
    state: str
    pid: int
    exit_code: int
    log: Path


class Supervisor:
    """A supervisord of ours: its configuration, its process, and what it says over its socket.

    `template` is the text of supervisord.conf, with places for what `config` says.
    """

    def __init__(self, config: Config, template: str) -> None:
        self.conf = config.run_path / "supervisord.conf"
        self.log = config.run_path / "log" / "supervisord.log"
        self.log.parent.mkdir(exist_ok=True)
        toml = config.run_path / CONFIG_NAME
        toml.write_text(configuration.to_toml(config))
        self.conf.write_text(fill_in(template, config))
        settings = {f"RANKBUS_{field.name.upper()}" for field in msgspec.structs.fields(Config)}
        self._environ = {name: value for name, value in os.environ.items() if name not in settings}
        self._environ["RANKBUS_CONFIG"] = str(toml)
        self._run_path = config.run_path
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start supervisord, in a session of its own: Ctrl-C is for us, and we stop it in order."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "--silent", "-c", str(self.conf)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environ,
            preexec_fn=end_with_us,
        )

    def exit_code(self) -> int | None:
        """The code supervisord ended with; None while it runs."""
        assert self._child is not None
        return self._child.poll()

    def programs(self) -> list[Program]:
        """All programs; empty while supervisord is starting or ending."""
        try:
            infos: Any = rpc(
                self._run_path
            ).supervisor.getAllProcessInfo()  # a connection that failed once is of no use
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

    def last_end(self, name: str) -> str:
        """How a program ended last, in supervisord's words."""
        ends = re.findall(rf"exited: {re.escape(name)} \((.*?)(?:; (?:not )?expected)?\)", self.log.read_text())
        return ends[-1] if ends else "stopped"

    def stop(self) -> None:
        """End supervisord and all programs. A second signal meanwhile ends them without asking."""
        assert self._child is not None
        deadline = time.monotonic() + STOP_S
        if self._child.poll() is None:
            self._child.terminate()
        while self._child.poll() is None:
            signalled = signal.sigtimedwait(STOP_SIGNALS, POLL_S)
            if signalled or time.monotonic() > deadline:
                self._child.kill()  # the programs end with it (bus.process)
                self._child.wait()


def fill_in(template: str, config: Config) -> str:
    """Put the configuration into the text of supervisord.conf."""
    values = {
        "RANKBUS_RUN_DIR": str(config.run_path),
        "RANKBUS_FRONTENDS": str(config.frontends),
        "RANKBUS_RANKS": str(config.ranks),
        "RANKBUS_LOCAL_EXECUTORS": str(config.local_executors),
        "RANKBUS_PYTHON": sys.executable,
    }
    return re.sub(r"%\(ENV_(\w+)\)s", lambda match: values[match[1]].replace("%", "%%"), template)


def rpc(run_path: Path) -> xmlrpc.client.ServerProxy:
    """supervisord's interface in `run_path`."""
    transport = SupervisorTransport("", "", f"unix://{run_path}/ctl")
    return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)


def end_with_us() -> None:
    """In a child, before its program runs: end when this process ends, and take signals as usual."""
    end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


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
