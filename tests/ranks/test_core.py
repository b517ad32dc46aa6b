"""The rank's state machine, event by event, with a scheduler that keeps what it is given."""

from collections.abc import Callable
from typing import Any

import pytest

from bus.config import Config
from bus.core import Drained, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.counters import Counters
from bus.messages import (
    PROTOCOL_MINOR,
    AbortRequests,
    Adapters,
    AdaptersHeld,
    AddRequest,
    AddRequests,
    AppendInput,
    Command,
    CommandRequest,
    Drain,
    Error,
    FinishReason,
    FinishRequests,
    GetPauseState,
    Grammar,
    GrammarBitmask,
    HasFinishedRequests,
    Ints,
    KvEvents,
    KvPool,
    ListAdapters,
    Load,
    LoadAdapter,
    Outputs,
    PartialSchedule,
    PauseState,
    Reply,
    RequestCounts,
    RequestEnded,
    Resume,
    Schedule,
    SetPause,
    Shutdown,
    StandingSchedule,
    StepResult,
    StopTurn,
    TokenCount,
    TurnEnded,
    UnloadAdapter,
    UpdateDraftTokens,
    UpdateFromOutput,
)
from bus.wire import pack_ints, unpack_ints
from ranks.compiling import Compile, Compiled
from ranks.core import KV_INTERVAL_S, STEADY_KV_INTERVAL_S, RankCore
from ranks.publishing import INTERVAL_S
from ranks.scheduler import BrokenResult, Ended, KvChanges, LoadFigures, Refused, RefusedTurn, StepOutputs
from tests.ranks.toy import request

EXECUTOR = Peer("step", "executor", 0, 100)
STOP = 99
POOL = KvPool(num_blocks=8, block_size=16, max_model_len=64, vocab_size=100)


def frontend(index: int, incarnation: int = 10) -> Peer:
    return Peer("command", "frontend", index, incarnation)


