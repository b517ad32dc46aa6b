"""Which adapters are loaded, by events: who is told, who is waited for, and when a slot is free again."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from bus.core import Effect, Peer, PeerDown, PeerUp, Posted, Received, Tick
from bus.messages import (
    Adapter,
    AdapterRead,
    Adapters,
    AdaptersHeld,
    CommandRequest,
    Error,
    ExecutorStatus,
    KvPool,
    LoadAdapter,
    Message,
    PartialSchedule,
    PlaceAdapter,
    ReadAdapter,
    Ready,
    Reply,
    UnloadAdapter,
)
from bus.wire import pack_ints
from executor.core import ExecutorCore
from tests.executor.test_core import CONFIG, FRONTEND, LIMITS, Bench, decoding, rank

TWO = msgspec.structs.replace(CONFIG, max_loras=2)
FOLLOWER = Peer("follower", "executor", 1, 7)


@dataclass
class Loading(Bench):
    """The bench of the core's own tests, with all other effects in `done`."""

    done: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = [Adapter(name="first", path="/first", identity="1st")] if self.config.lora_modules else []
        self.core = ExecutorCore(self.config, "tiny", LIMITS, adapters=first)
        self.feed(PeerUp(FRONTEND))

    def do(self, effect: Effect) -> None:
        super().do(effect)
        if isinstance(effect, ReadAdapter | PlaceAdapter):
            self.done.append(effect)

    def take(self, kind: type[Message]) -> list[Any]:
        """The messages of a kind that were sent since the last time, any other kinds aside."""
        found = [send.message for send in self.sent if isinstance(send.message, kind)]
        self.sent = [send for send in self.sent if not isinstance(send.message, kind)]
        return found

    def ask(self, body: Any, command_id: int = 1, deadline_s: float | None = None) -> None:
        self.feed(Received(FRONTEND, CommandRequest(command_id=command_id, body=body, deadline_s=deadline_s)))

    def load(self, name: str, **options: Any) -> None:
        """Have an adapter loaded, as far as it goes without ranks; its identity is its name and path."""
        self.ask(LoadAdapter(name=name, path=f"/{name}", **options))
        self.read(f"{name}@/{name}")

    def read(self, identity: str = "", fault: str = "", number: int | None = None) -> None:
        if number is None:
            number = next(item.number for item in reversed(self.done) if isinstance(item, ReadAdapter))
        self.feed(Posted(AdapterRead(number=number, identity=identity, fault=fault)))

    def heard(self, index: int, *held: str) -> None:
        """A rank answers what it was told last."""
        told = [send.message for send in self.sent if isinstance(send.message, Adapters) and send.peer.index == index]
        self.hold(index, told[-1].number, *held)

    def hold(self, index: int, number: int, *held: str) -> None:
        self.feed(Received(rank(index), AdaptersHeld(number=number, identities=list(held))))

    def usable(self) -> list[str]:
        """As frontends were told last."""
        return [adapter.identity for adapter in self.take(ExecutorStatus)[-1].adapters]

    def sent_adapters(self) -> list[Adapters]:
        return [send.message for send in self.sent if isinstance(send.message, Adapters)]

    def tick(self, after: float) -> None:
        self.now += after
        self.feed(Tick(self.now, 0.0, {}))

    def start_row(self, index: int, step: int, adapter: str) -> None:
        schedule = PartialSchedule(step=step, rows=pack_ints([1]), new=[decoding(1, adapter)], more=True)
        self.feed(Received(rank(index), schedule))


@pytest.fixture
def bench() -> Loading:
    bench = Loading(TWO)
    bench.up(0, 1)
    for index in (0, 1):
        bench.heard(index)
    bench.take(Adapters)
    bench.take(ExecutorStatus)
    return bench


def test_an_adapter_is_read_then_placed_then_known_to_all_ranks_then_usable(bench: Loading) -> None:
    bench.ask(LoadAdapter(name="a", path="/a"), command_id=5)
    assert bench.done == [ReadAdapter(number=1, name="a", path="/a")]
    assert not bench.take(Adapters)
    bench.read("A")
    assert bench.done[1:] == [PlaceAdapter(number=1, slot=1)]
    assert [told.identities for told in bench.sent_adapters()] == [["A"], ["A"]]
    bench.heard(0)
    assert not bench.take(Reply)
    assert not bench.take(ExecutorStatus)
    bench.heard(1)
    assert bench.usable() == ["A"]
    assert bench.take(Reply) == [Reply(command_id=5, value="A")]
    bench.start_row(0, 1, "A")
    bench.drain()
    assert [setup.adapter for setup in bench.steps[-1].step.setups] == [1]


