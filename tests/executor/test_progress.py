"""Progress as it is drawn on a terminal, and as it is logged elsewhere."""

import io
import json

import pytest
from rich.console import Console

from bus import log
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
    log.configure("executor", 0, 1, "info")
    told = show(Console(file=io.StringIO()))
    for done in range(101):
        told("loading weights", done, 100)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["percent"]) for line in lines] == [("loading weights", 0), ("loading weights", 100)]
