"""``rankbus trace`` on journals in which every time is known."""

from pathlib import Path
from typing import Any

import pytest

from bus.core import Peer
from bus.journal.reader import find
from bus.messages import (
    AddRequest,
    AddRequests,
    NewRow,
    Outputs,
    PartialSchedule,
    ResumeRow,
    Sampling,
    StandingSchedule,
    StepResult,
)
from bus.trace.command import main
from bus.trace.coverage import Pieces, coverage
from bus.trace.timeline import Process, StepKey, read
from bus.wire import pack_ints
from tests import trace_format
from tests.journals import INCARNATION
from tests.timed_journals import WALL, TimedJournals, received

ONE = Sampling(seed=0, max_tokens=9)
RANKS = [Peer("step", "rank", rank, INCARNATION) for rank in (0, 1)]
EXECUTOR = Peer("step", "executor", 0, INCARNATION)
FRONTEND = Peer("command", "frontend", 0, INCARNATION)


class Run(TimedJournals):
    """The journals of a run that is told in milliseconds."""

    def schedule(self, rank: int, begin: float, end: float, message: PartialSchedule) -> None:
        self.turn(("rank", rank), begin, end, ("drained", None, 0.0), (EXECUTOR, message))

    def run_step(self, begin: float, end: float, number: int, parts: list[Any], waited_for: list[int]) -> None:
        value = {"number": number, "parts": parts, "waited_for": waited_for, "sequences": 1}
        self.turn(("executor", 0), begin, end, ("drained", None, 0.0), ("RunStep", value))

    def done(self, begin: float, end: float, number: int, dispatch: tuple[float, float], device: float) -> None:
        """The device is through with a step 1 ms before the executor hears of it."""
        value = {
            "number": number,
            "sampled": {"tokens": b"", "logprobs": {}},
            "device_s": device / 1e3,
            "dispatch_at": dispatch[0] / 1e3,
            "dispatch_s": (dispatch[1] - dispatch[0]) / 1e3,
            "done_at": begin / 1e3 - 1e-3,
        }
        self.turn(("executor", 0), begin, end, ("posted", "StepDone", value))


def two_steps(run: Run) -> None:
    """Two steps of rank 0. The first waits for rank 1, which does not come; the second for the first."""
    handles = pack_ints([7])
    add = AddRequest(handle=7, sequence=1, request_id="r-1", prompt_token_ids=pack_ints([1, 2]), sampling=ONE)
    run.turn(("rank", 0), 0, 1, received(FRONTEND, AddRequests(requests=[add])))
    new = NewRow(row=3, request_id="r-1", prompt_token_ids=pack_ints([1, 2]), block_ids=pack_ints([0]), sampling=ONE)
    first = PartialSchedule(step=5, rows=pack_ints([3]), num_tokens=pack_ints([2]), new=[new])
    second = PartialSchedule(step=6, rows=pack_ints([3]))
    run.schedule(0, 2, 4, first)
    run.turn(("executor", 0), 5, 6, received(RANKS[0], first))
    run.turn(("executor", 0), 6, 6.5, ("drained", None, 0.0), ("WakeAt", 0.009))
    run.run_step(10, 12, 1, [(0, 5)], [1])
    run.schedule(0, 13, 14, second)
    run.turn(("executor", 0), 15, 16, received(RANKS[0], second))
    run.done(40, 42, 1, (12, 15), 20)
    run.run_step(42, 43, 2, [(0, 6)], [])
    run.turn(("rank", 0), 41, 44, received(FRONTEND, add))  # busy when the result comes
    run.turn(("rank", 0), 44, 46, received(EXECUTOR, StepResult(step=5, tokens=pack_ints([9]))))
    run.turn(("frontend", 0), 47, 48, received(RANKS[0], Outputs(step=5, handles=handles, tokens=pack_ints([9]))))
    told = {"rank": 0, "step": 5, "begun": 0.050, "seconds": 0.002}
    run.turn(("frontend", 0), 53, 53.5, ("posted", "Detokenised", told))
    run.done(60, 61, 2, (43, 44), 15)
    run.turn(("rank", 0), 61, 62, received(EXECUTOR, StepResult(step=6, tokens=pack_ints([9]))))


