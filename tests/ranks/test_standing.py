"""Steps that stand, as the rank's core sees them: when they are sent, and what has to wait until they are no more."""

from typing import Any

import pytest

from bus.core import PeerDown, Received, Tick
from bus.messages import (
    AbortRequests,
    Error,
    Outputs,
    PartialSchedule,
    Recall,
    Recalled,
    RequestCounts,
    StandingSchedule,
    StepResult,
)
from bus.wire import pack_ints
from tests.ranks.test_core import EXECUTOR, STOP, Rank, frontend, messages, replies


def standing(effects: list[Any]) -> list[tuple[int, int, int]]:
    """First step, number of steps, and the last step before that was known, of each message."""
    return [(one.first_step, one.num_steps, one.after) for one in messages(effects, StandingSchedule)]


@pytest.fixture
def rank() -> Rank:
    """One request in steady decode: step 0 has come back, and 1 to 4 stand."""
    rank = Rank(async_depth=1)
    rank.start(0)
    rank.add(0, 1)
    rank.scheduler.steady = rank.scheduler.stands = True
    assert standing(rank.result(0, 1)) == [(1, 4, 0)]
    return rank


def abort(handle: int) -> Received:
    return Received(frontend(0), AbortRequests(handles=pack_ints([handle])))


def result(step: int, token: int = 5, next_step: int | None = None) -> Received:
    return Received(EXECUTOR, StepResult(step=step, tokens=pack_ints([token]), next_step=next_step))


def test_more_steps_are_said_when_it_is_known_that_the_last_ones_arrived(rank: Rank) -> None:
    assert standing(rank.result(1, 1)) == [(5, 4, 1)]
    assert standing(rank.result(2, 1)) == []  # 5 to 8 may still be on their way
    assert standing(rank.result(3, 1)) == []
    assert standing(rank.result(4, 1)) == []
    assert standing(rank.result(5, 1)) == [(9, 4, 5)]


def test_an_executor_of_an_older_minor_version_schedules_step_by_step() -> None:
    rank = Rank(async_depth=1)
    rank.start(0)
    rank.give(PeerDown(EXECUTOR, "it is replaced"))
    rank.give(*rank.greeting(minor=0))
    rank.add(0, 1)
    rank.scheduler.steady = rank.scheduler.stands = True
    sent = rank.result(rank.core._next_step - 1, 1)
    assert standing(sent) == []
    assert len(messages(sent, PartialSchedule)) == 1


def test_what_changes_something_waits_until_what_stands_was_taken_back(rank: Rank) -> None:
    sent = rank.give(abort(1), abort(7))
    assert messages(sent, Recall) == [Recall(number=1)]
    assert messages(sent, Outputs) == []
    assert standing(rank.result(1, 1)) == []
    sent = rank.give(Received(EXECUTOR, Recalled(number=1, next_step=3)))
    assert rank.scheduler.stood_down == [3]
    assert [ended.handle for told in messages(sent, Outputs) for ended in told.ended] == [1]
    rank.scheduler.steady = rank.scheduler.stands = False
    rank.result(2, 0)
    assert [one.step for one in messages(rank.add(0, 2), PartialSchedule)] == [3]


def test_requests_and_questions_do_not_disturb(rank: Rank) -> None:
    assert messages(rank.add(0, 2), Recall) == []
    sent = rank.ask(RequestCounts())
    assert messages(sent, Recall) == []
    assert len(replies(sent)) == 1


def test_a_request_that_can_join_has_what_stands_taken_back(rank: Rank) -> None:
    rank.scheduler.stands = False
    assert messages(rank.add(0, 2), Recall) == [Recall(number=1)]
    assert messages(rank.add(0, 3), Recall) == []  # once is enough
    assert (0, 3) in rank.scheduler.requests


def test_what_comes_after_something_that_waits_waits_too(rank: Rank) -> None:
    rank.give(abort(1))
    rank.add(0, 1)  # the same handle again
    assert replies(rank.ask(RequestCounts())) == []
    sent = rank.give(Received(EXECUTOR, Recalled(number=1, next_step=2)))
    assert [ended.handle for told in messages(sent, Outputs) for ended in told.ended] == [1]
    assert messages(sent, Error) == []
    assert (0, 1) in rank.scheduler.requests
    assert len(replies(sent)) == 1


def test_a_result_with_a_next_step_ends_what_stands_before_it_is_taken(rank: Rank) -> None:
    rank.scheduler.stands = False
    sent = rank.give(result(1, STOP, next_step=2))
    assert rank.scheduler.stood_down == [2]
    assert [one.step for one in messages(sent, PartialSchedule)] == [2]


def test_a_stop_before_the_executor_had_what_stands_makes_it_void(rank: Rank) -> None:
    rank = Rank(async_depth=2)
    rank.start(0)
    rank.add(0, 1)  # steps 0 and 1
    rank.scheduler.steady = rank.scheduler.stands = True
    assert standing(rank.result(0, 1)) == [(2, 4, 0)]
    rank.scheduler.stands = False
    rank.give(result(1, STOP))
    assert rank.scheduler.stood_down == [2]


def test_an_answer_to_an_earlier_recall_is_not_one_to_this(rank: Rank) -> None:
    rank.give(abort(7))
    rank.give(result(1, STOP, next_step=2))  # ends it before the answer comes; then 2 to 5 stand
    rank.give(Received(EXECUTOR, Recalled(number=1, next_step=2)))
    assert rank.scheduler.stood_down == [2]
    sent = rank.give(abort(7))
    assert messages(sent, Recall) == [Recall(number=2)]


def test_the_executor_is_lost_while_something_waits(rank: Rank) -> None:
    rank.give(abort(7))
    sent = rank.give(PeerDown(EXECUTOR, "it was killed"))
    assert [ended.code for told in messages(sent, Outputs) for ended in told.ended] == ["unavailable"]
    rank.give(Tick(rank.now, 0.0, {}))
    assert not rank.core._standing.events


def test_the_last_that_stands_is_known_to_be_sent_when_the_one_before_has_come_back(rank: Rank) -> None:
    rank.scheduler.stands = False
    rank.result(1, 1)
    rank.result(2, 1)
    assert rank.scheduler.stood_down == []
    rank.result(3, 1)
    assert rank.scheduler.stood_down == [5]
    assert [one.step for one in messages(rank.result(4, 1), PartialSchedule)] == [5]
