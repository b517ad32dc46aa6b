"""What `rankbus serve` reads from the processes' logs."""

from pathlib import Path

from frontend.serve import _progress
from frontend.supervision import LogTail, Program


def test_only_what_is_logged_from_now_on_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"event": "old"}\n')
    tail = LogTail(path)
    assert tail.last() == []
    with path.open("a") as log:
        log.write('{"event": "new"}\nsome library says so\n[1]\n{"event": "ne')
    assert tail.last() == [{"event": "new"}]


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = LogTail(path)
    assert tail.last() == []
    path.write_text('{"event": "first"}\n')
    assert tail.last() == [{"event": "first"}]


def test_a_rotated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"event": "long before"}\n' * 100)
    tail = LogTail(path)
    path.write_text('{"event": "after"}\n')
    assert tail.last() == [{"event": "after"}]


def test_a_long_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = LogTail(path)
    path.write_text("".join(f'{{"event": "{number}"}}\n' for number in range(100_000)))
    events = [line["event"] for line in tail.last()]
    assert events[-1] == "99999"
    assert len(events) < 5000


def test_progress_shows_bars_and_last_words(tmp_path: Path) -> None:
    lines = {
        "executor": '{"event": "compiling", "percent": 25}',
        "rank-0": '{"event": "scheduler loaded"}',
        "rank-1": "",
        "rank-2": '{"event": "odd", "percent": "x"}',
    }
    programs, tails = [], {}
    for name, line in lines.items():
        path = tmp_path / name
        tails[path] = LogTail(path)
        path.write_text(line)
        programs.append(Program(name, "RUNNING", 1, 0, path))
    told = _progress(programs, tails, 4.4).splitlines()
    assert told[0] == "Starting, 4 s"
    assert told[1].split() == ["executor", "compiling", "━" * 7 + "╌" * 23, "25", "%"]
    assert told[2].split(maxsplit=1) == ["rank-0", "scheduler loaded"]
    assert told[3].split() == ["rank-1", "running"]
    assert told[4].split() == ["rank-2", "odd"]