def test_a_rank_knows_the_adapters_before_it_may_begin() -> None:
    bench = Loading(msgspec.structs.replace(TWO, lora_modules="first=/first"))
    bench.up(0)
    kinds = [type(send.message) for send in bench.sent if send.peer == rank(0)]
    assert kinds == [Adapters, KvPool]
    bench.start_row(0, 1, "1st")
    bench.drain()
    assert [setup.adapter for setup in bench.steps[-1].step.setups] == [1]
    bench.heard(0)
    bench.load("b")
    assert bench.done[-1].slot == 2


def test_a_row_with_an_adapter_that_is_not_there_is_refused(bench: Loading) -> None:
    bench.start_row(0, 1, "nothing")
    bench.drain()
    assert not bench.steps
    (error,) = bench.take(Error)
    assert "row 1: adapter nothing is not loaded" in error.message


def test_without_adapters_ranks_hear_nothing_of_them() -> None:
    bench = Loading(CONFIG)
    bench.up(0)
    assert not bench.take(Adapters)
    bench.ask(LoadAdapter(name="a", path="/a"))
    (error,) = bench.take(Error)
    assert error.message == "adapters are off; max_loras says how many there may be"


def load_all(bench: Loading, *names: str) -> None:
    for name in names:
        bench.load(name)
        for index in (0, 1):
            bench.heard(index)
    bench.take(Adapters)
    bench.take(Reply)
    bench.take(ExecutorStatus)


def test_a_slot_is_free_when_no_rank_has_requests_with_its_adapter(bench: Loading) -> None:
    load_all(bench, "a", "b")
    bench.ask(UnloadAdapter(name="a"), command_id=9)
    assert bench.usable() == ["b@/b"]
    bench.heard(0, "a@/a")
    bench.heard(1)
    bench.load("c")
    (error,) = bench.take(Error)
    assert "there are 2 adapters already, which is max_loras, those that go counted in; loaded are 'b'" in error.message
    assert not bench.take(Reply)
    number = bench.take(Adapters)[-1].number
    bench.hold(0, number)
    assert bench.take(Reply) == [Reply(command_id=9, value=True)]
    bench.load("c")
    assert bench.done[-1] == PlaceAdapter(number=4, slot=1)


def test_what_a_rank_says_counts_when_all_that_it_sent_before_is_in_steps(bench: Loading) -> None:
    """Otherwise a row of a request that has ended already would be set up with an adapter that is gone."""
    load_all(bench, "a")
    bench.start_row(0, 1, "")
    bench.drain()
    bench.start_row(1, 1, "")
    bench.drain()  # now the device has two steps, and takes no third
    bench.start_row(0, 2, "a@/a")
    bench.ask(UnloadAdapter(name="a"))
    bench.heard(0)
    bench.heard(1)
    assert not bench.take(Reply)
    bench.finish()
    bench.drain()
    assert [setup.adapter for setup in bench.steps[-1].step.setups] == [1]
    assert not bench.take(Error)
    assert [reply.value for reply in bench.take(Reply)] == [True]


def test_a_rank_that_is_lost_is_not_waited_for(bench: Loading) -> None:
    load_all(bench, "a")
    bench.ask(UnloadAdapter(name="a"))
    bench.heard(0)
    bench.heard(1, "a@/a")
    bench.feed(PeerDown(rank(1), "it ended"))
    assert [reply.value for reply in bench.take(Reply)] == [True]


def test_another_adapter_of_the_name_takes_its_place_at_once(bench: Loading) -> None:
    load_all(bench, "a")
    bench.ask(LoadAdapter(name="a", path="/new", replace=True))
    bench.read("new")
    assert [told.identities for told in bench.sent_adapters()] == [["a@/a", "new"]] * 2
    bench.heard(0)
    bench.heard(1)
    assert bench.usable() == ["new"]
    assert [told.identities for told in bench.sent_adapters()[-2:]] == [["new"]] * 2
    bench.ask(LoadAdapter(name="a", path="/new", replace=True), command_id=3)
    bench.read("new")
    assert bench.done[-1] == PlaceAdapter(number=3, slot=0)
    assert [reply.value for reply in bench.take(Reply)] == ["new", "new"]
    bench.load("c")  # the old one is still held, as far as is known
    assert "there are 2 adapters already" in bench.take(Error)[0].message


def test_an_adapter_that_goes_may_come_back(bench: Loading) -> None:
    load_all(bench, "a")
    bench.ask(UnloadAdapter(name="a"), command_id=3)
    bench.heard(0, "a@/a")
    bench.heard(1)
    bench.load("a")
    assert bench.done[-1].slot == 0
    assert bench.take(Reply) == [Reply(command_id=3, value=True)]
    bench.heard(0)
    bench.heard(1)
    assert bench.usable() == ["a@/a"]


