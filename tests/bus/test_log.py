"""Logs are JSON lines on standard error; a script that sets no logging up hears of troubles alone."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TALK = (
    "log.get_logger().info('told', step=3); log.get_logger().warning('warned'); logging.getLogger('lib').warning('hm')"
)


def _run(code: str) -> "subprocess.CompletedProcess[str]":
    code = f"import logging; from bus import log\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)


def test_every_line_says_whose_it_is() -> None:
    done = _run(f"log.configure('rank', 1, 7, 'info'); {TALK}")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["told", "warned", "hm"]
    assert all((line["role"], line["index"], line["incarnation"]) == ("rank", 1, 7) for line in lines)
    assert lines[0]["step"] == 3
    assert done.stdout == ""


def test_a_script_is_told_of_troubles_alone() -> None:
    done = _run(TALK)
    assert "told" not in done.stderr
    assert "warned" in done.stderr
    assert done.stdout == ""


def test_a_logger_made_before_follows_the_configuration() -> None:
    done = _run("early = log.get_logger(); log.configure('rank', 1, 7, 'info'); early.info('told')")
    assert json.loads(done.stderr)["role"] == "rank"


def test_the_latest_troubles_are_kept_with_what_they_are_about() -> None:
    trouble = "log.get_logger().error('refused', peer='rank/1', detail='too long', step=4)"
    failure = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.get_logger().exception('failed')"
    done = _run(
        f"log.configure('rank', 1, 7, 'info'); {TALK}; {trouble}\n{failure}\nprint([x[1:] for x in log.recent])"
    )
    assert done.stdout.strip() == str(
        [
            ("warning", "warned"),
            ("warning", "hm"),
            ("error", "refused, peer=rank/1, detail=too long"),
            ("error", "failed: ZeroDivisionError: division by zero"),
        ]
    )
