"""The executor's core, driven by events: who is in which step, who is waited for, and who is told what."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.config import Config
from bus.core import Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.messages import (
    CommandRequest,
    Error,
    ExecutorStatus,
    KvPool,
    NewRow,
    PartialSchedule,
    Reply,
    Sampling,
    Shutdown,
    StepResult,
    TokenCount,
)
from bus.wire import pack_ints, unpack_ints
from executor.checks import Limits
from executor.core import DeviceFailed, ExecutorCore, RunStep, StepDone
from executor.step import SampledStep

ROWS = 4
CONFIG = Config(ranks=3, max_num_seqs=ROWS, batching_window_ms=2.0, async_depth=2)
LIMITS = Limits(ROWS, 64, 1024, 100, blocks_of_rank=[70, 70, 68], most_drafts=2)


def rank(index: int, incarnation: int = 1) -> Peer:
    return Peer("step", "rank", index, incarnation)


FRONTEND = Peer("command", "frontend", 0, 5)


def decoding(row: int, adapter: str = "") -> NewRow:
    """A request whose prompt is one token, and which has room for a thousand."""
    return NewRow(
        row=row,
        request_id="r",
        prompt_token_ids=pack_ints([7]),
        block_ids=pack_ints(range(64)),
        sampling=Sampling(seed=1, max_tokens=1000),
        adapter=adapter,
    )


@dataclass
class Bench:
    """A core, a clock that stands still unless told, and all effects by kind. Time begins at 0."""

    config: Config = CONFIG
    now: float = 0.0
    steps: list[RunStep] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)
    wake_at: float | None = None
    stopped: str = ""
    queued: deque[RunStep] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.core = ExecutorCore(self.config, "tiny", LIMITS)

    def feed(self, *events: Event) -> None:
        for event in events:
            for effect in self.core.handle(event):
                self.do(effect)

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.sent.append(effect)
            case RunStep():
                self.steps.append(effect)
                self.queued.append(effect)
            case WakeAt(at):
                self.wake_at = at
            case Stop(reason):
                self.stopped = reason

    def drain(self, after: float = 0.0) -> None:
        self.now += after
        self.wake_at = None
        self.feed(Drained(self.now))

    def up(self, *indices: int) -> None:
        self.feed(*(PeerUp(rank(index)) for index in indices))

    def send(
        self, index: int, step: int, *, more: bool = True, new: bool | None = None, incarnation: int = 1, tries: int = 0
    ) -> None:
        """The next schedule of a rank that decodes in its row 0: it sets the row up in its first step."""
        begins = [decoding(0)] if (step == 1 if new is None else new) else []
        schedule = PartialSchedule(step=step, rows=pack_ints([0]), new=begins, more=more)
        if tries:
            numbers = {"num_tokens": pack_ints([1 + tries]), "num_drafts": pack_ints([tries])}
            schedule = msgspec.structs.replace(schedule, drafts=pack_ints([5] * tries), **numbers)
        self.feed(Received(rank(index, incarnation), schedule))

    def finish(self, token: int = 9) -> None:
        """The device finishes its oldest step."""
        run = self.queued.popleft()
        tokens = np.where(run.step.samples, token, -1).astype(np.int32)
        counts = None if run.step.drafts is None else np.ones_like(tokens)
        self.feed(Posted(StepDone(run.number, SampledStep(tokens, counts=counts), 0.01)))

    def took_part(self) -> list[list[int]]:
        return [run.step.ranks.tolist() for run in self.steps]

    def results(self, index: int) -> list[int]:
        return [
            send.message.step
            for send in self.sent
            if isinstance(send.message, StepResult) and send.peer.index == index and send.peer.role == "rank"
        ]

    def counted(self, name: str) -> float:
        """A counter as the executor tells it to a frontend."""
        before = len(self.sent)
        self.feed(PeerUp(FRONTEND))
        (status,) = (send.message for send in self.sent[before:])
        del self.sent[before:]
        assert isinstance(status, ExecutorStatus)
        return status.counters[name]

    def errors(self) -> list[tuple[int, str, int, str]]:
        return [
            (send.peer.index, send.message.code, send.message.step, send.message.message)
            for send in self.sent
            if isinstance(send.message, Error)
        ]


def test_a_rank_is_told_what_it_may_use() -> None:
    bench = Bench()
    bench.up(2)
    assert bench.sent == [
        Send(rank(2), KvPool(num_blocks=68, block_size=16, max_model_len=1024, vocab_size=100)),
    ]


def test_ranks_that_are_there_share_a_step_and_get_their_own_tokens() -> None:
    bench = Bench()
    bench.up(0, 1, 2)
    bench.send(2, 1)
    bench.send(0, 1)
    assert not bench.steps  # the sockets are not drained yet
    bench.drain()
    assert bench.took_part() == [[0, 2]]
    assert bench.steps[0].number == 1
    bench.finish()
    results = [send for send in bench.sent if isinstance(send.message, StepResult)]
    assert [(send.peer, unpack_ints(send.message.tokens).tolist()) for send in results] == [
        (rank(0), [9]),
        (rank(2), [9]),
    ]


def test_at_most_async_depth_steps_are_at_the_device_and_schedules_keep_their_order() -> None:
    bench = Bench()
    bench.up(0)
    bench.send(0, 1)
    bench.send(0, 2)
    bench.drain()
    assert len(bench.steps) == 2
    assert [run.step.positions.tolist() for run in bench.steps] == [[0], [1]]
    bench.finish()
    bench.send(0, 3)
    bench.drain()
    bench.finish()
    bench.finish()
    assert bench.results(0) == [1, 2, 3]


def test_nobody_goes_behind_a_step_with_drafts() -> None:
    """Ranks that come again only with a result would take turns."""
    bench = Bench()
    bench.up(0, 1)
    bench.send(0, 1)
    bench.drain()
    bench.finish()
    bench.send(0, 2, tries=2)
    bench.drain()
    bench.send(1, 1)
    bench.drain()
    assert bench.took_part() == [[0], [0]]
    bench.finish()
    bench.drain()
    assert bench.took_part() == [[0], [0]], "rank 0 is expected"
    bench.send(0, 3, tries=2)
    bench.drain()
    assert bench.took_part() == [[0], [0], [0, 1]]


def test_depth_one_runs_one_step_at_a_time() -> None:
    bench = Bench(Config(ranks=3, max_num_seqs=ROWS, async_depth=1))
    bench.up(0, 1)
    bench.send(0, 1)
    bench.drain()
    bench.send(1, 1)
    bench.drain(after=1.0)
    assert bench.took_part() == [[0]]
    bench.finish()
    bench.drain(after=1.0)
    bench.drain(after=1.0)
    assert bench.took_part() == [[0], [1]]


def lockstep(*ranks: int) -> Bench:
    """Ranks 0 and 1 have done their first step together, said more is coming, and the device is idle."""
    bench = Bench()
    bench.up(*ranks)
    for index in ranks:
        bench.send(index, 1)
    bench.drain()
    bench.finish()
    bench.drain()
    bench.steps.clear()
    return bench


def test_an_idle_device_waits_a_window_for_a_rank_that_said_more() -> None:
    bench = lockstep(0, 1)
    bench.send(0, 2)
    bench.drain(after=0.0005)
    assert not bench.steps
    assert bench.wake_at == pytest.approx(0.002)
    bench.send(1, 2)
    bench.drain(after=0.0005)
    assert bench.took_part() == [[0, 1]]
    assert (bench.steps[0].parts, bench.steps[0].waited_for) == ([(0, 2), (1, 2)], [1])
    assert bench.counted("executor_merge_wait_seconds") == pytest.approx(0.0005)


def test_a_rank_that_was_missed_is_not_waited_for_until_it_is_on_time_again() -> None:
    bench = lockstep(0, 1)
    bench.send(0, 2)
    bench.drain(after=0.0005)
    bench.drain(after=0.0020)
    assert bench.took_part() == [[0]]
    assert bench.counted("executor_missed_ranks/1") == 1
    bench.send(0, 3)
    bench.drain(after=0.0001)
    assert bench.took_part() == [[0], [0]]  # not waited for now, though the device is busy
    assert [(run.parts, run.waited_for) for run in bench.steps] == [([(0, 2)], [1]), ([(0, 3)], [])]
    bench.finish()
    bench.send(1, 2)
    bench.drain(after=0.0001)
    bench.finish()
    bench.drain()
    bench.send(0, 4)
    bench.drain()
    assert bench.took_part() == [[0], [0], [0, 1]]
    bench.finish()
    bench.drain()
    bench.steps.clear()
    bench.send(0, 5)
    bench.drain(after=0.0001)
    assert bench.took_part() == [[0]]  # its last answer was late: still not waited for
    bench.send(1, 3)  # within the window after its result
    bench.drain(after=0.0001)
    bench.finish()
    bench.finish()
    bench.drain()
    bench.steps.clear()
    bench.send(0, 6)
    bench.drain(after=0.0001)
    assert not bench.steps  # waited for again
    bench.send(1, 4)
    bench.drain(after=0.0001)
    assert bench.took_part() == [[0, 1]]


def test_while_the_device_is_busy_waiting_costs_nothing_but_not_a_moment_longer() -> None:
    bench = Bench()
    bench.up(0, 1)
    for step in (1, 2):
        bench.send(0, step)
        bench.send(1, step)
    bench.drain()
    bench.finish()
    bench.drain()
    bench.send(0, 3)
    bench.drain(after=0.050)
    assert bench.took_part() == [[0, 1], [0, 1]]  # step 2 still runs, rank 1 is awaited
    assert all(run.waited_for == [] for run in bench.steps)
    bench.finish()
    bench.drain(after=0.001)
    assert len(bench.steps) == 2  # its window begins with the result of step 2
    bench.drain(after=0.0021)
    assert bench.took_part()[2:] == [[0]]


def test_a_rank_that_answers_while_the_device_is_busy_is_on_time_however_long_it_took() -> None:
    bench = Bench()
    bench.up(0, 1)
    for step in (1, 2):
        bench.send(0, step)
        bench.send(1, step)
    bench.drain()
    for step in (3, 4, 5):
        bench.finish()
        bench.drain(after=0.001)
        bench.send(0, step)
        bench.drain(after=0.040)
        bench.send(1, step)
        bench.drain(after=0.040)
    assert bench.took_part() == [[0, 1]] * 5


@pytest.mark.parametrize("why", ["idle", "gone", "without more"])
def test_nobody_waits_for_a_rank_that_has_nothing_to_send(why: str) -> None:
    bench = Bench()
    bench.up(0, 1)
    bench.send(0, 1)
    if why != "idle":
        bench.send(1, 1, more=why == "gone")
    bench.drain()
    bench.finish()
    bench.drain()
    if why == "gone":
        bench.feed(PeerDown(rank(1), "it ended"))
    bench.send(0, 2)
    bench.drain()
    assert bench.took_part()[1:] == [[0]]


def test_without_a_window_nobody_waits_for_anybody_when_the_device_is_idle() -> None:
    bench = Bench(Config(ranks=3, max_num_seqs=ROWS, batching_window_ms=0))
    bench.up(0, 1)
    bench.send(0, 1)
    bench.send(1, 1)
    bench.drain()
    bench.finish()
    bench.send(0, 2)
    bench.drain()
    assert bench.took_part() == [[0, 1], [0]]


def test_results_of_an_earlier_start_of_a_rank_are_dropped_and_its_rows_are_void() -> None:
    bench = Bench()
    bench.up(0, 1)
    for step in (1, 2):
        bench.send(0, step)
        bench.send(1, step)
    bench.drain()
    bench.feed(PeerDown(rank(1), "a newer start of it has come"), PeerUp(rank(1, incarnation=2)))
    bench.send(1, 1, new=False, incarnation=2)
    bench.sent.clear()
    bench.finish()
    bench.finish()
    assert bench.results(0) == [1, 2]
    assert bench.results(1) == []
    assert bench.counted("executor_dropped_results") == 2
    bench.drain()
    bench.drain(after=1.0)
    assert [(error[0], error[1]) for error in bench.errors()] == [(1, "schedule_refused")]
    assert "never set up" in bench.errors()[0][3]
    bench.send(1, 2, new=True, incarnation=2)
    bench.drain()
    bench.finish()
    assert [send.peer for send in bench.sent if isinstance(send.message, StepResult)][-1] == rank(1, incarnation=2)


def test_the_same_start_of_a_rank_that_was_lost_and_is_back_begins_anew() -> None:
    bench = Bench()
    bench.up(0)
    bench.send(0, 1)
    bench.drain()
    bench.feed(PeerDown(rank(0), "it was silent"), PeerUp(rank(0)))
    bench.finish()
    assert bench.results(0) == []
    bench.send(0, 2)
    bench.drain()
    assert [(index, code, step) for index, code, step, _ in bench.errors()] == [(0, "schedule_refused", 2)]


def test_schedules_of_a_rank_that_is_gone_are_not_run() -> None:
    bench = Bench()
    bench.up(0, 1)
    bench.send(0, 1)
    bench.send(1, 1)
    bench.feed(PeerDown(rank(0), "it ended"))
    bench.send(0, 2)
    bench.drain()
    assert bench.took_part() == [[1]]
    assert bench.counted("executor_dropped_schedules") == 1


def test_a_bad_schedule_is_answered_counted_and_hurts_no_other_rank() -> None:
    bench = Bench()
    bench.up(0, 1)
    bench.send(0, 1)
    bench.send(1, 1, new=False)
    bench.drain()
    assert bench.took_part() == [[0]]
    assert bench.errors() == [
        (1, "schedule_refused", 1, "schedule 1 was not run: row 0 runs but was never set up"),
    ]
    assert bench.counted("executor_refused_schedules") == 1
    bench.send(1, 2, new=True)
    bench.drain()
    bench.finish()
    bench.finish()
    assert (bench.results(0), bench.results(1)) == ([1], [2])


def test_more_schedules_than_the_depth_are_refused() -> None:
    bench = Bench()
    bench.up(0)
    for step in (1, 2, 3):
        bench.send(0, step)
    assert [(index, step) for index, _, step, _ in bench.errors()] == [(0, 1), (0, 2), (0, 3)]
    assert "a rank may have 2 without result" in bench.errors()[0][3]
    bench.send(0, 4, new=True)
    bench.drain()
    assert bench.took_part() == [[0]]


def test_a_schedule_whose_number_does_not_grow_is_refused() -> None:
    bench = Bench()
    bench.up(0)
    bench.send(0, 0, new=True)
    assert not bench.errors()
    bench.send(0, 0)
    assert [error[1:3] for error in bench.errors()] == [("schedule_refused", 0)]


def test_frontends_hear_once_a_second_how_the_executor_does() -> None:
    bench = Bench()
    bench.feed(PeerUp(FRONTEND))
    for tenth in range(21):
        bench.feed(Tick(tenth / 10, 0.0, {"bus_received_frames/step": 10 + tenth}))
    statuses = [send.message for send in bench.sent if isinstance(send.message, ExecutorStatus)]
    assert len(statuses) == 4  # at the start, and at 0, 1 and 2 seconds
    assert (statuses[0].model, statuses[0].num_blocks, statuses[0].max_model_len) == ("tiny", 208, 1024)
    assert [status.counters.get("bus_received_frames/step") for status in statuses] == [None, 10, 20, 30]
    bench.feed(PeerDown(FRONTEND, "it ended"))
    bench.sent.clear()
    bench.feed(Tick(9.0, 0.0, {}))
    assert not bench.sent


def test_nan_rows_are_counted() -> None:
    bench = Bench()
    bench.up(0)
    bench.send(0, 1)
    bench.drain()
    bench.finish(token=-2)
    assert bench.counted("executor_nan_rows") == 1


def test_commands() -> None:
    bench = Bench()
    bench.feed(PeerUp(FRONTEND))
    bench.sent.clear()
    bench.feed(Received(FRONTEND, CommandRequest(command_id=3, body=TokenCount())))
    (answer,) = bench.sent
    assert isinstance(answer.message, Error)
    assert answer.message.command_id == 3
    bench.feed(Received(FRONTEND, CommandRequest(command_id=4, body=Shutdown())))
    assert bench.sent[1] == Send(FRONTEND, Reply(command_id=4, value=True))
    assert bench.stopped


def test_a_device_that_fails_ends_the_process() -> None:
    bench = Bench()
    bench.feed(Posted(DeviceFailed("out of memory")))
    assert "out of memory" in bench.stopped


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_schedule_of_a_rank_that_stays_is_answered_once_and_in_order(data: st.DataObject) -> None:
    """Any order of arrivals, steps and restarts: nothing is lost, doubled, reordered or given to the wrong start."""
    bench = Bench()
    incarnations = [1, 1, 1]
    sent: dict[Peer, list[int]] = {rank(index): [] for index in range(3)}
    bench.up(0, 1, 2)

    def answered(peer: Peer) -> list[int]:
        return [send.message.step for send in bench.sent if send.peer == peer and isinstance(send.message, StepResult)]

    def act(index: int) -> None:
        peer = rank(index, incarnations[index])
        if len(sent[peer]) - len(answered(peer)) < 2 and len(sent[peer]) < 900:
            step = len(sent[peer]) + 1
            bench.send(index, step, more=data.draw(st.booleans()), incarnation=incarnations[index])
            sent[peer].append(step)

    for action in data.draw(st.lists(st.sampled_from(["0", "1", "2", "drain", "finish", "wait", "restart"]))):
        if action in ("0", "1", "2"):
            act(int(action))
        elif action == "drain":
            bench.drain(after=0.0003)
        elif action == "wait":
            bench.drain(after=0.003)
        elif action == "finish" and bench.queued:
            bench.finish()
        elif action == "restart":
            index = data.draw(st.integers(0, 2))
            incarnations[index] += 1
            new = rank(index, incarnations[index])
            bench.feed(PeerDown(rank(index, incarnations[index] - 1), "a newer start of it has come"), PeerUp(new))
            sent[new] = []
        assert len(bench.queued) <= 2
    for _ in range(8):
        bench.drain(after=0.003)
        if bench.queued:
            bench.finish()
    assert not bench.queued
    assert bench.errors() == []
    for index, incarnation in enumerate(incarnations):
        assert answered(rank(index, incarnation)) == sent[rank(index, incarnation)]
    for peer, steps in sent.items():
        assert answered(peer) == steps[: len(answered(peer))]
