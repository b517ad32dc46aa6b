"""``rankbus top``: what it makes of two snapshots. A real engine is looked at in tests/process."""

import io

import pytest
from rich.console import Console

from bus import log
from frontend.sight import RankSight
from frontend.top import Screen, View, imbalance, main
from tests.frontend.test_dashboard import made


def shown(view: View | None, selected: int | None = None, said: str = "") -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(Screen(view, selected, said).render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_rates_are_those_between_the_snapshots() -> None:
    log.recent.clear()
    log.recent.append(log.Line("2030-01-31T12:34:56Z", "warning", "peer down, peer=rank/1"))
    lines = shown(View(made(60), made(65)), selected=1, said="pause rank 1: done")
    assert "tiny <model>" in lines[0]
    assert lines[0].endswith("ready")
    names, first, second = (line.split() for line in lines[1:4])
    assert names[:4] == ["rank", "state", "running", "waiting"]
    # rank, state, running, waiting, idle sessions, KV, hits, tokens/s, preempted, drafts right, steps/s, ms/step, …
    assert first == ["0", "up", "4", "2", "2", "35%", "25%", "50.0", "3", "75%", "10.0", "100.00", "1.00", "0.00", "0"]
    assert second == [
        "▸",
        "1",
        "up",
        "5",
        "2",
        "2",
        "35%",
        "25%",
        "100.0",
        "3",
        "75%",
        "10.0",
        "100.00",
        "1.00",
        "0.00",
        "0",
    ]
    assert lines[4] == "imbalance  8%"
    assert lines[5].startswith("executor   10.0 steps/s of 0.0 sequences; ms per step: device 50.00, dispatch 0.00")
    assert "ranks missed 3 times" in lines[5]
    assert lines[6].startswith("frontend 0 9 unfinished, 0.0 ended/s, 0 refused")
    assert "first token p50 55 ms p99 99 ms" in lines[6]
    assert lines[7] == "12:34:56 peer down, peer=rank/1"
    assert lines[8].endswith("q quit   pause rank 1: done")


def test_what_is_down_or_begins_anew_has_no_rates() -> None:
    log.recent.clear()
    lines = shown(View(made(65), made(66, up=(1,), ready=False), "connection lost"))
    assert lines[0].endswith("not ready  connection lost")
    assert lines[2].split() == ["0", "down"]
    assert lines[5] == "executor   down"
    again = shown(View(made(65), made(3)))  # all counters are smaller
    assert again[2].split()[7] == "–"
    alone = shown(View(made(65), made(65)))
    assert alone[2].split()[7] == "–"
    assert shown(None, said="nobody answers") == ["nobody answers"]


def test_imbalance_is_of_ranks_that_are_up() -> None:
    ranks = [RankSight(rank=0, running=6), RankSight(rank=1, running=2), RankSight(rank=2, up=False)]
    assert imbalance(ranks) == "50%"
    assert imbalance([RankSight(rank=0)]) == "–"


def test_no_frontend_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("frontend.top.CONNECT_S", 0.5)
    assert main(["--once", "--port", "1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
