"""A real engine for tests: its processes on ipc sockets in a folder of their own, watched through their logs.

    with Engine(model, cache_dir) as engine:
        engine.start()
        engine.wait_ready()

Every wait has a deadline, ends at once when a process that is waited for ends, and shows logs when it fails.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bus.config import Config, to_toml

ROOT = Path(__file__).parent.parent
START_S = 110.0
"""How long an engine may take to be ready: three imports of vLLM on two busy cores."""
STOP_S = 20.0
TAIL = 25
"""Log lines of each process that are shown when something fails."""
PROBE_S = 0.2

MODULES = {"executor": "executor", "rank": "ranks", "frontend": "frontend"}


class EngineProcess:
    """One start of one process. Its log lines arrive on a thread; what waits for them is woken by each."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        role, index = name.rsplit("-", 1)
        command = [sys.executable, "-m", MODULES[role], "--index", index]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def events(self) -> list[dict[str, Any]]:
        """The log lines so far that are JSON objects."""
        with self._changed:
            lines = list(self.lines)
        parsed = []
        for line in lines:
            try:
                parsed.append(json.loads(line))
            except ValueError:
                continue
        return [event for event in parsed if isinstance(event, dict)]

    def wait_for_log(self, event: str, deadline_s: float, **fields: Any) -> dict[str, Any]:
        """The first log line with this event and these fields; the test fails if there is none in time."""

        def found() -> dict[str, Any] | None:
            wanted = {"event": event, **fields}
            return next((line for line in self.events() if wanted.items() <= line.items()), None)

        until = time.monotonic() + deadline_s
        with self._changed:
            while (line := found()) is None:
                remaining = until - time.monotonic()
                if self._closed or remaining <= 0:
                    why = "ended" if self._closed else f"took longer than {deadline_s:g} s"
                    raise AssertionError(f"{self.name} {why} without logging {event!r} {fields}\n{self.tail()}")
                self._changed.wait(remaining)
        return line

    def wait_for_end(self, deadline_s: float) -> int:
        """The exit code; the test fails if the process does not end in time."""
        try:
            code = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {deadline_s:g} s\n{self.tail()}") from None
        self._reader.join(STOP_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        self._process.send_signal(number)

    def tail(self) -> str:
        """The last lines it logged."""
        with self._changed:
            lines = self.lines[-TAIL:]
        readable = [line.replace("\\n", "\n") if '"exception"' in line else line for line in lines]
        return "\n".join([f"--- {self.name}, pid {self.pid}, exit code {self.exit_code}", *readable])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Engine:
    """An engine that serves the model in `model`. `settings` are those of `bus.config.Config`.

    Processes are named like ``rank-0``. Leaving the `with` block ends all of them, whatever happened.
    """

    def __init__(self, model: Path, cache_dir: Path, **settings: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rb-"))  # short: an ipc path has few bytes
        defaults = {
            "model": str(model),
            "cache_dir": str(cache_dir),
            "run_dir": str(self._folder / "run"),
            "port": _free_ports(settings.get("frontends", 1)),
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "num_blocks": 256,
        }
        self.config = Config(**(defaults | settings))
        self.config.run_path.mkdir(mode=0o700)
        (self._folder / "config.toml").write_text(to_toml(self.config))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANKBUS_")}
        self._environment = inherited | {
            "RANKBUS_CONFIG": str(self._folder / "config.toml"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: dict[str, EngineProcess] = {}
        self._ended: list[EngineProcess] = []

    @property
    def names(self) -> list[str]:
        """All processes the configuration calls for."""
        ranks = [f"rank-{index}" for index in range(self.config.ranks)]
        return ["executor-0", *ranks, *(f"frontend-{index}" for index in range(self.config.frontends))]

    def __getitem__(self, name: str) -> EngineProcess:
        """The start of a process that runs, or ran last without being stopped."""
        return self._processes[name]

    def start(self, *names: str, **settings: str) -> None:
        """Start these processes, or all, with `settings` that no other process has."""
        environment = self._environment | {f"RANKBUS_{key.upper()}": value for key, value in settings.items()}
        for name in names or self.names:
            if name in self._processes:
                raise AssertionError(f"{name} was started before and not stopped")
            self._processes[name] = EngineProcess(name, environment)

    def stop(self, *names: str, by: signal.Signals = signal.SIGTERM) -> dict[str, int]:
        """End these processes, or all, and wait until they have; returns their exit codes."""
        stopping = {name: self._processes[name] for name in names or list(self._processes)}
        for process in stopping.values():
            process.send_signal(by)
        codes = {name: process.wait_for_end(STOP_S) for name, process in stopping.items()}
        for name, process in stopping.items():
            del self._processes[name]
            self._ended.append(process)
        return codes

    def restart(self, *names: str, by: signal.Signals = signal.SIGTERM) -> None:
        """End these processes and start them again."""
        self.stop(*names, by=by)
        self.start(*names)

    def wait_ready(self, deadline_s: float = START_S) -> None:
        """Until every frontend says over HTTP that it can serve."""
        for index in range(self.config.frontends):
            self.wait_until(lambda index=index: self.healthy(index), f"frontend-{index} is ready", deadline_s)

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Ask `condition` again and again; the test fails if that takes too long, or a process ends unasked."""
        until = time.monotonic() + deadline_s
        woken = threading.Event()
        while not condition():
            self.check_running()
            if time.monotonic() >= until:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self.tails()}")
            woken.wait(PROBE_S)

    def check_running(self) -> None:
        """The test fails if a process that was started and not stopped has ended."""
        for name, process in self._processes.items():
            if process.exit_code is not None:
                raise AssertionError(f"{name} has ended\n{self.tails()}")

    def healthy(self, frontend: int = 0) -> bool:
        """Whether a frontend answers /health with 200."""
        connection = http.client.HTTPConnection(self.config.host, self.port(frontend), timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def port(self, frontend: int = 0) -> int:
        """The HTTP port of a frontend."""
        return self.config.port + frontend

    def tails(self) -> str:
        """The last log lines of all processes."""
        return "\n".join(process.tail() for process in [*self._ended, *self._processes.values()])

    def close(self) -> None:
        """End every process, orderly if possible, and remove the folder."""
        running = [process for process in self._processes.values() if process.exit_code is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        stuck = []
        for process in running:
            try:
                process.wait_for_end(STOP_S)
            except AssertionError:
                process.send_signal(signal.SIGKILL)
                process.wait_for_end(STOP_S)
                stuck.append(process.name)
        print(self.tails())  # pytest shows it if the test fails
        shutil.rmtree(self._folder)
        if stuck:
            raise AssertionError(f"did not end on SIGTERM: {', '.join(stuck)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except AssertionError:
            if error is None:
                raise


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True
