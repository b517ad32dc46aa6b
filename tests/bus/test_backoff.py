"""A crash loop slows down; anything else starts at once."""

from pathlib import Path

import pytest

from bus.backoff import LONGEST_S, QUICK_S, Backoff


def test_a_crash_loop_waits_longer_each_time(tmp_path: Path) -> None:
    now = 1000.0
    delays = []
    for _ in range(10):
        delay = Backoff(tmp_path, "rank-0").delay(now)
        delays.append(delay)
        now += delay + 3.0  # it lives three seconds
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S, LONGEST_S]


def test_living_long_ends_the_loop(tmp_path: Path) -> None:
    backoff = Backoff(tmp_path, "rank-0")
    assert [backoff.delay(now) for now in (0.0, 1.0, 2.0)] == [0.0, 0.5, 1.0]
    assert backoff.delay(3.0 + QUICK_S) == 0.0
    assert backoff.delay(4.0 + QUICK_S) == 0.5


def test_an_orderly_end_is_no_crash(tmp_path: Path) -> None:
    backoff = Backoff(tmp_path, "rank-0")
    backoff.delay(0.0)
    backoff.delay(1.0)
    backoff.ended_well()
    assert backoff.delay(2.0) == 0.0


def test_processes_are_counted_apart(tmp_path: Path) -> None:
    Backoff(tmp_path, "rank-0").delay(0.0)
    assert Backoff(tmp_path, "rank-1").delay(0.1) == 0.0
    assert Backoff(tmp_path, "rank-0").delay(0.2) == 0.5


def test_a_clock_that_began_anew_is_no_crash(tmp_path: Path) -> None:
    Backoff(tmp_path, "rank-0").delay(5000.0)
    assert Backoff(tmp_path, "rank-0").delay(10.0) == 0.0


@pytest.mark.parametrize("content", ["", "{", "[]", '["a", "b"]', "[1]", "null", "[null, 0]"])
def test_a_harmed_file_is_a_first_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    assert Backoff(tmp_path, "rank-0").delay(1.0) == 0.0
    assert Backoff(tmp_path, "rank-0").delay(2.0) == 0.5


def test_a_restart_during_the_wait_is_asked_for_and_starts_at_once(tmp_path: Path) -> None:
    backoff = Backoff(tmp_path, "rank-0")
    assert [backoff.delay(now) for now in (0.0, 1.0, 2.5, 4.5)] == [0.0, 0.5, 1.0, 2.0]
    assert backoff.delay(5.0) == 0.0


def test_counting_never_overflows(tmp_path: Path) -> None:
    backoff = Backoff(tmp_path, "rank-0")
    now, delays = 0.0, []
    for _ in range(1200):
        delays.append(backoff.delay(now))
        now += delays[-1] + 1.0
    assert set(delays[10:]) == {LONGEST_S}
