"""Two shells on a real ipc socket: handshake, messages both ways, restarts, silence, floods and nonsense."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bus.config import Config
from bus.core import Drained, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Tick, WakeAt
from bus.journal import recorder as journal
from bus.journal.reader import Record, find
from bus.links import Identity
from bus.messages import Error, Heartbeat, KvPool, PartialSchedule, StepResult, Welcome
from bus.replay import EventReader
from bus.shell import Shell
from bus.wire import ENVELOPE, pack_ints
from tests.journals import Nothing

DEADLINE_S = 10


class Recorder:
    """A core that keeps what it is given and says what it is told to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.counters: dict[str, float] = {}
        self._changed = threading.Condition()

    def handle(self, event: Event) -> list[Any]:
        if isinstance(event, Tick):
            with self._changed:
                self.counters = event.bus_counters
                self._changed.notify_all()
        if isinstance(event, Drained | Tick):
            return []
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        if isinstance(event, Posted) and isinstance(event.value, threading.Event):
            event.value.wait(DEADLINE_S)  # busy until the test says otherwise
            return []
        return [event.value] if isinstance(event, Posted) else []

    def wait_for_count(self, name: str, count: int) -> None:
        """Wait until the shell has reported exactly this total."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.counters.get(name) == count, DEADLINE_S), self.counters

    def wait(self, condition: Callable[[list[Event]], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), DEADLINE_S), self.events
            return condition(self.events)


class Running:
    """A shell in a thread of its own."""

    def __init__(self, role: Any, config: Config, incarnation: int, index: int = 0) -> None:
        self.core = Recorder()
        me = Identity(role, index, incarnation)
        recorder = journal.start(config, me, Nothing())
        self.shell = Shell(me, config, self.core, lambda effect: None, recorder)
        self._thread = threading.Thread(target=self.shell.run)

    def start(self) -> "Running":
        self._thread.start()
        return self

    def end(self) -> None:
        self.shell.stop("the test is over")
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path), heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, max_message_bytes=4096)


@pytest.fixture
def start(config: Config) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def run(role: Any, incarnation: int, index: int = 0) -> Running:
        process = Running(role, config, incarnation, index)
        if role == "executor":
            process.shell.bind("step", config.step_endpoint())
        else:
            process.shell.connect("step", config.step_endpoint())
        running.append(process.start())
        return process

    yield run
    for process in running:
        if process._thread.is_alive():
            process.end()


@pytest.fixture
def raw(config: Config) -> Iterator[Callable[[bytes], "zmq.Socket[bytes]"]]:
    context = zmq.Context()
    sockets = []

    def connect(identity: bytes) -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        socket.connect(config.step_endpoint())
        sockets.append(socket)
        return socket

    yield connect
    for socket in sockets:
        socket.close()
    context.term()


def up(events: list[Event]) -> Peer | None:
    return next((event.peer for event in reversed(events) if isinstance(event, PeerUp)), None)


def received(events: list[Event]) -> list[Any]:
    return [event.message for event in events if isinstance(event, Received)]


def downs(events: list[Event]) -> list[Peer]:
    return [event.peer for event in events if isinstance(event, PeerDown)]


POOL = KvPool(num_blocks=8, block_size=16, max_model_len=64, vocab_size=100)


@pytest.mark.parametrize("first", ["executor", "rank"])
def test_messages_pass_both_ways_whoever_starts_first(start: Any, first: str) -> None:
    processes = {role: start(role, 7) for role in (first, "rank" if first == "executor" else "executor")}
    executor, rank = processes["executor"], processes["rank"]
    to_rank, to_executor = executor.core.wait(up), rank.core.wait(up)
    assert (to_rank.role, to_rank.index, to_executor.role) == ("rank", 0, "executor")
    executor.shell.post(Send(to_rank, POOL))
    rank.shell.post(Send(to_executor, PartialSchedule(step=3, rows=pack_ints([1, 2]))))
    assert rank.core.wait(received) == [POOL]
    assert executor.core.wait(received)[0].step == 3


def test_a_restarted_listener_is_a_new_peer_and_hears_nothing_meant_for_the_old_one(start: Any) -> None:
    executor, rank = start("executor", 1), start("rank", 5)
    old = rank.core.wait(up)
    executor.core.wait(up)
    executor.end()
    rank.core.wait(downs)
    second = start("executor", 2)
    new = rank.core.wait(lambda events: (peer := up(events)) and peer.incarnation == 2 and peer)
    rank.shell.post(Send(old, PartialSchedule(step=1, rows=pack_ints([]))))
    rank.shell.post(Send(new, PartialSchedule(step=2, rows=pack_ints([]))))
    assert [message.step for message in second.core.wait(received)] == [2]


def test_a_restarted_dialer_replaces_its_earlier_start(start: Any) -> None:
    executor = start("executor", 1)
    first = start("rank", 5)
    executor.core.wait(up)
    start("rank", 6)
    executor.core.wait(lambda events: (peer := up(events)) and peer.incarnation == 6)
    assert [peer.incarnation for peer in downs(executor.core.events)][:1] == [5]
    assert up(first.core.events) is not None


def test_the_link_survives_a_loss_that_only_one_side_saw(start: Any) -> None:
    executor, rank = start("executor", 1), start("rank", 5)
    peer = rank.core.wait(up)
    for side in rank.shell._sides.values():
        side.lose(peer, "the test says so")
    executor.core.wait(lambda events: len([event for event in events if isinstance(event, PeerUp)]) == 2)
    assert executor.core.wait(lambda events: [type(event) for event in events] == [PeerUp, PeerDown, PeerUp])


@pytest.fixture
def journaled(config: Config) -> Config:
    return msgspec.structs.replace(config, journal="rank")


def test_the_journal_has_all_that_the_core_was_given_and_answered(journaled: Config) -> None:
    executor, rank = Running("executor", journaled, 7), Running("rank", journaled, 8, 1)
    executor.shell.bind("step", journaled.step_endpoint())
    rank.shell.connect("step", journaled.step_endpoint())
    executor.start()
    rank.start()
    try:
        to_rank, to_executor = executor.core.wait(up), rank.core.wait(up)
        executor.shell.post(Send(to_rank, POOL))
        schedule = PartialSchedule(step=3, rows=pack_ints([1, 2]))
        for effect in (Send(to_executor, schedule), WakeAt(1.5), Send(to_rank, schedule), Error(code="a", message="b")):
            rank.shell.post(effect)
        executor.core.wait(received)
        rank.core.wait(lambda events: len(events) >= 6)
    finally:
        rank.end()
        executor.end()
    (found,) = find([str(journaled.journal_path)])
    header = found.header()
    assert (header.role, header.index, header.incarnation) == ("rank", 1, 8)
    turns = [record.turn for record in found.records() if isinstance(record, Record)]
    reader = EventReader("rank", ())
    told = [reader.event(turn) for turn in turns if turn.kind not in ("posted", "tick", "drained")]
    assert told == [event for event in rank.core.events if not isinstance(event, Posted)]
    assert POOL in received(told)
    effects = [(effect.subject, msgspec.msgpack.decode(effect.data)) for turn in turns for effect in turn.effects]
    body = msgspec.msgpack.encode(schedule)
    assert effects[:3] == [(to_executor, body), ("WakeAt", 1.5), (to_rank, body)]  # it was not up, but was meant
    assert effects[3][0] == "Error"
    assert {turn.kind for turn in turns} >= {"drained", "tick"}


def test_the_journal_has_the_event_that_ended_the_process(journaled: Config) -> None:
    def fail(effect: Any) -> None:
        raise RuntimeError("it cannot be done")

    me = Identity("rank", 1, 8)
    shell = Shell(me, journaled, Recorder(), fail, journal.start(journaled, me, Nothing()))
    shell.post("this ends it")
    with pytest.raises(RuntimeError):
        shell.run()
    (found,) = find([str(journaled.journal_path)])
    *_, last = found.records()
    assert isinstance(last, Record)
    assert (last.turn.kind, msgspec.msgpack.decode(last.turn.data)) == ("posted", "this ends it")
    assert last.turn.raised == "RuntimeError: it cannot be done"


def hello(socket: Any, incarnation: int = 5, **fields: Any) -> None:
    values = {"role": "rank", "index": 1, "incarnation": incarnation, "major": 1, "minor": 0} | fields
    send(socket, incarnation, 0, {"type": "Hello"} | values)


def send(socket: Any, sender: int, addressee: int, message: Any) -> None:
    socket.send_multipart([ENVELOPE.pack(sender, addressee), msgspec.msgpack.encode(message)])


def answer(socket: Any) -> Any:
    while True:
        _, body = socket.recv_multipart()
        message = msgspec.msgpack.decode(body, type=Welcome | Error | Heartbeat | StepResult | KvPool)
        if not isinstance(message, Heartbeat):
            return message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"major": 2}, "protocol"),
        ({"role": "client"}, "role"),
        ({"index": 2}, "index"),
        ({"index": -1}, "index"),
        ({"incarnation": 2**63}, "incarnation"),
        ({"role": "nobody"}, "invalid_message"),
        ({"index": "one"}, "invalid_message"),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused_with_a_sentence(start: Any, raw: Any, fields: Any, code: str) -> None:
    start("executor", 1)
    socket = raw(b"someone")
    hello(socket, **fields)
    error = answer(socket)
    assert (type(error), error.code) == (Error, code)
    assert len(error.message) > 10


def test_an_older_start_cannot_replace_a_newer_one(start: Any, raw: Any) -> None:
    start("executor", 1)
    new, old = raw(b"new"), raw(b"old")
    hello(new, incarnation=9)
    assert isinstance(answer(new), Welcome)
    hello(old, incarnation=8)
    assert answer(old).code == "stale_hello"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b""], "malformed_message"),
        ([b"x"], "malformed_message"),
        ([b"1", b"2", b"3"], "malformed_message"),
        ([bytes(16), b"\xc1"], "invalid_message"),
        ([bytes(16), b""], "invalid_message"),
        ([bytes(16), b"\x91" * 2000 + b"\x90"], "invalid_message"),
        ([bytes(16), msgspec.msgpack.encode({"type": "Nothing"})], "invalid_message"),
        ([bytes(16), msgspec.msgpack.encode({"type": "PartialSchedule"})], "invalid_message"),
        (
            [bytes(16), msgspec.msgpack.encode({"type": "PartialSchedule", "step": 1, "rows": b"123"})],
            "invalid_message",
        ),
        ([bytes(16), msgspec.msgpack.encode({"type": "PartialSchedule", "step": 1, "rows": [1]})], "invalid_message"),
        ([bytes(16), bytes(5000)], "too_large_message"),
        ([bytes(16), msgspec.msgpack.encode({"type": "Heartbeat"})], "no_hello"),
    ],
)
def test_nonsense_is_counted_and_answered_and_hurts_nobody(start: Any, raw: Any, parts: Any, code: str) -> None:
    executor = start("executor", 1)
    socket = raw(b"someone")
    socket.send_multipart(parts)
    assert answer(socket).code == code
    executor.core.wait_for_count(f"bus_rejected_frames/step/{code.removesuffix('_message')}", 1)
    hello(socket)
    assert isinstance(answer(socket), Welcome)
    send(socket, 5, 1, PartialSchedule(step=4, rows=pack_ints([])))
    assert executor.core.wait(received)[0].step == 4


@pytest.mark.parametrize(("sender", "addressee"), [(4, 1), (5, 2), (0, 0)])
def test_frames_of_other_incarnations_are_dropped(start: Any, raw: Any, sender: int, addressee: int) -> None:
    executor = start("executor", 1)
    socket = raw(b"someone")
    hello(socket)
    assert isinstance(answer(socket), Welcome)
    send(socket, sender, addressee, PartialSchedule(step=4, rows=pack_ints([])))
    send(socket, 5, 1, PartialSchedule(step=5, rows=pack_ints([])))
    assert [message.step for message in executor.core.wait(received)] == [5]
    executor.core.wait_for_count("bus_rejected_frames/step/stale", 1)


def test_a_silent_peer_is_lost_and_one_that_beats_is_not(start: Any, raw: Any) -> None:
    executor = start("executor", 1)
    start("rank", 6, index=0)
    socket = raw(b"someone")
    hello(socket)
    started = time.monotonic()
    peers = executor.core.wait(downs)
    assert [(peer.role, peer.index) for peer in peers] == [("rank", 1)]
    assert time.monotonic() - started >= 0.9


def test_a_repeated_hello_is_answered_again_and_is_no_news(start: Any, raw: Any) -> None:
    executor = start("executor", 1)
    socket = raw(b"someone")
    for _ in range(2):
        hello(socket)
        assert isinstance(answer(socket), Welcome)
    hello(socket, attempt=1)
    assert answer(socket).attempt == 1
    assert executor.core.wait(lambda events: [type(event) for event in events] == [PeerUp, PeerDown, PeerUp])


def test_what_is_posted_after_the_end_is_for_nobody_and_harms_nothing(tmp_path: Path) -> None:
    shell = Shell(Identity("rank", 0, 1), Config(run_dir=str(tmp_path)), Recorder(), lambda effect: None)
    shell.stop("the test is over")
    assert shell.run() == "the test is over"
    with (tmp_path / "other").open("wb"):  # takes the lowest free descriptor
        shell.post("late")
    assert (tmp_path / "other").stat().st_size == 0


@pytest.mark.parametrize("leaving", ["executor", "rank"])
def test_an_orderly_end_is_known_at_once_even_if_it_came_while_busy(config: Config, start: Any, leaving: str) -> None:
    """Long before the heartbeat would tell, on both sides, and though the connection is gone when Goodbye is read."""
    processes = {"executor": start("executor", 1), "rank": start("rank", 1)}
    for process in processes.values():
        process.core.wait(up)
    ending = processes.pop(leaving)
    (other,) = processes.values()
    busy = threading.Event()
    other.shell.post(busy)
    ending.end()
    began = time.monotonic()
    busy.set()
    other.core.wait(downs)
    assert time.monotonic() - began < config.heartbeat_timeout_s / 2


@pytest.mark.parametrize(("model_on_cpu", "policy"), [(False, os.SCHED_BATCH), (True, os.SCHED_OTHER)])
def test_libzmq_may_wait_for_the_loop_where_no_model_computes(
    model_on_cpu: bool, policy: int, config: Config, tmp_path: Path
) -> None:
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    rank = Running("rank", msgspec.structs.replace(config, model_on_cpu=model_on_cpu), 1)
    rank.shell.connect("step", f"ipc://{tmp_path}/nobody")
    rank.start()
    rank.core.wait_for_count("bus_sent_frames/step", 1)  # so libzmq's threads are there
    new = [task for task in Path("/proc/self/task").iterdir() if task.name not in before]
    (sockets,) = [task for task in new if (task / "comm").read_text().startswith("ZMQbg/IO")]
    assert os.sched_getscheduler(int(sockets.name)) == policy
    rank.end()
