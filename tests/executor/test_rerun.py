"""An executor's journal: its steps are run again, and the tokens compared with those that were recorded."""

import dataclasses
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import model_files
from bus.core import Drained, Peer, PeerUp, Posted, Received
from bus.journal.reader import Journal, JournalError, Record
from bus.journal.records import ENCODER
from bus.links import Identity
from bus.messages import AdapterRead, CommandRequest, LoadAdapter, NewRow, PartialSchedule, Sampling
from bus.replay import Replay, Subject
from bus.wire import pack_ints
from executor.adapter_files import AdapterError
from executor.core import DeviceFailed, ExecutorCore, RunStep, StepDone
from executor.drafts import judge
from executor.replay import TIE, Construction, Plain, Rerun, with_model
from executor.step import Drafts, Float32, MergedStep, RowSetup, SampledStep
from tests.executor.driving import GREEDY, Driver
from tests.executor.test_core import CONFIG, FRONTEND, LIMITS, ROWS, rank
from tests.journals import INCARNATION, Recording, model

CONSTRUCTION = Construction(model="tiny", limits=LIMITS)
STEPS = 20


class Sums:
    """A runner whose model draws the sum of a row's position and all that it drew before."""

    def __init__(self, wrong_in: int = 0, gap: float = 1.0) -> None:
        """In step `wrong_in` it draws other tokens, whose score is the best by `gap`."""
        self._wrong_in = wrong_in
        self._gap = gap
        self._steps = 0
        self._last = {0: 0, ROWS: 0}
        self.corrected: list[RowSetup] = []

    def dispatch(self, step: MergedStep) -> MergedStep:
        corrections = [setup for setup in step.setups if setup.start == 3 + self._steps - 1 and setup.start > 0]
        self.corrected += corrections
        self._last |= {setup.row: int(setup.tokens[0]) for setup in corrections}
        return step

    def collect(self, step: MergedStep) -> SampledStep:
        self._steps += 1
        last = np.array([self._last[row] for row in step.rows.tolist()])
        tokens = (step.positions + last + (self._steps == self._wrong_in)) % 90
        self._last |= dict(zip(step.rows.tolist(), tokens.tolist(), strict=True))
        return SampledStep(np.where(step.samples, tokens, -1).astype(np.int32))

    def scores(self, step: MergedStep, index: int, place: int) -> Float32:
        scores = np.zeros(100, np.float32)
        scores[self._last[int(step.rows[index])]] = self._gap
        return scores


class Trying:
    """A runner whose model draws the sum of the token before and its position; so does the rank that makes drafts."""

    def __init__(self, wrong_in: int = 0, gap: float = 1.0) -> None:
        """In step `wrong_in` it draws another token after the first draft, whose score is the best by `gap`."""
        self._wrong_in = wrong_in
        self._gap = gap
        self._steps = 0
        self._tokens: dict[int, dict[int, int]] = {0: {}, ROWS: {}}
        self._drawn: list[list[int]] = []
        self.corrected: list[tuple[int, int, list[int]]] = []

    def dispatch(self, step: MergedStep) -> MergedStep:
        for setup in step.setups:
            self._tokens[setup.row].update(enumerate(setup.tokens.tolist(), setup.start))
            if setup.start > 0:
                self.corrected.append((setup.row, setup.start, setup.tokens.tolist()))
        return step

    def collect(self, step: MergedStep) -> SampledStep:
        self._steps += 1
        drafts = step.drafts or Drafts(np.zeros_like(step.rows), np.zeros(0, np.int32))
        left = drafts.tokens.tolist()
        self._drawn = []
        for row, begin, ran, tried in zip(step.rows, step.positions, step.num_tokens, drafts.counts, strict=True):
            known = int(begin + ran - tried)
            before = [self._tokens[int(row)][known - 1], *(left.pop(0) for _ in range(tried))]
            drawn = [(token + known + place) % 90 for place, token in enumerate(before)]
            if self._steps == self._wrong_in:
                drawn[1] = (drawn[1] + 1) % 90
            self._tokens[int(row)].update(enumerate(drawn, known))
            self._drawn.append(drawn)
        flat = np.array([token for drawn in self._drawn for token in drawn], np.int32)
        judged = judge(step.rows.size, drafts, np.repeat(np.arange(step.rows.size), drafts.counts + 1), flat)
        return SampledStep(judged.tokens, counts=judged.counts)

    def scores(self, step: MergedStep, index: int, place: int) -> Float32:
        scores = np.zeros(100, np.float32)
        scores[self._drawn[index][place]] = self._gap
        return scores


