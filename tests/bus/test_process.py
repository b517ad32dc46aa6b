"""How a process begins and ends."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


def _process(body: str, run_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "import sys\nfrom bus import config, process\ndef run(config, me):\n" + body + "\nprocess.main('rank', run)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"RANKBUS_RUN_DIR": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_the_body_learns_who_it_is(tmp_path: Path) -> None:
    done = _process(
        "    print(me.role, me.index, me.incarnation > 0, config.ranks)", tmp_path, "--index=3", "--ranks=5"
    )
    assert (done.returncode, done.stdout) == (0, "rank 3 True 5\n")
    assert list((tmp_path / "starts").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "arguments", "code", "event"),
    [
        ("    raise config_error('port: no')", (), 78, "port: no"),
        ("    pass", ("--ranks", "none"), 78, "ranks: None is not allowed; it must be a whole number"),
        ("    pass", ("--rnks", "1"), 78, "--rnks is not a setting"),
        ("    1 / 0", (), 1, "the process ends by an error"),
    ],
)
def test_why_it_ended_is_logged_with_its_code(
    tmp_path: Path, body: str, arguments: tuple[str, ...], code: int, event: str
) -> None:
    body = body.replace("config_error", "__import__('bus.config').config.ConfigError")
    done = _process(body, tmp_path, "--index", "1", *arguments)
    assert done.returncode == code
    line = json.loads(done.stderr.splitlines()[-1])
    assert (line["role"], line["index"], line["exit_code"]) == ("rank", 1, code)
    assert line["event"].startswith(event)


def test_a_crash_is_remembered_by_the_next_start(tmp_path: Path) -> None:
    for _ in range(2):
        _process("    1 / 0", tmp_path)
    quick, _ = json.loads((tmp_path / "starts" / "rank-0.json").read_text())
    assert quick == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    reading, writing = os.pipe()
    child = (
        "import os, signal, sys; from bus import process; process.end_with_parent(signal.Signals(int(sys.argv[2]))); "
        "os.write(int(sys.argv[1]), b'up'); signal.pause()"
    )
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], close_fds=False)"
    started = subprocess.Popen(
        [sys.executable, "-c", parent, child, str(writing), str(int(number))], cwd=ROOT, pass_fds=[writing]
    )
    os.close(writing)
    try:
        assert select.select([reading], [], [], DEADLINE_S)[0]
        assert os.read(reading, 2) == b"up"
    finally:
        started.kill()
        started.wait()
    assert select.select([reading], [], [], DEADLINE_S)[0], "the child goes on without its parent"
    assert os.read(reading, 1) == b""  # the last holder of the other end has ended
    os.close(reading)
