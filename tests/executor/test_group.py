"""Several executors: the first one's core and a follower's, driven by events."""

from typing import Any

import pytest

from bus.config import Config
from bus.core import Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick
from bus.messages import (
    CommandRequest,
    EndOfSteps,
    Failed,
    KvPool,
    MergedStep,
    Ready,
    Shutdown,
)
from executor.core import DeviceFailed, ExecutorCore, RunStep, StepDone
from executor.follower import FollowerCore
from executor.group import END_S, READY_S, STEP_S, Broken
from tests.executor.test_core import FRONTEND, LIMITS, ROWS, Bench, rank

CONFIG = Config(ranks=3, max_num_seqs=ROWS, executors=3)
LEADER = Peer("follower", "executor", 0, 1)


def follower(index: int) -> Peer:
    return Peer("follower", "executor", index, 10 + index)


def ready(index: int, programs: str = "") -> list[Event]:
    return [PeerUp(follower(index)), Received(follower(index), Ready(programs=programs))]


class Led(Bench):
    """An executor 0 with two followers."""

    broken = ""

    def __init__(self) -> None:
        super().__init__(CONFIG)

    def do(self, effect: Effect) -> None:
        if isinstance(effect, Broken):
            self.broken = effect.reason
        super().do(effect)

    def told(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """Who was sent messages of a kind, in order."""
        return [(sent.peer.index, sent.message) for sent in self.sent if isinstance(sent.message, kind)]


def tick(now: float) -> Tick:
    return Tick(now, now, {})


def test_ranks_get_their_pools_when_all_followers_are_ready() -> None:
    bench = Led()
    bench.up(0)
    bench.feed(*ready(2))
    bench.up(1)
    bench.send(0, 1)
    bench.drain()
    assert (bench.told(KvPool), bench.steps) == ([], [])
    bench.feed(*ready(1))
    assert [index for index, _ in bench.told(KvPool)] == [0, 1]
    bench.up(2)
    assert [index for index, _ in bench.told(KvPool)] == [0, 1, 2]
    assert not bench.broken


def test_each_step_is_told_to_all_followers_before_it_runs_and_they_run_the_same() -> None:
    bench, core = Led(), FollowerCore("", ROWS)
    bench.feed(*ready(1), *ready(2))
    bench.up(0, 1)
    bench.send(0, 1)
    bench.send(1, 1)
    bench.drain()
    bench.finish()
    bench.send(0, 2)
    bench.send(1, 2)
    bench.drain()
    assert len(bench.steps) == 2
    assert [index for index, _ in bench.told(MergedStep)] == [1, 2, 1, 2]
    for (_, message), run in zip(bench.told(MergedStep)[::2], bench.steps, strict=True):
        (heard,) = core.handle(Received(LEADER, message))
        assert isinstance(heard, RunStep)
        assert heard.number == run.number
        assert heard.step.rows.tolist() == run.step.rows.tolist()
        assert heard.step.positions.tolist() == run.step.positions.tolist()
    assert core.handle(Posted(StepDone(1, None, 0.0))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([*ready(1), PeerDown(follower(1), "it was silent for 15 s")], "executor/1 is lost: it was silent for 15 s"),
        ([*ready(1), Received(follower(1), Failed(reason="no memory"))], "executor/1 has failed: no memory"),
        (ready(2, "others"), "executor/2 runs other programs"),
        ([PeerUp(follower(0))], "executor/0 is no follower"),
        ([tick(0), *ready(2), tick(READY_S + 1)], "not ready within 900 s: executor/1"),
    ],
)
def test_executor_0_ends_by_an_error_when_not_all_can_go_on(events: list[Event], reason: str) -> None:
    bench = Led()
    bench.feed(*events)
    assert reason in bench.broken
    assert bench.stopped == bench.broken


def test_a_step_that_does_not_end_is_not_waited_for_for_ever() -> None:
    bench = Led()
    bench.feed(*ready(1), *ready(2), tick(0))
    bench.up(0)
    bench.send(0, 1)
    bench.send(0, 2)
    bench.drain()
    bench.feed(tick(10), tick(10 + STEP_S))
    bench.finish()
    bench.feed(tick(20 + STEP_S), tick(20 + 2 * STEP_S))
    assert not bench.broken
    bench.feed(tick(21 + 2 * STEP_S))
    assert bench.broken == "step 2 has not ended within 120 s"


def test_an_executor_without_followers_waits_for_nobody() -> None:
    core = ExecutorCore(Config(ranks=3, max_num_seqs=ROWS), "tiny", LIMITS)
    assert [type(effect.message) for effect in core.handle(PeerUp(rank(0)))] == [KvPool]
    assert list(core.handle(tick(READY_S + 1))) == list(core.handle(tick(9 * READY_S))) == []


@pytest.mark.parametrize("all_end", [True, False])
def test_followers_end_before_executor_0_when_the_engine_is_shut_down(all_end: bool) -> None:
    bench = Led()
    bench.feed(*ready(1), *ready(2), PeerUp(FRONTEND))
    bench.feed(Received(FRONTEND, CommandRequest(command_id=1, body=Shutdown())))
    assert [index for index, _ in bench.told(EndOfSteps)] == [1, 2]
    bench.feed(PeerDown(follower(2), "the executor was told to shut down"), tick(1))
    assert bench.stopped == ""  # JAX would abort whoever is left
    last = PeerDown(follower(1), "the executor was told to shut down") if all_end else tick(2 + END_S)
    bench.feed(last)
    assert (bench.stopped, bench.broken) == ("it was told to shut down", "")
    assert FollowerCore("", ROWS).handle(Received(LEADER, EndOfSteps())) == [Stop("the executor was told to shut down")]


def test_a_follower_says_what_it_runs_and_that_its_device_failed() -> None:
    core = FollowerCore("mine", ROWS)
    assert core.handle(PeerUp(LEADER)) == [Send(LEADER, Ready(programs="mine"))]
    assert core.handle(Posted(DeviceFailed("no memory"))) == [
        Send(LEADER, Failed(reason="no memory")),
        Stop("the device failed: no memory"),
    ]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([PeerUp(LEADER), PeerDown(LEADER, "it got SIGTERM")], "executor/0 is lost: it got SIGTERM"),
        ([tick(5), tick(READY_S + 6)], "executor/0 was not there within 900 s"),
        ([Received(LEADER, MergedStep(number=3, table_width=1))], "step 3 was told after step 0"),
    ],
)
def test_a_follower_ends_by_an_error_when_it_cannot_follow(events: list[Event], reason: str) -> None:
    core = FollowerCore("", ROWS)
    effects = [effect for event in events for effect in core.handle(event)]
    broken, stop = effects[-2:]
    assert isinstance(broken, Broken)
    assert reason in broken.reason
    assert stop == Stop(broken.reason)