def schedule(step: int) -> PartialSchedule:
    new = NewRow(
        row=0,
        request_id="r",
        prompt_token_ids=pack_ints([7, 8, 9]),
        block_ids=pack_ints(range(8)),
        sampling=Sampling(
            seed=1,
            max_tokens=100,
        ),
    )
    first = step == 1
    counts = pack_ints([3]) if first else pack_ints([])
    return PartialSchedule(step=step, rows=pack_ints([0]), num_tokens=counts, new=[new] if first else [], more=True)


def record(folder: Path, failure: bool = False, **settings: Any) -> Journal:
    """Two ranks decode, each one row."""
    config = msgspec.structs.replace(CONFIG, **settings)
    core = ExecutorCore(config, "tiny", LIMITS)
    me = Identity("executor", 0, INCARNATION)
    recording = Recording(folder, me, core, CONSTRUCTION, config, Plain(), model(100))
    runner, given = Sums(), deque[RunStep]()
    peers: list[Peer] = [rank(0), rank(1)]

    def feed(event: Any) -> None:
        given.extend(effect for effect in recording.handle(event) if isinstance(effect, RunStep))

    for peer in peers:
        feed(PeerUp(peer))
    for step in range(1, STEPS + 1):
        for peer in peers:
            feed(Received(peer, schedule(step)))
        feed(Drained(float(step)))
        run = given.popleft()
        feed(Posted(StepDone(run.number, runner.collect(run.step), 0.01)))
    if failure:
        feed(Posted(DeviceFailed("no memory is left")))
    return recording.end()


def rerun(journal: Journal, runner: Sums | Trying, core: Rerun | None = None) -> Any:
    """The record where a replay first differs, and how; None if it does not."""
    again = core or Rerun(ExecutorCore(CONFIG, "tiny", LIMITS), runner)
    replay = Replay(journal.header(), Subject(again, (StepDone, DeviceFailed), Plain()))
    for found in journal.records():
        assert isinstance(found, Record)
        difference = replay.feed(found.turn)
        if difference is not None:
            return found, difference
    return None


def test_replays_without_a_difference(tmp_path: Path) -> None:
    assert rerun(record(tmp_path, failure=True), Sums()) is None


class Adapted(Sums):
    """It draws as if there were no adapters; `placed` has those that came into slots, and before which step."""

    def __init__(self, identity: str) -> None:
        super().__init__()
        self._identity = identity
        self.placed: list[tuple[int, str, int]] = []

    def read_adapter(self, name: str, path: str) -> Any:
        if path == "/gone":
            raise AdapterError("/gone holds no adapter")
        return SimpleNamespace(identity=self._identity, path=path)

    def place_adapter(self, slot: int, adapter: Any) -> None:
        self.placed.append((slot, adapter.path, self._steps))


def record_loading(folder: Path, path: str) -> Journal:
    """One rank decodes; after five steps an adapter is loaded, and before that another was refused."""
    config = msgspec.structs.replace(CONFIG, max_loras=1)
    core = ExecutorCore(config, "tiny", LIMITS)
    me = Identity("executor", 0, INCARNATION)
    recording = Recording(folder, me, core, CONSTRUCTION, config, Plain(), model(100))
    runner, given = Sums(), deque[RunStep]()

    def feed(event: Any) -> None:
        given.extend(effect for effect in recording.handle(event) if isinstance(effect, RunStep))

    feed(PeerUp(rank(0)))
    for step in range(1, STEPS + 1):
        feed(Received(rank(0), schedule(step)))
        feed(Drained(float(step)))
        if step in (4, 5):
            body = LoadAdapter(name=f"number {step}", path=path)
            feed(Received(FRONTEND, CommandRequest(command_id=step, body=body)))
            identity, fault = ("", "it has no rank") if step == 4 else ("recorded", "")
            feed(Posted(AdapterRead(number=step - 3, identity=identity, fault=fault)))
        run = given.popleft()
        feed(Posted(StepDone(run.number, runner.collect(run.step), 0.01)))
    return recording.end()


