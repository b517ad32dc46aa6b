"""The engine as an operator runs it: `rankbus serve`, supervisorctl, restarts of any process, an orderly end."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from frontend.client import Client
from tests.engine import ROOT, START_S, _free_ports

PROGRAMS = ["rankbus:executor-0", "rankbus:frontend-0", "rankbus:rank-0", "rankbus:rank-1"]


class Served:
    """A `rankbus serve` in the background, and what it prints."""

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = _free_ports(1)
        settings = {"model": model, "cache_dir": cache, "run_dir": self.run_dir, "port": self.port, "num_blocks": 129}
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in (settings | limits).items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend.cli", "serve", *flags],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """The first match in what was printed; the test fails if there is none in time."""
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, "\n".join(self.lines)), deadline_s)
        assert found, "\n".join(self.lines) + self.logs()
        return found

    def supervisorctl(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.run_dir / "supervisord.conf")]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60).stdout

    def pids(self) -> list[int]:
        """Every process that came of it."""
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]

    def logs(self) -> str:
        tails = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.run_dir.glob("log/*"))]
        return "\n".join(tails)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()


@pytest.fixture(scope="module")
def served(tiny_model: Path, engine_cache: Path) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        served = Served(Path(folder), tiny_model, engine_cache)
        try:
            served.wait_for("curl ", START_S)
            yield served
        finally:
            if served.process.poll() is None:
                served.process.send_signal(signal.SIGTERM)
                served.process.wait(60)


def answers(served: Served) -> bool:
    """Whether a request through the whole engine is served now."""
    try:
        with Client(f"ipc://{served.run_dir}/client-0.ipc", timeout_s=5) as client:
            return len(client.complete([5, 6, 7], text_output=False, max_tokens=3, ignore_eos=True)[0].token_ids) == 3
    except Exception:  # whatever is wrong now: it is asked again until the deadline
        return False


def wait_until(condition: Callable[[], Any], what: str, served: Served, deadline_s: float = START_S) -> None:
    until = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}\n{served.logs()}"
        pause.wait(0.2)


def test_the_curl_line_that_is_printed_works(served: Served) -> None:
    line = served.wait_for(r"curl .*", 1)[0]
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"], done.stdout + done.stderr


def test_four_programs_run(served: Served) -> None:
    states = dict(re.findall(r"^(\S+) +(\S+)", served.supervisorctl("status"), re.MULTILINE))
    assert states == dict.fromkeys(PROGRAMS, "RUNNING")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.timeout(180)
def test_restarting_any_program_brings_the_engine_back_and_no_request_hangs(served: Served, program: str) -> None:
    ends: list[str] = []

    def long_request(number: int) -> None:
        with Client(f"ipc://{served.run_dir}/client-0.ipc", timeout_s=60) as client:
            try:
                ends.append(client.complete([5, number], text_output=False, ignore_eos=True)[0].finished.reason)
            except Exception as error:
                ends.append(f"{type(error).__name__}: {error}")

    requests = [threading.Thread(target=long_request, args=(number,)) for number in range(4)]
    for thread in requests:
        thread.start()
    assert "started" in served.supervisorctl("restart", program)
    for thread in requests:
        thread.join(90)
    assert len(ends) == 4, "a request hangs"
    assert not [end for end in ends if end.startswith("Timeout")], ends
    wait_until(lambda: answers(served), f"requests are served after {program} was restarted", served)
    states = dict(re.findall(r"^(\S+) +(\S+)", served.supervisorctl("status"), re.MULTILINE))
    assert states == dict.fromkeys(PROGRAMS, "RUNNING")


def test_ctrl_c_ends_everything(served: Served) -> None:
    pids = served.pids()
    assert len(pids) == 6
    served.process.send_signal(signal.SIGINT)
    served.process.wait(60)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all processes have ended", served, 20)
