"""An executor's journal: it replays as recorded, and a fault is found where it first matters."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bus.config import Config
from bus.core import Drained, Peer, PeerUp, Posted, Received, Send
from bus.journal.items import items
from bus.journal.reader import Journal
from bus.links import Identity
from bus.messages import NewRow, PartialSchedule, Sampling, StepResult
from bus.replay_command import main, replay
from bus.wire import pack_ints
from executor.core import DeviceFailed, StepDone
from executor.replay import Construction, Plain, build
from executor.rows import Rows
from executor.step import SampledStep
from tests.journals import INCARNATION, Recording, model
from tests.simulation.world import VOCAB, Process, World, limits_of, load_native

CONFIG = Config(
    scheduler="native", max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, block_size=8, num_blocks=50
)
CONSTRUCTION = Construction("simulated", limits_of(CONFIG))
ME = Identity("executor", 0, INCARNATION)


def record(folder: Path, seed: int) -> Journal:
    """The journal of an executor with a rank that restarts, under requests that do not all fit."""
    recordings = []

    def wrap(process: Process):  # type: ignore[no-untyped-def]
        if process.name[0] != "executor":
            return process.core
        recordings.append(Recording(folder, ME, process.core, CONSTRUCTION, CONFIG, Plain(), model(VOCAB)))
        return recordings[0]

    world = World(seed, CONFIG, load_native, wrap)
    world.run_until(lambda: world.ready)
    draw = random.Random(seed)
    for number in range(12):
        world.add(f"r{number}", [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))], draw.randint(1, 30))
        for _ in range(draw.randint(0, 40)):
            world.turn()
        if number == 6:
            world.start(("rank", 1))
    world.run_until(lambda: all(answer.ended for answer in world.answers.values()))
    return recordings[0].end()


@pytest.mark.parametrize("seed", range(4))
def test_replays_without_a_difference(tmp_path: Path, seed: int) -> None:
    journal = record(tmp_path, seed)
    outcome = replay(journal, journal.header(), run_model=False)
    assert outcome.difference is None
    assert outcome.damage is None
    assert outcome.events > 120
    assert outcome.frames > 50


def test_log_probabilities_and_the_end_of_a_device_replay(tmp_path: Path) -> None:
    recording = Recording(tmp_path, ME, build(CONFIG, CONSTRUCTION), CONSTRUCTION, CONFIG, Plain(), model(VOCAB))
    rank = Peer("step", "rank", 0, 1)
    sampling = Sampling(seed=1, max_tokens=9, logprobs=1)
    new = NewRow(row=2, request_id="r", prompt_token_ids=pack_ints([7]), block_ids=pack_ints([3]), sampling=sampling)
    drawn = {0: [(np.array([5, 6], np.int32), np.array([-0.5, -1.5], np.float32), 3)]}
    recording.handle(PeerUp(rank))
    recording.handle(Received(rank, PartialSchedule(step=1, rows=pack_ints([2]), new=[new])))
    recording.handle(Drained(1.0))
    (sent,) = recording.handle(Posted(StepDone(1, SampledStep(np.array([5], np.int32), drawn), 0.5)))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, StepResult)
    assert sent.message.logprobs[0].owner == 2
    recording.handle(Posted(DeviceFailed("no memory is left")))
    journal = recording.end()
    outcome = replay(journal, journal.header(), run_model=False)
    assert (outcome.events, outcome.difference, outcome.damage) == (5, None, None)
    said = [item for turn in journal.records() for item in items(turn.turn)]  # type: ignore[union-attr]
    (run,) = (item for item in said if item.type == "RunStep")
    assert run.fields["number"] == 1
    assert run.fields["sequences"] == 1


def test_a_fault_is_found_at_the_step_where_it_first_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, 1)
    right = Rows.advance
    monkeypatch.setattr(Rows, "advance", lambda rows, which, ends, samples: right(rows, which, ends - samples, samples))
    assert main(["executor", str(tmp_path), "--no-model"]) == 1
    assert "RunStep" in capsys.readouterr().out


def test_a_redacted_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = msgspec.structs.replace(CONFIG, journal_redact=True)
    recording = Recording(tmp_path, ME, build(config, CONSTRUCTION), CONSTRUCTION, config, model=model(VOCAB))
    recording.handle(Drained(1.0))
    recording.end()
    assert main(["executor", str(tmp_path), "--no-model"]) == 2
    assert "redacted" in capsys.readouterr().err