def pieces(folder: Path, number: int) -> list[tuple[float, float, str, str]]:
    """Begin and end in ms, phase, and what of each piece of a step of rank 0."""
    timeline = read(find([str(folder)]))
    step = timeline.steps[StepKey(Process("rank", 0, INCARNATION), number)]
    first = 2e-3
    return [
        (
            *(round(1e3 * (at - first) + 2, 6) for at in piece.span),
            piece.phase if piece.known else "unknown",
            piece.what,
        )
        for piece in Pieces(timeline).of(step)
    ]


FIRST = [
    (2, 4, "schedule", "1 rows"),
    (4, 5, "unknown", "to executor/0"),
    (5, 6, "hold", ""),
    (6, 10, "wait", "rank/1"),
    (10, 12, "merge", "of 1 ranks"),
    (12, 15, "dispatch", ""),
    (15, 19, "unknown", "to the device"),
    (19, 39, "device", ""),
    (39, 40, "unknown", "to executor/0"),
    (40, 42, "split", ""),
    (42, 44, "wait", "rank/0"),
    (44, 46, "update", ""),
    (46, 47, "unknown", "to frontend/0"),
    (47, 48, "outputs", "frontend/0"),
    (48, 50, "unknown", "to frontend/0, detokenise"),
    (50, 52, "detokenise", "frontend/0"),
]


def test_a_step_is_taken_to_pieces_that_name_whom_it_waits_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    two_steps(run)
    assert pieces(run.write(), 5) == FIRST


def test_a_step_that_stood_begins_when_it_is_merged_and_void_ones_are_none(tmp_path: Path) -> None:
    run = Run(tmp_path, depth=1)
    message = PartialSchedule(step=0, rows=pack_ints([3]))
    run.schedule(0, 2, 3, message)
    ahead = StandingSchedule(first_step=1, num_steps=3, after=-1, num_blocks=pack_ints([0, 0, 0]))
    run.turn(("rank", 0), 3, 4, ("drained", None, 0.0), (EXECUTOR, ahead))
    run.turn(("executor", 0), 5, 6, received(RANKS[0], message))
    run.turn(("executor", 0), 6, 7, received(RANKS[0], ahead))
    for number, begin in ((0, 8), (1, 25)):
        run.run_step(begin, begin + 1, number + 1, [(0, number)], [])
        run.done(begin + 10, begin + 11, number + 1, (begin + 1, begin + 2), 7)
        result = StepResult(step=number, tokens=pack_ints([9]), next_step=2 if number else None)
        run.turn(("rank", 0), begin + 11, begin + 12, received(EXECUTOR, result))
    folder = run.write()
    assert pieces(folder, 1)[:3] == [
        (25, 25, "schedule", "1 rows"),
        (25, 26, "merge", "of 1 ranks"),
        (26, 27, "dispatch", ""),
    ]
    assert [key.number for key in read(find([str(folder)])).steps] == [0, 1]
    assert main([str(folder), "-o", str(tmp_path / "trace.json")]) == 0
    events = trace_format.check(tmp_path / "trace.json")
    assert sum(event["ph"] == "s" for event in events) == 2


def test_where_one_step_may_be_in_flight_the_next_waits_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, depth=1)
    two_steps(run)
    found = pieces(run.write(), 6)
    assert found[2:5] == [
        (15, 16, "hold", ""),
        (16, 42, "wait", "step 1 at the device"),
        (42, 43, "merge", "of 1 ranks"),
    ]


