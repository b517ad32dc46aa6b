"""``rankbus journal``: what is shown, in which form, and where two journals part."""

import json
from pathlib import Path
from typing import Any

import pytest

from bus import messages as m
from bus.config import Config
from bus.core import Drained, Event, Peer, PeerDown, PeerUp, Received, Send, Stop, Tick, WakeAt
from bus.journal.command import main
from bus.links import Identity
from bus.wire import pack_floats, pack_ints
from tests.journals import INCARNATION, Nothing, Recording

EXECUTOR = Peer("step", "executor", 0, 5)
FRONTEND = Peer("command", "frontend", 0, 6)


class Script:
    """A core that answers with what it is told."""

    def __init__(self) -> None:
        self.effects: list[Any] = []

    def handle(self, event: Event) -> list[Any]:
        effects, self.effects = self.effects, []
        return effects


def record(folder: Path, last_tokens: tuple[int, ...] = (7, 8), extra: int = 0) -> None:
    """Two requests run for a step on a rank, then the process is told to stop."""
    core = Script()
    recording = Recording(folder, Identity("rank", 0, INCARNATION), core, Nothing(), Config())

    def add(request_id: str, handle: int) -> m.AddRequest:
        return m.AddRequest(
            handle=handle,
            sequence=handle,
            request_id=request_id,
            prompt_token_ids=pack_ints([1, 2]),
            sampling=m.Sampling(seed=1, max_tokens=1),
            block_hashes=memoryview(bytes(16)),
        )

    def row(row: int, request_id: str) -> m.NewRow:
        tokens, sampling = pack_ints([1, 2]), m.Sampling(seed=1, max_tokens=1)
        return m.NewRow(row=row, request_id=request_id, prompt_token_ids=tokens, block_ids=tokens, sampling=sampling)

    for peer in (EXECUTOR, FRONTEND):
        recording.handle(PeerUp(peer))
    recording.handle(Received(FRONTEND, add("a", 3)))
    recording.handle(Received(FRONTEND, m.AddRequests(requests=[add("b", 4)])))
    recording.handle(Tick(1.0, 2.0, {"bus_sent_frames/step": 3.0}))
    core.effects = [
        Send(EXECUTOR, m.PartialSchedule(step=1, rows=pack_ints([0, 1]), new=[row(0, "a"), row(1, "b")])),
        WakeAt(2.5),
    ]
    recording.handle(Drained(1.25))
    logprobs = m.Logprobs(
        owner=0, positions=1, token_ids=pack_ints([7]), values=pack_floats([-0.5]), ranks=pack_ints([1])
    )
    core.effects = [Send(FRONTEND, m.Outputs(step=1, handles=pack_ints([3, 4]), tokens=pack_ints(last_tokens)))]
    recording.handle(Received(EXECUTOR, m.StepResult(step=1, tokens=pack_ints(last_tokens), logprobs=[logprobs])))
    core.effects = [Send(EXECUTOR, m.PartialSchedule(step=2, rows=pack_ints([1])))]
    recording.handle(Drained(1.5))
    recording.handle(Drained(1.75))
    for _ in range(extra):
        recording.handle(Drained(1.8))
        recording.handle(PeerDown(FRONTEND, "it ended"))
    core.effects = [Stop("enough")]
    recording.handle(PeerDown(EXECUTOR, "it ended"))
    recording.end()


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    record(tmp_path)

    def show(*arguments: str) -> list[Any]:
        assert main(["show", str(tmp_path), "--json", *arguments]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return show


def numbers(shown: list[Any]) -> list[int]:
    return [one["number"] for one in shown]


def test_shows_all_but_idle_events(show: Any) -> None:
    assert numbers(show()) == [1, 2, 3, 4, 6, 7, 8, 10]
    assert numbers(show("--all")) == list(range(1, 11))
    assert next(one["event"]["fields"] for one in show("--type", "Tick")) == {
        "now": 1.0,
        "wall": 2.0,
        "bus_counters": {"bus_sent_frames/step": 3.0},
    }


def test_shows_frames_field_by_field(show: Any) -> None:
    (result,) = show("--type", "StepResult")
    assert result["event"] == {
        "type": "StepResult",
        "peer": "step:executor/0",
        "fields": {
            "step": 1,
            "tokens": [7, 8],
            "logprobs": [{"owner": 0, "positions": 1, "token_ids": [7], "values": [-0.5], "ranks": [1]}],
        },
    }
    (outputs,) = result["effects"]
    assert outputs["type"] == "Outputs"
    assert outputs["peer"] == "command:frontend/0"
    (added,) = show("--type", "AddRequest")
    assert added["event"]["fields"]["block_hashes"] == ["0" * 32]
    assert [one["fields"] for one in show("--type", "WakeAt")[0]["effects"]][1] == 2.5
    assert show("--type", "Stop")[0]["effects"][0]["fields"] == "enough"


def test_filters_by_step_request_and_time(show: Any) -> None:
    assert numbers(show("--step", "1")) == [6, 7]
    assert numbers(show("--step", "2:")) == [8]
    assert numbers(show("--request", "a")) == [3, 6, 7]
    assert numbers(show("--request", "b")) == [4, 6, 7, 8]
    assert show("--request", "nobody") == []
    assert show("--since", "1000") == []
    assert len(show("--until", "1000", "--since", "2020-01-01T00:00:00")) == 8


def test_shows_lines_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"rank/0, incarnation {INCARNATION}, code ")
    assert "#7  <- StepResult step:executor/0 step=1 tokens=[7, 8] logprobs=[{owner=0" in out
    assert "-> Outputs command:frontend/0 step=1 handles=[3, 4] tokens=[7, 8]\n" in out


def test_says_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["show", str(tmp_path)]) == 1
    assert "records from 2 on cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--step", "x"], ["--since", "yesterday"]])
def test_refuses_what_it_does_not_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    record(tmp_path)
    assert main(["show", str(tmp_path), *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err


def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    return code, capsys.readouterr().out


def test_finds_no_difference_but_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b")
    code, out = diff(tmp_path, capsys)
    assert code == 0
    assert "no difference" in out


def test_shows_the_first_difference_with_what_came_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b", (7, 9))
    code, out = diff(tmp_path, capsys)
    assert code == 1
    assert "AddRequest" in out
    assert out.endswith("the event differs:\n  tokens[1]: 8 → 9\n")


def test_shows_records_that_one_has_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b", extra=1)
    code, out = diff(tmp_path, capsys)
    assert code == 1
    assert "peer: 'step:executor/0' → 'command:frontend/0'" in out