class FakeScheduler:
    """Runs every request that is not paused in every step and gives each one token; a request ends when told to."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.requests: dict[tuple[int, int], AddRequest] = {}
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self.ending: set[tuple[int, int]] = set()
        self.steady = False
        self.stands = False
        self.stood_down: list[int] = []
        self.pause: PauseState = "unpaused"
        self.calls = 0
        self.turns: StepOutputs = []
        self.refused: list[RefusedTurn] = []
        self.changes = KvChanges(b"", b"", False)
        self.compiled_with: list[tuple[int, Any, str]] = []
        self.names = b""

    def add(self, frontend: int, request: AddRequest, now: float) -> None:
        if not request.prompt_token_ids:
            raise Refused("the prompt is empty")
        self.requests[frontend, request.handle] = request

    def has(self, frontend: int, handle: int) -> bool:
        return (frontend, handle) in self.requests

    def is_steady(self) -> bool:
        return self.steady

    def may_stand(self) -> bool:
        return self.stands

    def stand(self, first_step: int, after: int, most: int) -> StandingSchedule | None:
        if not self.stands:
            return None
        count = min(most, 4)
        for step in range(first_step, first_step + count):
            self.steps[step] = list(self.requests)
        nothing = pack_ints([0] * count)
        stops = pack_ints([STOP])
        return StandingSchedule(
            first_step=first_step, num_steps=count, after=after, num_blocks=nothing, stop_token_ids=stops, more=True
        )

    def stand_down(self, next_step: int) -> None:
        self.stood_down.append(next_step)
        self.steps = {step: keys for step, keys in self.steps.items() if step < next_step}

    def append(self, frontend: int, turn: AppendInput, now: float) -> list[Ended]:
        if turn.close:
            return self._finish([(frontend, turn.handle)], "closed")
        raise Refused("it is no session")

    def stop_turn(self, frontend: int, stop: StopTurn) -> None:
        if stop.turn > 1:
            raise Refused("the turn has not begun")
        ended = TurnEnded(handle=stop.handle, turn=stop.turn, reason="interrupted", kept_tokens=stop.n)
        self.turns = [(frontend, Outputs(turns=[ended]))]
        self.refused = [RefusedTurn(frontend, stop.handle, stop.sequence - 1, "there is no room")]

    def take_grammars(self) -> list[tuple[int, Grammar]]:
        return [(key[1], r.sampling.grammar) for key, r in self.requests.items() if r.sampling.grammar is not None]

    def compiled(self, ticket: int, matcher: Any, fault: str) -> list[Ended]:
        self.compiled_with.append((ticket, matcher, fault))
        return self._finish([(0, ticket)], "error", "invalid", fault) if fault else []

    def take_turns(self) -> tuple[StepOutputs, list[RefusedTurn]]:
        turns, refused, self.turns, self.refused = self.turns, self.refused, [], []
        return turns, refused

    def finish(self, frontend: int, handles: Ints | None, reason: FinishReason) -> list[Ended]:
        wanted = None if handles is None else unpack_ints(handles).tolist()
        return self._finish(
            [k for k in self.requests if k[0] == frontend and (wanted is None or k[1] in wanted)], reason
        )

    def finish_ids(
        self, request_ids: list[str] | None, reason: FinishReason, code: str = "", message: str = ""
    ) -> list[Ended]:
        keys = [k for k, r in self.requests.items() if request_ids is None or r.request_id in request_ids]
        return self._finish(keys, reason, code, message)

    def _finish(self, keys: Any, reason: FinishReason, code: str = "", message: str = "") -> list[Ended]:
        return [
            Ended(
                k[0],
                self.requests.pop(k).request_id,
                RequestEnded(handle=k[1], reason=reason, code=code, message=message),
            )
            for k in keys
        ]

    def schedule(self, step: int, now: float) -> PartialSchedule | None:
        self.calls += 1
        if self.pause == "paused_all" or not self.requests:
            return None
        self.steps[step] = list(self.requests)
        return PartialSchedule(step=step, rows=pack_ints(range(len(self.requests))))

    def update(self, result: StepResult) -> StepOutputs:
        step = min(self.steps)
        assert step == result.step
        if result.tokens.nbytes // 4 != len(self.steps[step]):
            raise BrokenResult("too few")
        by_frontend: dict[int, list[int]] = {}
        for index, handle in self.steps.pop(step):
            if (index, handle) in self.requests:
                by_frontend.setdefault(index, []).append(handle)
        messages = []
        for index, handles in sorted(by_frontend.items()):
            done = [h for h in handles if (index, h) in self.ending]
            ended = [item.ended for item in self._finish([(index, h) for h in done], "stop")]
            tokens = pack_ints([5] * len(handles))
            messages.append((index, Outputs(step=step, handles=pack_ints(handles), tokens=tokens, ended=ended)))
        return messages

    def set_pause(self, state: PauseState) -> None:
        self.pause = state

    def render(self, step: int, now: float) -> dict[str, Any]:
        self.steps[step] = list(self.requests)
        return {"num_scheduled_tokens": {r.request_id: 1 for r in self.requests.values()}}

    def update_by_id(self, sampled: dict[str, list[int]]) -> tuple[StepOutputs, dict[str, Any]]:
        if "nobody" in sampled:
            raise Refused("request nobody is not in it")
        step = min(self.steps)
        outputs = self.update(StepResult(step=step, tokens=pack_ints([5] * len(self.steps[step]))))
        return outputs, {"r": "emitted"}

    def bitmask(self) -> tuple[list[str], list[bytes]] | None:
        return None

    def set_drafts(self, drafts: dict[str, list[int]]) -> list[str]:
        return sorted(drafts)

    def load(self) -> LoadFigures:
        running = len(self.requests) if self.steps else 0
        return LoadFigures(running, len(self.requests) - running, 0, None, 0, self.pool.num_blocks)

    def token_count(self) -> int:
        return sum(r.prompt_token_ids.nbytes // 4 for r in self.requests.values())

    def computed_tokens(self, prompt: Ints, cache_salt: str, adapter: str) -> int:
        return 0

    def adapters(self) -> list[str]:
        return list(dict.fromkeys(request.adapter for request in self.requests.values() if request.adapter))

    def unfinished(self) -> int:
        return len(self.requests)

    def request_counts(self) -> tuple[int, int]:
        return (0, len(self.requests))

    def has_finished(self) -> bool:
        return False

    def stats(self) -> dict[str, Any] | None:
        return None

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        return True

    def reset_encoder_cache(self) -> bool:
        return True

    def take_kv_changes(self) -> KvChanges:
        changes, self.changes = self.changes, KvChanges(b"", b"", False)
        return changes

    def kv_snapshot(self) -> bytes:
        return self.names


class Rank:
    """A core, its schedulers, and what it has sent."""

    def __init__(self, **settings: Any) -> None:
        self.schedulers: list[FakeScheduler] = []
        self.counters = Counters()
        self.core = RankCore(1, Config(**settings), self._build, self.counters)
        self.now = 0.0

    def _build(self, pool: KvPool) -> FakeScheduler:
        self.schedulers.append(FakeScheduler(pool))
        return self.schedulers[-1]

    @property
    def scheduler(self) -> FakeScheduler:
        return self.schedulers[-1]

    def give(self, *events: Event) -> list[Any]:
        """Handle events and, a little later than the last time, a Drained; what was sent, without `loads`."""
        self.now += INTERVAL_S
        effects = [effect for event in (*events, Drained(self.now)) for effect in self.core.handle(event)]
        self.loads = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Load)]
        return [effect for effect in effects if effect not in self.loads]

    def start(self, *frontends: int) -> None:
        self.give(*(PeerUp(frontend(i)) for i in frontends), PeerUp(EXECUTOR, PROTOCOL_MINOR), Received(EXECUTOR, POOL))

    def greeting(self, minor: int) -> tuple[Event, Event]:
        """The executor is there again, with a protocol of this minor version."""
        return PeerUp(EXECUTOR, minor), Received(EXECUTOR, POOL)

    def add(self, index: int, *handles: int, adapter: str = "") -> list[Any]:
        asked = [request(handle, [1, 2, 3], adapter=adapter) for handle in handles]
        return self.give(*(Received(frontend(index), one) for one in asked))

    def result(self, step: int, rows: int) -> list[Any]:
        return self.give(Received(EXECUTOR, StepResult(step=step, tokens=pack_ints([5] * rows))))

    def ask(self, body: Command, index: int = 0, command_id: int = 1, deadline_s: float | None = None) -> list[Any]:
        command = CommandRequest(command_id=command_id, body=body, deadline_s=deadline_s)  # type: ignore[arg-type]
        return self.give(Received(frontend(index), command))


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.start(0, 1)
    return rank


def messages(effects: list[Any], kind: type) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def replies(effects: list[Any]) -> list[Any]:
    return [message.value for message in messages(effects, Reply)]


def test_in_steady_decode_the_next_schedule_goes_out_before_what_the_last_step_gave() -> None:
    rank = Rank(async_depth=1)
    rank.start(0)
    rank.add(0, 1)
    rank.scheduler.steady = True
    sent = rank.result(0, 1)
    assert [type(effect.message) for effect in sent] == [PartialSchedule, Outputs]
    result = Received(EXECUTOR, StepResult(step=1, tokens=pack_ints([5])))
    abort = Received(frontend(0), AbortRequests(handles=pack_ints([1])))
    first, second = messages(rank.give(result, abort), Outputs)
    assert (unpack_ints(first.handles).tolist(), first.ended) == ([1], [])
    assert [ended.handle for ended in second.ended] == [1]


def test_two_steps_are_in_flight_and_no_more(rank: Rank) -> None:
    sent = rank.add(0, 0)
    assert [(s.peer, s.message.step) for s in sent] == [(EXECUTOR, 0), (EXECUTOR, 1)]
    assert rank.add(0, 1) == []
    sent = rank.result(0, 1)
    assert [m.step for m in messages(sent, PartialSchedule)] == [2]
    assert [s.peer for s in sent if isinstance(s.message, Outputs)] == [frontend(0)]


def test_one_step_with_depth_one() -> None:
    rank = Rank(async_depth=1)
    rank.start(0)
    assert len(messages(rank.add(0, 0), PartialSchedule)) == 1
    assert len(messages(rank.result(0, 1), PartialSchedule)) == 1


def test_an_idle_scheduler_is_not_asked_again(rank: Rank) -> None:
    calls = rank.scheduler.calls
    for _ in range(5):
        rank.give(Tick(rank.now, 0.0, {}))
    assert rank.scheduler.calls == calls


def test_outputs_go_to_the_frontends_that_own_them_one_message_each(rank: Rank) -> None:
    rank.add(0, 0, 1)
    rank.result(0, 2)
    rank.add(1, 0)
    rank.result(1, 2)
    rank.result(2, 2)
    sent = [s for s in rank.result(3, 3) if isinstance(s.message, Outputs)]
    assert [(s.peer.index, unpack_ints(s.message.handles).tolist()) for s in sent] == [(0, [0, 1]), (1, [0])]


def test_nothing_is_scheduled_before_the_pool(rank: Rank) -> None:
    rank = Rank()
    rank.give(PeerUp(frontend(0)), PeerUp(EXECUTOR))
    (refused,) = messages(rank.add(0, 3), Outputs)
    assert (refused.ended[0].handle, refused.ended[0].code) == (3, "unavailable")
    assert "no executor" in refused.ended[0].message
    assert not rank.schedulers


def test_refused_requests_end_at_once(rank: Rank) -> None:
    (refused,) = messages(rank.give(Received(frontend(0), request(7, []))), Outputs)
    assert refused.ended == [RequestEnded(handle=7, reason="error", code="invalid", message="the prompt is empty")]
    assert rank.counters.snapshot()["rank_refused_requests/invalid"] == 1


def test_several_requests_in_a_message_are_taken_one_by_one(rank: Rank) -> None:
    asked = [request(7, [1, 2, 3]), request(7, [1, 2, 3]), request(8, []), request(9, [1])]
    sent = rank.give(Received(frontend(0), AddRequests(requests=asked)))
    assert [m.code for m in messages(sent, Error)] == ["handle_in_use"]
    assert [ended.handle for m in messages(sent, Outputs) for ended in m.ended] == [8]
    assert list(rank.scheduler.requests) == [(0, 7), (0, 9)]
    assert rank.loads[0].message.acknowledged == asked[-1].sequence


def test_a_handle_in_use_does_not_touch_the_request_that_has_it(rank: Rank) -> None:
    rank.add(0, 0)
    sent = rank.add(0, 0)
    assert [m.code for m in messages(sent, Error)] == ["handle_in_use"]
    assert rank.scheduler.has(0, 0)


@pytest.mark.parametrize("handle", [-1, 2**31])
def test_a_handle_that_could_not_travel_back_is_refused(rank: Rank, handle: int) -> None:
    assert [m.code for m in messages(rank.add(0, handle), Error)] == ["invalid"]
    assert not rank.scheduler.requests


def test_a_pool_that_cannot_be_used_is_ignored(rank: Rank) -> None:
    rank.give(Received(EXECUTOR, KvPool(num_blocks=0, block_size=16, max_model_len=64, vocab_size=100)))
    assert len(rank.schedulers) == 1
    assert "no executor" in messages(rank.add(0, 0), Outputs)[0].ended[0].message


def test_abort_and_append(rank: Rank) -> None:
    rank.add(0, 0, 1, 2)
    (ended,) = messages(rank.give(Received(frontend(0), AbortRequests(handles=pack_ints([0, 2, 9])))), Outputs)
    assert [(e.handle, e.reason) for e in ended.ended] == [(0, "abort"), (2, "abort")]
    sent = rank.give(Received(frontend(0), AppendInput(handle=1, sequence=9, prompt_token_ids=pack_ints([1]))))
    assert [(m.message, m.handle, m.sequence) for m in messages(sent, Error)] == [("it is no session", 1, 9)]
    sent = rank.give(Received(frontend(0), AppendInput(handle=1, sequence=10, close=True)))
    assert [m.ended[0].handle for m in messages(sent, Outputs)] == [1]
    assert rank.loads[0].message.acknowledged == 10


def test_a_turn_is_stopped(rank: Rank) -> None:
    rank.add(0, 0, 1)
    sent = rank.give(Received(frontend(0), StopTurn(handle=1, sequence=9, turn=1, n=3)))
    (ended,) = messages(sent, Outputs)
    assert ended.turns == [TurnEnded(handle=1, turn=1, reason="interrupted", kept_tokens=3)]
    refused = Error(code="invalid", message="there is no room", handle=1, sequence=8)
    assert messages(sent, Error) == [refused]
    assert rank.loads[0].message.acknowledged == 9
    sent = rank.give(Received(frontend(0), StopTurn(handle=1, sequence=10, turn=2, n=3)))
    assert messages(sent, Error) == [Error(code="invalid", message="the turn has not begun", handle=1, sequence=10)]
    assert messages(sent, Outputs) == []


def test_without_an_executor_no_turn_is_taken() -> None:
    rank = Rank()
    rank.give(PeerUp(frontend(0)))
    for message in (AppendInput(handle=1, sequence=3), StopTurn(handle=1, sequence=4, turn=1, n=0)):
        (error,) = messages(rank.give(Received(frontend(0), message)), Error)
        assert (error.code, error.handle, error.sequence) == ("unavailable", 1, message.sequence)


def test_the_executor_is_lost(rank: Rank) -> None:
    rank.add(0, 0)
    rank.add(1, 0)
    rank.scheduler.names = b"x" * 16
    sent = rank.give(PeerDown(EXECUTOR, "it fell silent"))
    assert [(s.peer.index, s.message.ended[0].reason) for s in sent if isinstance(s.message, Outputs)] == [
        (0, "error"),
        (1, "error"),
    ]
    assert "it fell silent" in messages(sent, Outputs)[0].ended[0].message
    assert [(m.snapshot, bytes(m.stored)) for m in messages(sent, KvEvents)] == [(True, b"")] * 2
    assert {load.message.num_blocks for load in rank.loads} == {0}
    newer = Peer("step", "executor", 0, 200)
    rank.give(PeerUp(newer), Received(newer, POOL))
    assert len(rank.schedulers) == 2
    assert {load.message.num_blocks for load in rank.loads} == {8}
    sent = rank.add(0, 1)
    assert [m.step for m in messages(sent, PartialSchedule)] == [2, 3]
    assert rank.give(Received(newer, StepResult(step=0, tokens=pack_ints([5])))) == []
    assert rank.counters.snapshot()["rank_stale_results"] == 1


def test_a_second_pool_voids_the_first(rank: Rank) -> None:
    rank.add(0, 0)
    sent = rank.give(Received(EXECUTOR, POOL))
    assert "began anew" in messages(sent, Outputs)[0].ended[0].message
    assert len(rank.schedulers) == 2


@pytest.mark.parametrize(("step", "rows"), [(0, 2), (1, 1)])
def test_a_result_that_does_not_fit_ends_requests_and_the_rank_goes_on(rank: Rank, step: int, rows: int) -> None:
    rank.add(0, 0)
    sent = rank.result(step, rows)
    assert messages(sent, Outputs)[0].ended[0].code == "unavailable"
    assert rank.counters.snapshot()["rank_broken_results"] == 1
    assert [m.step for m in messages(rank.add(0, 1), PartialSchedule)] == [2, 3]
    assert rank.result(0, 1) == []
    assert rank.counters.snapshot()["rank_stale_results"] == 1


def test_a_refused_schedule_ends_requests_and_the_rank_goes_on(rank: Rank) -> None:
    rank.add(0, 0)
    refusal = Error(code="schedule_refused", message="schedule 0 was not run: it names row 99", step=0)
    sent = rank.give(Received(EXECUTOR, refusal))
    assert "row 99" in messages(sent, Outputs)[0].ended[0].message
    assert len(rank.schedulers) == 2
    rank.give(Received(EXECUTOR, Error(code="schedule_refused", message="row 1 is void", step=1)))
    assert len(rank.schedulers) == 2
    assert [m.step for m in messages(rank.add(0, 1), PartialSchedule)] == [2, 3]


def test_a_lost_frontends_requests_are_finished(rank: Rank) -> None:
    rank.add(0, 0, 1)
    rank.add(1, 0)
    rank.give(PeerDown(frontend(0), "it ended"))
    assert list(rank.scheduler.requests) == [(1, 0)]
    assert rank.counters.snapshot()["rank_orphaned_requests"] == 2
    rank.give(PeerUp(frontend(0, 11)))
    assert [(load.peer, load.message.acknowledged) for load in rank.loads][-1] == (frontend(0, 11), 0)


def test_kv_events_are_numbered_and_begin_with_a_snapshot(rank: Rank) -> None:
    rank.scheduler.changes = KvChanges(b"a" * 16, b"b" * 16, False)
    sent = messages(rank.give(), KvEvents)
    assert [(m.number, m.snapshot, bytes(m.stored), bytes(m.removed)) for m in sent] == [
        (1, False, b"a" * 16, b"b" * 16)
    ] * 2
    rank.scheduler.changes = KvChanges(b"c" * 16, b"", False)
    rank.scheduler.names = b"a" * 16 + b"c" * 16
    sent = rank.give(PeerUp(frontend(2)))
    assert [(s.peer.index, s.message.number, s.message.snapshot) for s in sent] == [
        (0, 2, False),
        (1, 2, False),
        (2, 2, True),
    ]
    rank.scheduler.changes = KvChanges(b"", b"", True)
    rank.scheduler.names = b""
    assert [(m.number, m.snapshot, bytes(m.stored)) for m in messages(rank.give(), KvEvents)] == [(3, True, b"")] * 3


@pytest.mark.parametrize(("steady", "interval_s"), [(False, KV_INTERVAL_S), (True, STEADY_KV_INTERVAL_S)])
def test_kv_events_wait_for_others_while_there_are_steps(steady: bool, interval_s: float) -> None:
    rank = Rank(async_depth=1)
    rank.start(0)
    rank.add(0, 0)
    rank.scheduler.steady = steady

    def told(sent: list[Any]) -> list[tuple[bool, bytes]]:
        return [(message.snapshot, bytes(message.stored)) for message in messages(sent, KvEvents)]

    rank.scheduler.changes = KvChanges(b"a" * 16, b"", False)
    rank.scheduler.names = b"a" * 16
    assert told(rank.result(0, 1)) == []
    assert told(rank.give(PeerUp(frontend(1)))) == [(False, b"a" * 16), (True, b"a" * 16)]
    rank.now += interval_s
    rank.give()
    rank.scheduler.changes = KvChanges(b"b" * 16, b"", False)
    assert told(rank.give()) == []
    rank.now += interval_s
    assert told(rank.give()) == [(False, b"b" * 16)] * 2
    rank.scheduler.changes = KvChanges(b"c" * 16, b"", False)
    assert told(rank.give(Received(frontend(0), AbortRequests(handles=pack_ints([0]))))) == []
    assert told(rank.result(1, 1)) == [(False, b"c" * 16)] * 2  # there is no step any more that would bring a chance


def test_load_is_told_after_changes_once_per_drained_and_acknowledges(rank: Rank) -> None:
    rank.add(0, 0, 1, 2)
    told = {load.peer.index: load.message for load in rank.loads}
    assert len(rank.loads) == 2
    assert (told[0].acknowledged, told[1].acknowledged) == (3, 0)
    assert told[0].running == 3
    assert told[0].number != told[1].number
    rank.result(0, 3)
    assert rank.loads == []  # nothing that matters to routing has changed
    rank.now = 5.0
    rank.give(Tick(5.0, 0.0, {"bus_received_frames/step": 9.0}))
    assert len(rank.loads) == 2  # once a second in full, for the counters
    assert rank.loads[0].message.counters["bus_received_frames/step"] == 9.0


def test_changes_soon_after_each_other_are_told_together_without_counters(rank: Rank) -> None:
    handle = rank.core.handle
    rank.add(0, 0)
    assert [load.message.counters for load in rank.loads] == [{}, {}]
    for number in (1, 2):
        handle(Received(frontend(0), request(number, [1, 2, 3])))
        later = list(handle(Drained(rank.now + INTERVAL_S / 2)))
        assert messages(later, Load) == []
        assert WakeAt(rank.now + INTERVAL_S) in later
    told = messages(list(handle(Drained(rank.now + INTERVAL_S))), Load)
    assert [load.running + load.waiting for load in told] == [3, 3]
    assert WakeAt not in map(type, handle(Drained(rank.now + 1.1 * INTERVAL_S)))


def test_pause_keep_is_answered_when_nothing_is_in_flight(rank: Rank) -> None:
    rank.add(0, 0)
    assert replies(rank.ask(SetPause(mode="keep"))) == []
    assert replies(rank.result(0, 1)) == []
    assert replies(rank.result(1, 1)) == ["paused_all"]
    assert rank.loads[0].message.pause_state == "paused_all"
    assert replies(rank.ask(GetPauseState())) == ["paused_all"]
    sent = rank.ask(Resume())
    assert replies(sent) == ["unpaused"]
    assert len(messages(sent, PartialSchedule)) == 2


def test_pause_wait_is_answered_when_what_runs_has_ended(rank: Rank) -> None:
    rank.add(0, 0)
    assert replies(rank.ask(SetPause(mode="wait"))) == []
    assert rank.scheduler.pause == "paused_new"
    rank.scheduler.ending.add((0, 0))
    assert replies(rank.result(0, 1)) == []
    assert replies(rank.result(1, 1)) == ["paused_new"]


def test_pause_abort_tells_every_frontend(rank: Rank) -> None:
    rank.add(0, 0)
    rank.add(1, 4)
    sent = rank.ask(SetPause(mode="abort"))
    ended = [(s.peer.index, [e.handle for e in s.message.ended]) for s in sent if isinstance(s.message, Outputs)]
    assert ended == [(0, [0]), (1, [4])]
    assert replies(sent) == []
    rank.result(0, 1)
    assert replies(rank.result(1, 1)) == ["paused_new"]


def test_the_pause_outlives_the_executor(rank: Rank) -> None:
    assert replies(rank.ask(SetPause(mode="keep"))) == ["paused_all"]
    rank.give(PeerDown(EXECUTOR, "it ended"))
    rank.give(PeerUp(EXECUTOR), Received(EXECUTOR, POOL))
    assert rank.add(0, 0) == []
    assert rank.scheduler.pause == "paused_all"


def test_drain_answers_when_the_last_request_has_ended(rank: Rank) -> None:
    rank.add(0, 0)
    assert replies(rank.ask(Drain())) == []
    assert rank.loads[0].message.draining
    (refused,) = messages(rank.add(0, 1), Outputs)
    assert "draining" in refused.ended[0].message
    rank.scheduler.ending.add((0, 0))
    assert replies(rank.result(0, 1)) == [True]
    (refused,) = messages(rank.add(0, 2), Outputs)
    assert refused.ended[0].code == "unavailable"
    assert replies(rank.ask(Resume())) == ["unpaused"]
    assert messages(rank.add(0, 3), Outputs) == []


def test_resume_ends_a_drain_that_is_not_done(rank: Rank) -> None:
    rank.add(0, 0)
    rank.ask(Drain(), command_id=5)
    sent = messages(rank.ask(Resume(), command_id=6), Reply)
    assert {m.command_id: m.value for m in sent} == {5: False, 6: "unpaused"}


def test_a_deferred_answer_has_a_deadline(rank: Rank) -> None:
    rank.add(0, 0)
    begin = rank.now
    rank.ask(Drain(), command_id=5, deadline_s=2.0)
    assert rank.give(Tick(begin + 1.9, 0.0, {})) == []
    (error,) = messages(rank.give(Tick(begin + 2.0, 0.0, {})), Error)
    assert (error.command_id, error.code) == (5, "deadline")
    rank.scheduler.ending.add((0, 0))
    assert replies(rank.result(0, 1)) == []


def test_commands_of_a_lost_frontend_are_forgotten(rank: Rank) -> None:
    rank.add(1, 0)
    rank.ask(Drain())
    rank.give(PeerDown(frontend(0), "it ended"))
    rank.scheduler.ending.add((1, 0))
    assert replies(rank.result(0, 1)) == []


def test_finish_requests_returns_what_really_ended(rank: Rank) -> None:
    rank.add(0, 0)
    rank.add(1, 1)
    sent = rank.ask(FinishRequests(request_ids=["r1", "nobody"]))
    assert replies(sent) == [["r1"]]
    assert [s.peer.index for s in sent if isinstance(s.message, Outputs)] == [1]
    assert replies(rank.ask(FinishRequests())) == [["r0"]]


def test_probes_and_their_lack_of_a_scheduler(rank: Rank) -> None:
    rank.add(0, 0, 1)
    assert replies(rank.ask(TokenCount())) == [6]
    assert replies(rank.ask(RequestCounts())) == [(0, 2)]
    rank.give(PeerDown(EXECUTOR, "it ended"))
    (error,) = messages(rank.ask(HasFinishedRequests(), command_id=4), Error)
    assert (error.code, error.command_id) == ("unavailable", 4)
    assert replies(rank.ask(FinishRequests())) == [[]]
    assert replies(rank.ask(Drain())) == [True]


@pytest.mark.parametrize(
    "body", [Schedule(), UpdateFromOutput(sampled_token_ids={}), GrammarBitmask(), UpdateDraftTokens(drafts={})]
)
def test_single_step_commands_need_single_step_mode(rank: Rank, body: Command) -> None:
    assert [m.code for m in messages(rank.ask(body), Error)] == ["not_single_step"]


def test_single_step_mode() -> None:
    rank = Rank(single_step=True)
    rank.start(0)
    assert rank.add(0, 0) == []
    assert [m.code for m in messages(rank.ask(UpdateFromOutput(sampled_token_ids={})), Error)] == ["not_held"]
    assert [m.code for m in messages(rank.ask(GrammarBitmask()), Error)] == ["not_held"]
    assert replies(rank.ask(Schedule())) == [{"num_scheduled_tokens": {"r0": 1}}]
    assert [m.code for m in messages(rank.ask(Schedule()), Error)] == ["held"]
    assert replies(rank.ask(GrammarBitmask())) == [None]
    assert rank.result(0, 1) == []  # the executor has no say
    (error,) = messages(rank.ask(UpdateFromOutput(sampled_token_ids={"nobody": [1]})), Error)
    assert error.message == "request nobody is not in it"
    sent = rank.ask(UpdateFromOutput(sampled_token_ids={"r0": [5]}))
    assert replies(sent) == [{"r": "emitted"}]
    assert unpack_ints(messages(sent, Outputs)[0].tokens).tolist() == [5]
    assert replies(rank.ask(UpdateDraftTokens(drafts={"r0": [1]}))) == [["r0"]]


def test_shutdown_answers_and_stops(rank: Rank) -> None:
    sent = rank.ask(Shutdown())
    assert replies(sent) == [True]
    assert isinstance(sent[-1], Stop)


def test_an_error_from_a_peer_is_counted(rank: Rank) -> None:
    rank.give(Received(EXECUTOR, Error(code="invalid_message", message="no")))
    assert rank.counters.snapshot()["rank_errors_received/executor"] == 1


def test_the_same_events_give_the_same_effects() -> None:
    def run() -> list[Any]:
        rank = Rank()
        rank.start(0, 1, 2)
        sent = [*rank.add(2, 0, 1), *rank.add(0, 0), *rank.ask(SetPause(mode="abort")), *rank.loads]
        return [*sent, *rank.result(0, 2), *rank.give(PeerDown(frontend(2), "it ended")), *rank.loads]

    assert run() == run()


def adapters(number: int, *identities: str) -> Received:
    return Received(EXECUTOR, Adapters(number=number, identities=list(identities)))


def test_only_adapters_that_the_executor_has_are_taken(rank: Rank) -> None:
    (refused,) = rank.add(0, 1, adapter="A")
    (ended,) = refused.message.ended
    assert (ended.reason, ended.code) == ("error", "unavailable")
    assert ended.message == "rank 1 has not the adapter, or has it no more"
    assert rank.give(adapters(3, "A")) == [Send(EXECUTOR, AdaptersHeld(number=3))]
    rank.add(0, 1, adapter="A")
    assert rank.scheduler.adapters() == ["A"]


def test_the_executor_hears_when_the_last_request_with_an_adapter_has_ended(rank: Rank) -> None:
    rank.give(adapters(1, "A", "B"))
    rank.add(0, 1, 2, adapter="A")
    rank.add(1, 3, adapter="B")
    (held,) = rank.give(adapters(2, "C"))
    assert held == Send(EXECUTOR, AdaptersHeld(number=2, identities=["A", "B"]))
    assert all(isinstance(refused.message, Outputs) for refused in rank.add(0, 4, adapter="A"))
    rank.scheduler.ending = {(0, 1)}
    assert not [effect for effect in rank.result(0, 2) if isinstance(effect.message, AdaptersHeld)]  # as before
    for index, handle, left in ((1, 3, ["A"]), (0, 2, [])):
        told = rank.give(Received(frontend(index), AbortRequests(handles=pack_ints([handle]))))
        assert Send(EXECUTOR, AdaptersHeld(number=2, identities=left)) in told
    rank.give(PeerDown(EXECUTOR, "it ended"))
    rank.give(PeerUp(EXECUTOR), Received(EXECUTOR, POOL))
    assert rank.add(0, 5, adapter="C")[0].message.ended[0].code == "unavailable"


def test_a_command_that_is_not_for_ranks_is_refused(rank: Rank) -> None:
    (error,) = rank.ask(ListAdapters())
    assert error.message.code == "not_for_ranks"


def test_every_command_is_handled() -> None:
    from typing import get_args

    from bus.messages import AnyCommand
    from ranks.commands import SIMPLE

    core: Callable[..., Any] = RankCore(0, Config(), FakeScheduler, Counters())  # type: ignore[assignment]
    others = {LoadAdapter, UnloadAdapter, ListAdapters}
    assert set(SIMPLE) | set(core._on_command) == set(get_args(AnyCommand)) - others  # type: ignore[attr-defined]


def test_a_grammar_is_compiled_outside_and_told_to_the_scheduler_that_asked(rank: Rank) -> None:
    grammar = Grammar(kind="regex", spec="(")
    asking = Received(frontend(0), request(1, [1, 2, 3], grammar=grammar))

    def compiles(effects: list[Any]) -> list[Any]:
        return [effect for effect in effects if isinstance(effect, Compile)]

    assert compiles(rank.give(asking)) == [Compile(1, 1, grammar)]
    rank.give(Received(EXECUTOR, POOL))
    assert compiles(rank.give(asking)) == [Compile(2, 1, grammar)]
    rank.give(Posted(Compiled(1, 1, matcher="of a scheduler that is gone")))
    assert [scheduler.compiled_with for scheduler in rank.schedulers] == [[], []]
    assert rank.counters.snapshot()["rank_stale_grammars"] == 1
    (outputs,) = messages(rank.give(Posted(Compiled(2, 1, "no end"))), Outputs)
    assert [(ended.handle, ended.code, ended.message) for ended in outputs.ended] == [(1, "invalid", "no end")]
    assert rank.scheduler.compiled_with == [(1, None, "no end")]