def rerun_loading(journal: Journal, runner: Adapted) -> None:
    """Replay without a difference."""
    core = Rerun(ExecutorCore(msgspec.structs.replace(CONFIG, max_loras=1), "tiny", LIMITS), runner)
    replay = Replay(journal.header(), Subject(core, (StepDone, DeviceFailed, AdapterRead), Plain()))
    for found in journal.records():
        assert isinstance(found, Record)
        assert replay.feed(found.turn) is None


def test_adapters_are_placed_again_between_the_same_steps(tmp_path: Path) -> None:
    journal = record_loading(tmp_path, "/a")
    runner = Adapted("recorded")
    rerun_loading(journal, runner)
    assert runner.placed == [(1, "/a", 5)]
    with pytest.raises(JournalError, match="the adapter in /a is not the one that was recorded"):
        rerun_loading(journal, Adapted("another"))


def test_an_adapter_that_is_gone_is_named(tmp_path: Path) -> None:
    journal = record_loading(tmp_path, "/gone")
    with pytest.raises(JournalError, match="an adapter cannot be read again: /gone holds no adapter; --no-model"):
        rerun_loading(journal, Adapted("recorded"))


def test_a_tie_is_counted_and_the_recorded_token_put_in_its_place(tmp_path: Path) -> None:
    runner = Sums(wrong_in=7, gap=TIE / 2)
    core = Rerun(ExecutorCore(CONFIG, "tiny", LIMITS), runner)
    assert rerun(record(tmp_path), runner, core) is None
    assert [(setup.row, setup.start) for setup in runner.corrected] == [(0, 9), (ROWS, 9)]
    assert core.summary() == f"{2 * STEPS} tokens drawn again, 2 of them ties that fell the other way"


def test_another_token_is_found_where_it_is_first_drawn(tmp_path: Path) -> None:
    found, difference = rerun(record(tmp_path), Sums(wrong_in=7))
    assert found.turn.subject == "StepDone"
    assert difference.place == 0
    assert difference.recorded.fields["number"] == difference.replayed.fields["number"] == 7
    assert difference.recorded.fields["tokens"] != difference.replayed.fields["tokens"]


TRYING = dataclasses.replace(LIMITS, most_drafts=3)


def record_with_drafts(folder: Path) -> Journal:
    """Two ranks decode, each one row, and try three drafts in each step, of which the last is wrong."""
    core = ExecutorCore(CONFIG, "tiny", TRYING)
    me = Identity("executor", 0, INCARNATION)
    recording = Recording(
        folder, me, core, msgspec.structs.replace(CONSTRUCTION, limits=TRYING), CONFIG, Plain(), model(100)
    )
    runner, peers = Trying(), [rank(0), rank(1)]
    for peer in peers:
        recording.handle(PeerUp(peer))
    known, last = 3, 9
    for step in range(1, STEPS + 1):
        first = (last + known) % 90
        second = (first + known + 1) % 90
        plain = schedule(step)
        tried = msgspec.structs.replace(
            plain,
            num_tokens=pack_ints([6 if step == 1 else 4]),
            num_drafts=pack_ints([3]),
            drafts=pack_ints([first, second, (second + known + 3) % 90]),
        )
        for peer in peers:
            recording.handle(Received(peer, tried))
        (run,) = [item for item in recording.handle(Drained(float(step))) if isinstance(item, RunStep)]
        sampled = runner.collect(runner.dispatch(run.step))
        assert sampled.counts.tolist() == [3, 3]
        last, known = int(sampled.tokens[2]), known + 3
        recording.handle(Posted(StepDone(run.number, sampled, 0.01)))
    return recording.end()