def test_deadlines_are_answered_and_the_work_goes_on(bench: Loading) -> None:
    load_all(bench, "a")
    bench.ask(UnloadAdapter(name="a"), command_id=2, deadline_s=1.0)
    bench.ask(LoadAdapter(name="b", path="/b"), command_id=3, deadline_s=2.0)
    bench.tick(1.5)
    (error,) = bench.take(Error)
    assert (error.command_id, error.code) == (2, "deadline")
    assert error.message == "requests still have adapter 'a'; it takes no new ones, and goes when they have ended"
    bench.tick(1.0)
    assert [(late.command_id, late.message) for late in bench.take(Error)] == [
        (3, "adapter 'b' is not loaded yet, but may be soon")
    ]
    bench.read("B")
    for index in (0, 1):
        bench.heard(index)
    assert bench.usable() == ["B"]
    assert not bench.take(Reply)
    bench.tick(1.0)
    assert not bench.take(Error)


def test_an_unload_that_does_not_wait_is_answered_at_once(bench: Loading) -> None:
    load_all(bench, "a")
    bench.ask(UnloadAdapter(name="a", wait=False))
    assert [reply.value for reply in bench.take(Reply)] == [True]
    assert bench.usable() == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (LoadAdapter(name="", path="/x"), "an adapter cannot be called ''"),
        (LoadAdapter(name="tiny", path="/x"), "an adapter cannot be called 'tiny'; it needs a name that is not"),
        (LoadAdapter(name="a", path="/x"), "adapter 'a' is loaded already; with replace another may take its place"),
        (UnloadAdapter(name="b"), "adapter 'b' is not loaded; loaded are 'a'"),
    ],
)
def test_what_cannot_be_done_is_refused(bench: Loading, body: Any, sentence: str) -> None:
    load_all(bench, "a")
    bench.ask(body)
    assert sentence in bench.take(Error)[0].message


def test_commands_to_load_are_carried_out_one_after_the_other(bench: Loading) -> None:
    for number, name in enumerate(("a", "b"), 1):
        bench.ask(LoadAdapter(name=name, path=f"/{name}"), command_id=number)
    assert len(bench.done) == 1
    bench.read(fault="/a holds no adapter")
    (error,) = bench.take(Error)
    assert (error.command_id, error.message) == (1, "/a holds no adapter")
    assert bench.done[1:] == [PlaceAdapter(number=1, slot=0), ReadAdapter(number=2, name="b", path="/b")]
    bench.read("late", number=1)  # of the first, which is over
    assert len(bench.done) == 3
    bench.read("B")
    assert bench.done[-1] == PlaceAdapter(number=2, slot=1)


# Several processes


def group() -> Loading:
    bench = Loading(msgspec.structs.replace(TWO, executors=2))
    bench.feed(PeerUp(FOLLOWER), Received(FOLLOWER, Ready(programs="")))
    return bench


def to_follower(bench: Loading) -> list[Message]:
    return [send.message for send in bench.sent if send.peer == FOLLOWER]


def test_the_other_processes_read_and_place_adapters_too() -> None:
    bench = group()
    bench.load("a")
    assert bench.done == to_follower(bench) == [ReadAdapter(number=1, name="a", path="/a")]
    bench.feed(Received(FOLLOWER, AdapterRead(number=1, identity="a@/a")))
    assert bench.done[1:] == to_follower(bench)[1:] == [PlaceAdapter(number=1, slot=1)]
    assert bench.usable() == ["a@/a"]


def test_hosts_with_different_files_refuse_an_adapter() -> None:
    bench = group()
    bench.load("a")
    bench.feed(Received(FOLLOWER, AdapterRead(number=1, identity="another")))
    assert bench.take(Error)[0].message == "the executor's processes find different files in /a"
    assert bench.done[1:] == to_follower(bench)[1:] == [PlaceAdapter(number=1, slot=0)]
    bench.load("a")
    bench.feed(Received(FOLLOWER, AdapterRead(number=2, fault="/a holds no adapter")))
    assert bench.take(Error)[0].message == "/a holds no adapter"


def test_nothing_is_read_before_all_processes_are_there() -> None:
    bench = Loading(msgspec.structs.replace(TWO, executors=2))
    bench.ask(LoadAdapter(name="a", path="/a"))
    assert bench.take(Error)[0].message == "the executor's other processes are not ready; try again soon"
