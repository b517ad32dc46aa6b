"""States of cores: what is captured comes back, shared things are shared again, and strangers are refused."""

import itertools
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from bus.config import Config
from bus.core import Drained, Peer
from bus.journal import state
from bus.journal.records import ENCODER
from bus.journal.state import StateError, capture, restore
from bus.links import Identity
from bus.messages import Sampling
from tests.journals import INCARNATION, Inline, Nothing, Recording

PEER = Peer("step", "rank", 0, 1)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(slots=True, eq=False)
class Slotted:
    value: Any
    others: list[Any] = field(default_factory=list)
    unset: Any = field(init=False)


class Lazy:
    LEFT_OUT = ("loaded",)
    loaded: Any = None

    def __init__(self) -> None:
        self.name = "lazy"
        self.loaded = threading.Lock()


class Core:
    """Holds a `value`, and what it was built with."""

    def __init__(self, value: Any = None, built_with: Any = None) -> None:
        self.value = value
        self.built_with = built_with

    def handle(self, event: Any) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def _these_classes_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PACKAGES", (*state.PACKAGES, __name__.partition(".")[0]))


def back(value: Any) -> Any:
    restored = restore(capture(Core(value)), Core())
    assert isinstance(restored, Core)
    return restored.value


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0,
            -(2**63),
            2**64 - 1,
            2**70,
            -(2**70),
            1.5,
            "text",
            b"bytes",
            bytearray(b"more"),
            memoryview(b"a"),
        ),
        *([1, [2]], (1, (2, [3])), {1: "a", (2, 3): {"b": 4}}, {b"y", b"x"}, frozenset({3, 1, 2}), deque([1, 2])),
        *(PEER, Pair(1, [2]), {PEER: PEER}, int, Peer),
    ],
)
def test_comes_back(value: Any) -> None:
    assert back(value) == value
    assert type(back(value)) is type(value)


def test_arrays_come_back_wide_or_not() -> None:
    wide = np.zeros((100, 1000), np.int32)
    wide[3, :300] = 5
    for array in (np.arange(7, dtype=np.int64), np.zeros(0, np.bool_), wide, np.zeros((100, 1000), np.float32)):
        again = back(array)
        assert (again.dtype, again.shape) == (array.dtype, array.shape)
        assert (again == array).all()
        again[...] = 1  # it can be written to
    assert len(capture(Core(wide))) < wide.nbytes * 0.6
    assert back(np.int32(5)) == np.int32(5)


def test_what_was_one_is_one_again() -> None:
    shared: list[Any] = [1]
    loop = Slotted(shared)
    loop.others = [loop, shared]
    again = back({"loop": loop, "shared": shared, "default": defaultdict(list, {1: shared})})
    assert again["loop"].others[0] is again["loop"]
    assert again["loop"].others[1] is again["loop"].value is again["shared"]
    again["default"][2].append(3)
    assert again["default"] == {1: [1], 2: [3]}
    assert not hasattr(again["loop"], "unset")


def test_a_message_is_encoded_as_before() -> None:
    message = msgspec.msgpack.decode(ENCODER.encode(Sampling(seed=1, max_tokens=2)), type=Sampling)
    assert ENCODER.encode(back(message)) == ENCODER.encode(message)


def test_methods_and_counts_come_back() -> None:
    count = itertools.count(5, 2)
    next(count)
    core = Core([count])
    core.value.append(core.handle)
    again = restore(capture(core), Core())
    assert isinstance(again, Core)
    assert [next(again.value[0]), next(again.value[0])] == [7, 9]
    assert again.value[1].__self__ is again
    assert next(count) == 7  # it is not advanced by looking


def test_what_a_core_was_built_with_is_taken_from_the_new_one() -> None:
    def of_the_old() -> None: ...

    def of_the_new() -> None: ...

    again = restore(capture(Core(1, of_the_old)), Core(2, of_the_new))
    assert isinstance(again, Core)
    assert (again.value, again.built_with) == (1, of_the_new)


def test_what_is_left_out_is_as_the_class_has_it() -> None:
    again = back(Lazy())
    assert (again.name, again.loaded) == ("lazy", None)


def test_what_cannot_be_written_down_is_named() -> None:
    with pytest.raises(StateError, match=r"Core\.value: Slotted\.value: a _thread\.lock cannot be written down"):
        capture(Core([Slotted(threading.Lock())]))


@pytest.mark.parametrize("name", ["subprocess:Popen", "builtins:eval", "bus.core:Nobody"])
def test_nothing_but_our_classes_is_made(name: str) -> None:
    data = ENCODER.encode(([0], [["object", name, {}]]))
    with pytest.raises(StateError, match="not one of this code"):
        restore(data, Core())


def test_a_state_of_other_code_is_refused() -> None:
    root, nodes = msgspec.msgpack.decode(capture(Core(PEER)))
    nodes[1][2]["wings"] = 2
    with pytest.raises(StateError, match="not one of this code"):
        restore(ENCODER.encode((root, nodes)), Core())


def test_recording_goes_on_where_a_state_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.journal.recorder.Writer", Inline)
    monkeypatch.setattr("bus.journal.recorder.MB", 1)
    monkeypatch.setattr("bus.journal.recorder.BATCH_BYTES", 1)
    core = Core([threading.Lock()])
    recording = Recording(tmp_path, Identity("rank", 0, INCARNATION), core, Nothing(), Config())
    for number in range(10):
        recording.handle(Drained(float(number)))
    assert len(recording.end().files) == 10
