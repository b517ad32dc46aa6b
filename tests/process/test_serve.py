"""`rankbus serve` with the real supervisord and the real supervisord.conf; only the programs are stand-ins."""

import os
import queue
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bus import config as configuration
from bus.config import Config
from frontend import supervision
from tests import models

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40.0
WRAPPER = """
import pathlib, sys
import frontend.cli, frontend.serve
frontend.serve.TEMPLATE = pathlib.Path(sys.argv.pop(1))
sys.exit(frontend.cli.main())
"""


def _free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


class Engine:
    """One run of `rankbus serve` whose output is read as it comes."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.run = folder / "run"
        self.port = _free_port(4)
        template = folder / "supervisord.conf"
        text = (ROOT / "supervisord.conf").read_text()
        program = shlex.quote(str(ROOT / "tests" / "process" / "stand_in.py"))
        template.write_text(re.sub(r"-m (frontend|rank|executor)s?\b", rf"{program} \1", text))
        model = folder / "tiny"
        if not model.exists():
            models.write_folder(model)
        flags = ["--model", str(model), "--run-dir", str(self.run), "--port", str(self.port), *arguments]
        self.child = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, str(template), "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._pidfds: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def until(self, pattern: str) -> str:
        """Read the output up to a line that matches."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            line = self._queue.get(timeout=deadline - time.monotonic())
            assert line is not None, f"it ended without saying {pattern!r}: {self.lines}"
            self.lines.append(line)
            if re.search(pattern, line):
                return line

    def ready(self) -> None:
        """Let it become ready, and note all its processes."""
        self.run.mkdir(mode=0o700, exist_ok=True)
        (self.run / "ready").touch()
        self.until("^curl ")
        self._pidfds = [os.pidfd_open(pid) for pid in [self.supervisord(), *self.pids().values()]]

    def supervisord(self) -> int:
        return int((self.run / "supervisord.pid").read_text())

    def programs(self) -> dict[str, dict[str, object]]:
        infos: list[dict[str, object]] = supervision.rpc(self.run).supervisor.getAllProcessInfo()  # type: ignore[assignment]
        return {str(info["name"]): info for info in infos}

    def pids(self) -> dict[str, int]:
        return {name: int(str(info["pid"])) for name, info in self.programs().items() if info["pid"]}

    def wait_for_state(self, name: str, state: str) -> None:
        deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
        while (found := self.programs()[name]["statename"]) != state:
            assert time.monotonic() < deadline, f"{name} is {found}, not {state}"
            pause.wait(0.05)

    def end(self) -> int:
        """Wait for its end; returns the exit code. All processes noted by `ready` must have ended, too."""
        code = self.child.wait(DEADLINE_S)
        self.all_ended()
        return code

    def all_ended(self) -> None:
        """Wait until all processes noted by `ready` have ended."""
        for descriptor in self._pidfds:
            assert select.select([descriptor], [], [], DEADLINE_S)[0], "a process was left running"
            os.close(descriptor)
        self._pidfds = []

    def output(self) -> str:
        while (line := self._queue.get(timeout=DEADLINE_S)) is not None:
            self.lines.append(line)
        return "\n".join(self.lines)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines put in here are ended after the test, whatever happened."""
    made: list[Engine] = []
    yield made
    for engine in made:
        if engine.child.poll() is None:
            engine.child.kill()
        engine.child.wait()
        engine.all_ended()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal_and_leaves_nothing(
    folder: Path, engines: list[Engine], number: signal.Signals
) -> None:
    engine = Engine(folder)
    engines.append(engine)
    engine.ready()
    assert re.search(r"Ready after [\d.]+ s: tiny with 2 ranks", "\n".join(engine.lines))
    assert f"http://127.0.0.1:{engine.port}/v1/chat/completions" in engine.lines[-1]
    assert engine.run.stat().st_mode & 0o777 == 0o700
    [command] = [line for line in engine.lines if "supervisorctl" in line]
    told = subprocess.run(shlex.split(command.partition("processes")[2]), capture_output=True, text=True, timeout=30)
    assert [line.split()[:2] for line in told.stdout.splitlines()] == [
        ["rankbus:executor-0", "RUNNING"],
        ["rankbus:frontend-0", "RUNNING"],
        ["rankbus:rank-0", "RUNNING"],
        ["rankbus:rank-1", "RUNNING"],
    ]
    engine.child.send_signal(number)
    assert engine.end() == 0


def test_supervisord_that_comes_up_late_is_heard(folder: Path) -> None:
    template = (ROOT / "supervisord.conf").read_text()
    config = Config(run_dir=str(folder / "run"), ranks=1)
    config.run_path.mkdir(mode=0o700)
    supervisor = supervision.Supervisor(config, re.sub(r"command = .*", "command = /bin/cat", template))
    assert supervisor.programs() == []  # nobody answers yet
    supervisor.start()
    try:
        deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
        while not (programs := supervisor.programs()):
            assert time.monotonic() < deadline, "it is never heard"
            pause.wait(0.05)
        assert [program.name for program in programs] == ["executor-0", "frontend-0", "rank-0"]
    finally:
        supervisor.stop()
    assert supervisor.exit_code() == 0


def test_several_frontends_ranks_and_executors(folder: Path, engines: list[Engine]) -> None:
    coordinator = f"127.0.0.1:{_free_port()}"
    engine = Engine(folder, "--frontends", "2", "--ranks=3", "--executors=2", "--coordinator", coordinator)
    engines.append(engine)
    engine.ready()
    executors, frontends = ["executor-0", "executor-1"], ["frontend-0", "frontend-1"]
    assert sorted(engine.pids()) == [*executors, *frontends, "rank-0", "rank-1", "rank-2"]
    text = "\n".join(engine.lines)
    for index in range(2):
        assert f"http://127.0.0.1:{engine.port + index}/v1" in text
        assert f"ipc://{engine.run}/client-{index}.ipc" in text


def test_flags_win_over_the_environment_in_every_process(folder: Path, engines: list[Engine]) -> None:
    engine = Engine(folder, RANKBUS_PORT="1", RANKBUS_RUN_DIR="/nowhere", RANKBUS_MAX_NUM_SEQS="7")
    engines.append(engine)
    engine.ready()  # only a frontend on the port of the flag answers
    config = configuration.load({}, {}, engine.run / "config.toml")
    assert (config.port, config.run_path, config.max_num_seqs) == (engine.port, engine.run, 7)


def test_a_killed_serve_takes_all_processes_with_it(folder: Path, engines: list[Engine]) -> None:
    engine = Engine(folder)
    engines.append(engine)
    engine.ready()
    engine.child.kill()
    assert engine.end() == -signal.SIGKILL


def test_a_killed_process_is_started_again_and_told_of(folder: Path, engines: list[Engine]) -> None:
    engine = Engine(folder)
    engines.append(engine)
    engine.ready()
    killed = engine.pids()["rank-1"]
    os.kill(killed, signal.SIGKILL)
    engine.until(r"rank-1 ended \(terminated by SIGKILL\) and was started again")
    assert engine.pids()["rank-1"] != killed


def test_a_killed_supervisord_takes_all_processes_with_it(folder: Path, engines: list[Engine]) -> None:
    engine = Engine(folder)
    engines.append(engine)
    engine.ready()
    os.kill(engine.supervisord(), signal.SIGKILL)
    assert engine.end() not in (0, None)
    assert "supervisord ended with code -9" in engine.output()


def test_a_configuration_that_cannot_be_used_stops_everything(folder: Path, engines: list[Engine]) -> None:
    (folder / "run").mkdir(mode=0o700)
    (folder / "run" / "rank-1.refuse").write_text("num_blocks: 1 is too few; it must be at least 2")
    engine = Engine(folder)
    engines.append(engine)
    assert engine.end() == 78
    assert "rank-1: num_blocks: 1 is too few; it must be at least 2" in engine.output()
    log = (engine.run / "log" / "rank-1.jsonl").read_text()
    assert log.count("the stand-in runs") == 1  # it was not started again


def test_a_process_that_ends_well_is_left_ended(folder: Path, engines: list[Engine]) -> None:
    (folder / "run").mkdir(mode=0o700)
    (folder / "run" / "rank-1.exit").write_text("0")
    engine = Engine(folder)
    engines.append(engine)
    engine.ready()
    engine.wait_for_state("rank-1", "EXITED")
    log = (engine.run / "log" / "rank-1.jsonl").read_text()
    assert log.count("the stand-in runs") == 1


def test_a_crash_loop_backs_off(folder: Path, engines: list[Engine]) -> None:
    (folder / "run").mkdir(mode=0o700)
    (folder / "run" / "rank-0.exit").write_text("3")
    engine = Engine(folder)
    engines.append(engine)
    for _ in range(3):
        engine.until(r"rank-0 ended \(exit status 3\) and was started again")
    log = engine.run / "log" / "rank-0.jsonl"
    starts = [msgspec.json.decode(line) for line in log.read_bytes().splitlines() if b"the stand-in runs" in line]
    times = [start["incarnation"] / 1e9 for start in starts]
    # The third start is waiting, or has waited; an incarnation is made before the wait, so look at the waits behind
    assert times[2] - times[1] >= 0.5
    engine.child.send_signal(signal.SIGTERM)  # while the next start waits, or is about to
    assert engine.end() == 0


def test_all_processes_ended(folder: Path, engines: list[Engine]) -> None:
    (folder / "run").mkdir(mode=0o700)
    for name in ("frontend-0", "rank-0", "rank-1", "executor-0"):
        (folder / "run" / f"{name}.exit").write_text("0")
    engine = Engine(folder)
    engines.append(engine)
    assert engine.end() == 0
    assert "All processes have ended" in engine.output()


def test_a_bad_model_is_refused_before_anything_runs(folder: Path, engines: list[Engine]) -> None:
    models.write_folder(folder / "tiny", architectures=["GPT2LMHeadModel"])
    engine = Engine(folder)
    engines.append(engine)
    assert engine.end() == 78
    assert "architecture GPT2LMHeadModel is not supported" in engine.output()
    assert not engine.run.exists()


def test_a_gguf_file_is_prepared_first(folder: Path, engines: list[Engine]) -> None:
    file = models.write_gguf(folder / "tiny2.gguf")
    engine = Engine(folder, "--model", str(file), "--cache-dir", str(folder / "cache"))
    engines.append(engine)
    engine.ready()
    text = "\n".join(engine.lines)
    assert "Preparing tiny2" in text
    assert "tiny2 with 2 ranks" in text
    assert "/v1/chat/completions" in engine.lines[-1]


def test_a_gguf_file_that_cannot_be_prepared(folder: Path, engines: list[Engine]) -> None:
    file = folder / "bad.gguf"
    file.write_bytes(b"no")
    engine = Engine(folder, "--model", str(file), "--cache-dir", str(folder / "cache"))
    engines.append(engine)
    assert engine.end() == 78
    assert "is not a whole GGUF file" in engine.output()


def test_a_run_dir_in_use_is_refused(folder: Path, engines: list[Engine]) -> None:
    first = Engine(folder)
    engines.append(first)
    first.ready()
    second = Engine(folder)
    engines.append(second)
    assert second.end() == 78
    assert "an engine is already running" in second.output()
    assert first.programs()["executor-0"]["statename"] == "RUNNING"


def test_a_port_in_use_is_refused(folder: Path, engines: list[Engine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = Engine(folder, "--port", str(port))
        engines.append(engine)
        assert engine.end() == 78
    assert f"port: 127.0.0.1 port {port} cannot be used" in engine.output()


def test_a_run_dir_of_others_is_refused_and_left_as_it_is(folder: Path, engines: list[Engine]) -> None:
    shared = folder / "run"
    shared.mkdir(mode=0o755)
    (shared / "file").touch()
    engine = Engine(folder)
    engines.append(engine)
    assert engine.end() == 78
    assert f"run_dir: others can enter {shared}" in engine.output()
    assert shared.stat().st_mode & 0o777 == 0o755


def test_a_run_dir_that_cannot_be_made_is_refused(folder: Path, engines: list[Engine]) -> None:
    (folder / "file").touch()
    engine = Engine(folder, "--run-dir", str(folder / "file" / "run"))
    engines.append(engine)
    assert engine.end() == 78
    assert "cannot be used (Not a directory)" in engine.output()


def test_a_setting_that_does_not_exist_is_refused(folder: Path, engines: list[Engine]) -> None:
    engine = Engine(folder, "--prot", "8000")
    engines.append(engine)
    assert engine.end() == 78
    assert "--prot is not a setting" in engine.output()