@pytest.mark.parametrize("wrong_in", [0, 7])
def test_steps_with_drafts_run_again(tmp_path: Path, wrong_in: int) -> None:
    """A token that falls the other way ends what is drawn; the recorded tokens from there on are put in their place."""
    runner = Trying(wrong_in, gap=TIE / 2)
    core = Rerun(ExecutorCore(CONFIG, "tiny", TRYING), runner)
    assert rerun(record_with_drafts(tmp_path), runner, core) is None
    assert core.summary() == (
        f"{6 * STEPS} tokens drawn again, {2 if wrong_in else 0} of them ties that fell the other way"
    )
    known = 3 + 3 * (wrong_in - 1)
    assert [(row, start, len(tokens)) for row, start, tokens in runner.corrected] == (
        [(0, known + 1, 2), (ROWS, known + 1, 2)] if wrong_in else []
    )


def test_another_token_among_drafts_is_found(tmp_path: Path) -> None:
    core = Rerun(ExecutorCore(CONFIG, "tiny", TRYING), Trying(wrong_in=7))
    _, difference = rerun(record_with_drafts(tmp_path), Trying(), core)
    assert difference.recorded.fields["number"] == 7


def test_another_step_is_found_by_its_checksum(tmp_path: Path) -> None:
    step = MergedStep(
        setups=[],
        ranks=np.zeros(2, np.int32),
        rows=np.arange(2, dtype=np.int32),
        positions=np.zeros(2, np.int32),
        num_tokens=np.ones(2, np.int32),
        samples=np.ones(2, np.bool_),
        block_tables=np.zeros((2, 3), np.int32),
    )
    plain = Plain()
    said = plain(RunStep(1, step))
    for name in ("rows", "positions", "num_tokens", "block_tables"):
        changed = getattr(step, name).copy()
        changed.flat[0] += 1
        other = plain(RunStep(1, dataclasses.replace(step, **{name: changed})))
        assert [key for key in said if said[key] != other[key]] == [name]
    assert plain(RunStep(1, step)) == said


def test_needs_the_same_model(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(JournalError, match="not the one that was recorded"):
        with_model(record(tmp_path, model=str(tiny_model)).header())


def test_needs_devices_as_those_that_the_blocks_were_laid_out_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = record(tmp_path, model=str(tiny_model)).header()
    limits = dataclasses.replace(LIMITS, first_blocks=[1, 1, 1])  # each rank has a shard of its own
    header = msgspec.structs.replace(
        header,
        model=model_files.read(tiny_model).fingerprint,
        construction=msgspec.Raw(ENCODER.encode(Construction("tiny", limits))),
    )
    on_one_device = SimpleNamespace(first_blocks=[1, 71, 141])
    monkeypatch.setattr("executor.runner.Runner", lambda *_, **__: on_one_device)
    with pytest.raises(JournalError, match="laid out for other devices than are here; --no-model"):
        with_model(header)


def test_scores_say_why_a_token_was_drawn(driver: Driver) -> None:
    drawn = Sampling(seed=2**62 + 5, max_tokens=99, temperature=0.8, presence_penalty=0.5, logit_bias={7: 3.0})
    where = {(0, 1): GREEDY, (1, 0): drawn, (1, 2): msgspec.structs.replace(drawn, seed=3, temperature=3.0)}
    for place, sampling in where.items():
        driver.start(place, [3, 1, 4, 1, 5], sampling)
    tokens = []
    for count in (5, 1, 1):
        order, handle = driver.send(dict.fromkeys(where, count))
        result = driver.take((order, handle))
        for index, place in enumerate(order):
            assert int(driver.runner.scores(handle, index).argmax()) == result[place]
            tokens.append(result[place])
    assert len(set(tokens)) > 3