def test_the_device_takes_one_step_after_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number, begin in ((0, 2), (1, 10)):
        message = PartialSchedule(step=number, rows=pack_ints([3]))
        run.schedule(0, begin, begin + 1, message)
        run.turn(("executor", 0), begin + 1, begin + 2, received(RANKS[0], message))
        run.run_step(begin + 2, begin + 3, number + 1, [(0, number)], [])
    for number, end in ((0, 31), (1, 51)):
        run.done(end, end + 1, number + 1, (5 + 8 * number, 6 + 8 * number), 20 if number else 24)
        run.turn(("rank", 0), end + 1, end + 2, received(EXECUTOR, StepResult(step=number, tokens=pack_ints([9]))))
    found = pieces(run.write(), 1)
    assert found[4:7] == [
        (14, 30, "wait", "step 1 at the device"),
        (30, 50, "device", ""),
        (50, 51, "unknown", "to executor/0"),
    ]


def test_time_is_counted_once_and_what_is_not_known_is_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    two_steps(run)
    timeline = read(find([str(run.write())]))
    taken = Pieces(timeline)
    step = timeline.steps[StepKey(Process("rank", 0, INCARNATION), 5)]
    found = coverage([taken.of(step), []])
    unknown = sum(end - begin for begin, end, phase, _ in FIRST if phase == "unknown")
    assert found.steps == 1
    assert found.total == pytest.approx(0.050)
    assert found.percent == pytest.approx(100 * (50 - unknown) / 50)
    assert found.phases["wait"] == pytest.approx(0.006)


def test_processes_on_several_machines_meet_on_the_wall_clock(tmp_path: Path) -> None:
    run = Run(tmp_path, {"executor-0": 777.0, "frontend-0": -5.0})
    two_steps(run)
    timeline = read(find([str(run.write())]))
    begins = [turns[0].span.begin - WALL for turns in timeline.turns.values()]
    assert sorted(begins) == pytest.approx([0.0, 0.005, 0.047], abs=1e-6)


def test_the_trace_keeps_the_format_and_has_a_lane_for_a_request(tmp_path: Path) -> None:
    run = Run(tmp_path / "journals")
    two_steps(run)
    resumed = ResumeRow(
        row=2,
        request_id="r-1",
        token_ids=pack_ints([1, 2, 9]),
        num_output_tokens=1,
        block_ids=pack_ints([0]),
        sampling=ONE,
    )
    third = PartialSchedule(step=9, rows=pack_ints([2]), resumed=[resumed])
    run.schedule(0, 70, 71, third)
    run.turn(("executor", 0), 72, 73, received(RANKS[0], third))
    run.run_step(73, 74, 3, [(0, 9)], [])
    run.done(80, 81, 3, (74, 75), 4)
    run.turn(("rank", 0), 82, 83, received(EXECUTOR, StepResult(step=9, tokens=pack_ints([9]))))
    out = tmp_path / "trace.json"
    assert main([str(run.write()), "-o", str(out), "--request", "r"]) == 0
    events = trace_format.check(out)
    lane = [(one["name"], one["ts"], round(one["ts"] + one["dur"])) for one in trace_format.slices(events, "r")]
    assert lane == [
        ("waiting", 0, 2000),
        ("step 5 of rank/0", 2000, 46000),
        ("step 6 of rank/0", 46000, 62000),
        ("preempted", 62000, 70000),
        ("step 9 of rank/0", 70000, 83000),
    ]
    names = {one["name"] for one in trace_format.slices(events)}
    phases = {"schedule", "hold", "merge", "dispatch", "device", "split", "update", "outputs", "detokenise"}
    assert phases | {"wait for rank/1", "wait for rank/0"} <= names
    assert len([event for event in events if event["ph"] == "s"]) == 3


def test_only_the_time_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "journals")
    two_steps(run)
    folder, out = str(run.write()), str(tmp_path / "trace.json")
    assert main([folder, "-o", out, "--since", "0.01", "--until", "0.5"]) == 0
    assert "1 steps of ranks" in capsys.readouterr().out
    assert main([folder, "-o", out, "--since", "10"]) == 2
    assert "there is no step" in capsys.readouterr().err
    assert main([folder, "-o", f"{tmp_path}/none/trace.json"]) == 2
    assert main([f"{tmp_path}/none", "-o", out]) == 2
    assert main([folder, "-o", out, "--request", "nobody"]) == 0
    assert "nobody is not in these journals" in capsys.readouterr().err
