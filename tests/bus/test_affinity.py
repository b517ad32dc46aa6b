"""Which CPU a process's messages are handled on."""

import os
from pathlib import Path

import pytest

from bus import affinity
from bus.config import Config


def spread(config: Config, cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    ranks = [affinity.choose("rank", index, config) for index in range(config.ranks)]
    return [affinity.choose("executor", 0, config), *ranks, affinity.choose("frontend", 0, config)]


def test_the_processes_of_an_engine_are_spread_over_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(ranks=4)
    assert sorted(map(str, spread(config, {3, 5, 8, 9, 11, 12}, monkeypatch))) == ["11", "12", "3", "5", "8", "9"]
    on_two = spread(config, {0, 1}, monkeypatch)
    assert on_two.count(0) == on_two.count(1) == 3
    assert set(spread(config, {7}, monkeypatch)) == {7}


def test_engines_in_other_folders_begin_with_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = set(range(64))
    begun = {spread(Config(run_dir=f"/run/{number}"), cpus, monkeypatch)[0] for number in range(20)}
    assert len(begun) > 10


def test_a_thread_is_pinned_for_as_long_as_it_takes() -> None:
    before = os.sched_getaffinity(0)
    chosen = affinity.choose("rank", 1, Config())
    assert chosen in before
    with affinity.pinned(chosen):
        assert os.sched_getaffinity(0) == {chosen}
    assert os.sched_getaffinity(0) == before
    assert affinity.choose("rank", 1, Config(pin_threads=False)) is None
    with affinity.pinned(None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("name", "found"), [("vfio/0", True), ("accel3", True), ("nvidia0", True), ("accelerometer", False)]
)
def test_messages_go_in_batches_where_there_is_an_accelerator(
    name: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affinity, "_DEVICES", tmp_path)
    assert not affinity.may_batch(Config())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert affinity.may_batch(Config()) is found
    assert not affinity.may_batch(Config(model_on_cpu=True))
    assert affinity.may_batch(Config(model_on_cpu=False))
