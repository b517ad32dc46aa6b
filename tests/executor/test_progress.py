"""Progress as it is drawn on a terminal, and as it is logged elsewhere."""

import io

import pytest
from rich.console import Console

from executor.progress import show


def test_a_terminal_gets_a_bar_for_each_kind_of_work() -> None:
    screen = io.StringIO()
    told = show(Console(file=screen, force_terminal=True, width=100))
    for what in ("loading weights", "compiling programs"):
        for done in range(5):
            told(what, done, 4)
    drawn = screen.getvalue()
    assert "loading weights" in drawn
    assert "compiling programs" in drawn
    assert "100%" in drawn


def test_elsewhere_only_the_start_and_the_end_of_quick_work_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    told = show(Console(file=io.StringIO()))
    for done in range(101):
        told("loading weights", done, 100)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loading weights" in line]
    assert len(lines) == 2
    assert "percent=0" in lines[0]
    assert "percent=100" in lines[1]
