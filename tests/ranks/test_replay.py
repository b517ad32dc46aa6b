"""A rank's journal, of every kind of event: it replays as recorded; with a fault, up to where that first matters."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import messages as m
from bus.config import Config
from bus.core import Drained, Peer, PeerDown, PeerUp, Posted, Received, Send, Tick
from bus.counters import Counters
from bus.journal.items import items, step_of
from bus.journal.reader import Journal, Record, find_one
from bus.links import Identity
from bus.prefix import block_hashes
from bus.replay import Replay
from bus.replay_command import main, replay
from bus.sampling import pooled
from bus.wire import pack_floats, pack_ints, unpack_ints
from ranks.compiling import Compile, Compiled, plain
from ranks.core import RankCore
from ranks.grammars import Grammars, Matcher, Vocabulary
from ranks.planning import Planner
from ranks.replay import Construction, NativeSchedulers, subject
from tests.journals import INCARNATION, Inline, Recording, Twins, model
from tests.ranks.session_traces import BAD
from tests.ranks.toy import GRAMMARS, VOCAB, ToyExecutor, next_repeating, next_token
from tests.tiny_model import EOS

CONFIG = Config(scheduler="native", max_num_seqs=6, max_num_batched_tokens=32, block_size=8)
POOL = m.KvPool(num_blocks=24, block_size=8, max_model_len=96, vocab_size=VOCAB)
DRAFTS = {"speculation": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
COMMANDS = (
    m.TokenCount(),
    m.PendingPrefillTokens(),
    m.ComputedBlocks(prompt_token_ids=[1] * 20),
    m.MinRemainingOutput(),
    m.RequestCounts(),
    m.HasFinishedRequests(),
    m.ResetPrefixCache(reset_running_requests=True),
    m.MakeStats(),
    m.GetPauseState(),
    m.SetPause(mode="keep"),
    m.SetPause(mode="wait"),
    m.Resume(),
    m.Resume(),
    m.Drain(),
    m.FinishRequests(request_ids=["r1", "r2"]),
)


class Traffic:
    """A rank under random traffic, with the toy model behind it."""

    def __init__(
        self,
        seed: int,
        core: Any,
        config: Config = CONFIG,
        compile: Callable[[m.Grammar], Any] | None = None,
    ) -> None:
        """With `compile` some requests have grammars; it gives what comes back with the compiled ones."""
        self._config = config
        self._random = random.Random(seed)
        self._compile = compile
        self._asked: list[Compile] = []
        self._has_sessions = seed % 2 == 1
        self._core = core
        self._now = 1.0
        self._starts = 0
        self._handle = 0

    def run(self, events: int) -> None:
        self._frontends = [self._start("command", "frontend", index) for index in range(2)]
        self._begin_executor()
        kinds = {self._add: 6, self._result: 20, self._abort: 1, self._command: 2, self._tick: 1}
        if self._compile is not None:
            kinds[self._compiled] = 10
        if self._has_sessions:
            kinds |= {self._append: 4, self._stop: 2}
        rare = {events // 3: self._lose_frontend, events // 2: self._lose_executor}
        for number in range(events):
            self._now += self._random.random() / 100
            rare.get(number, self._random.choices(list(kinds), list(kinds.values()))[0])()
            self._feed(Drained(self._now))

    def _feed(self, event: Any) -> None:
        answers: list[m.Message] = []
        for effect in self._core.handle(event):
            if isinstance(effect, Send) and isinstance(effect.message, m.PartialSchedule):
                self._executor.run(effect.message)
            if isinstance(effect, Send) and isinstance(effect.message, m.StandingSchedule):
                self._executor.stand(effect.message)
            if isinstance(effect, Send) and isinstance(effect.message, m.Recall):
                answers.append(self._executor.recall(effect.message))
            if isinstance(effect, Compile):
                self._asked.append(effect)
        for answer in answers:
            self._feed(Received(self._executor_peer, answer))

    def _compiled(self) -> None:
        """A grammar comes back, or why it does not; the executor that its request ran on may be gone."""
        if not self._asked or self._compile is None:
            return
        asked = self._asked.pop(self._random.randrange(len(self._asked)))
        if asked.grammar is BAD:
            done = Compiled(asked.scheduler, asked.ticket, "it is bad")
        else:
            done = Compiled(asked.scheduler, asked.ticket, matcher=self._compile(asked.grammar))
        self._feed(Posted(done))

    def _start(self, bus: str, role: Any, index: int) -> Peer:
        self._starts += 1
        peer = Peer(bus, role, index, self._starts)
        self._feed(PeerUp(peer, m.PROTOCOL_MINOR))
        return peer

    def _begin_executor(self) -> None:
        config = self._config
        model = next_repeating if config.most_drafts else next_token
        self._executor = ToyExecutor(
            POOL, config.max_num_seqs, config.max_num_batched_tokens, model, config.most_drafts
        )
        self._executor_peer = self._start("step", "executor", 0)
        self._feed(Received(self._executor_peer, POOL))

    def _lose_executor(self) -> None:
        self._feed(PeerDown(self._executor_peer, "it was killed"))
        self._begin_executor()

    def _lose_frontend(self) -> None:
        index = self._random.randrange(2)
        self._feed(PeerDown(self._frontends[index], "it was killed"))
        self._frontends[index] = self._start("command", "frontend", index)

    def _add(self) -> None:
        draw = self._random
        self._handle += 1
        shared = [draw.randrange(3)] * draw.choice([0, 16, 40])
        prompt = shared + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
        salt = draw.choice(["", "", "pepper"])
        sampling = m.Sampling(
            seed=draw.randrange(99),
            max_tokens=draw.choice([1, 8, 40]),
            eos_token_id=draw.choice([None, 3]),
            stop_token_ids=draw.sample(range(VOCAB), draw.choice([0, 0, 2])),
            logprobs=draw.choice([None, 1]),
        )
        if self._compile is not None and draw.random() < 0.4:
            sampling = msgspec.structs.replace(sampling, eos_token_id=EOS, grammar=draw.choice([*GRAMMARS, BAD]))
        if sampling.grammar is None and draw.random() < 0.15:
            sampling = pooled(m.Pooling(kind=draw.choice(["last", "mean"])))
        request = m.AddRequest(
            handle=self._handle,
            sequence=self._handle,
            request_id=f"r{self._handle}",
            prompt_token_ids=pack_ints(prompt),
            sampling=sampling,
            priority=draw.choice([0, 0, -1]),
            cache_salt=salt,
            block_hashes=memoryview(block_hashes(pack_ints(prompt), 8, salt)),
            resumable=self._has_sessions and sampling.pooling is None and draw.random() < 0.4,
        )
        self._feed(Received(draw.choice(self._frontends), request))

    def _result(self) -> None:
        if not self._executor.results:
            return
        results = self._executor.results
        tokens = unpack_ints(results[0].tokens).tolist()
        if tokens[0] >= 0 and self._random.random() < 0.1:
            pair, values = pack_ints([tokens[0], 1]), pack_floats([-0.5, -1.0])
            logprobs = m.Logprobs(owner=0, positions=1, token_ids=pair, values=values, ranks=pack_ints([1]))
            results[0] = msgspec.structs.replace(results[0], logprobs=[logprobs])
        self._feed(Received(self._executor_peer, self._executor.take()))

    def _abort(self) -> None:
        handles = pack_ints([self._random.randint(1, self._handle + 1)])
        self._feed(Received(self._random.choice(self._frontends), m.AbortRequests(handles=handles)))

    def _append(self) -> None:
        """The next input of some request, which may be no session, and may be closed or gone."""
        draw = self._random
        tokens = [draw.randrange(VOCAB) for _ in range(draw.randrange(5))]
        turn = m.AppendInput(
            handle=draw.randint(max(1, self._handle - 5), self._handle + 1),
            sequence=1,
            prompt_token_ids=pack_ints(tokens),
            close=draw.random() < 0.2,
            mm_features=[m.MultimodalFeature(hash="a", offset=0, length=1)] if tokens and draw.random() < 0.3 else [],
        )
        self._feed(Received(draw.choice(self._frontends), turn))

    def _stop(self) -> None:
        draw = self._random
        handle = draw.randint(max(1, self._handle - 5), self._handle + 1)
        stop = m.StopTurn(handle=handle, sequence=1, turn=draw.randrange(1, 4), n=draw.randrange(3))
        self._feed(Received(draw.choice(self._frontends), stop))

    def _command(self) -> None:
        request = m.CommandRequest(command_id=self._random.randrange(1, 10**9), body=self._random.choice(COMMANDS))
        self._feed(Received(self._random.choice(self._frontends), request))

    def _tick(self) -> None:
        self._feed(Tick(self._now, 1e9 + self._now, {"bus_sent_frames/step": self._now}))


def build(config: Config = CONFIG) -> RankCore:
    counters = Counters()
    return RankCore(1, config, NativeSchedulers(config, counters), counters)


def record(folder: Path, seed: int, events: int, vocabulary: Path | None = None, **settings: Any) -> Journal:
    """With `vocabulary`, a model folder, there are requests with grammars."""
    config = msgspec.structs.replace(CONFIG, **settings)
    if vocabulary is not None:
        config = msgspec.structs.replace(config, model=str(vocabulary))
    core = build(config)
    me = Identity("rank", 1, INCARNATION)
    construction = Construction(vocabulary and Vocabulary.of(vocabulary))
    recording = Recording(folder, me, core, construction, config, plain, model(VOCAB))
    Traffic(seed, recording, config, vocabulary and Grammars(config).compile).run(events)
    return recording.end()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"journal_redact": True},
        {"policy": "fcfs", "async_depth": 1},
        DRAFTS,
        DRAFTS | {"journal_redact": True},
    ],
)
def test_replays_without_a_difference(tmp_path: Path, seed: int, settings: dict[str, Any]) -> None:
    journal = record(tmp_path, seed, 500, **settings)
    outcome = replay(journal, journal.header())
    assert outcome.difference is None
    assert outcome.damage is None
    assert outcome.events > 700
    assert outcome.frames > 300
    said = [item for record in journal.records() for item in items(record.turn)]  # type: ignore[union-attr]
    assert {item.type for item in said} >= {"StepResult", "Outputs", "KvEvents", "Load", "Reply", "PeerDown", "Tick"}
    rare = "continued" if seed % 2 else "resumed"
    assert any(item.type == "PartialSchedule" and rare in item.fields for item in said)
    tried = any(item.type == "PartialSchedule" and "drafts" in item.fields for item in said)
    assert tried == ("speculation" in settings)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{}, {"journal_redact": True}, {"async_depth": 1}])
def test_requests_with_grammars_replay_without_a_difference(
    tmp_path: Path, toy_model: Path, seed: int, settings: dict[str, Any]
) -> None:
    journal = record(tmp_path, seed, 1000, toy_model, **settings)
    outcome = replay(journal, journal.header())
    assert outcome.difference is None
    assert outcome.damage is None
    said = [item for record in journal.records() for item in items(record.turn)]  # type: ignore[union-attr]
    assert sum("mask_rows" in item.fields for item in said if item.type == "PartialSchedule") > 3
    assert {item.type for item in said} >= {"Compile", "Compiled"}


def test_a_wrong_mask_is_a_difference(tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = record(tmp_path, 0, 300, toy_model)
    right = Matcher._mask
    monkeypatch.setattr(Matcher, "_mask", lambda self, matcher: bytes([255]) + right(self, matcher)[1:])
    difference = replay(journal, journal.header()).difference
    assert difference is not None
    assert difference.recorded is not None
    assert difference.recorded.type == "PartialSchedule"


def test_the_header_names_the_vocabulary_that_a_replay_needs(
    tmp_path: Path, toy_model: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = record(tmp_path, 0, 200, toy_model)
    assert main(["rank", journal.name, "--model", str(tiny_model)]) == 2
    told = capsys.readouterr().err
    assert Vocabulary.of(toy_model).digest in told
    assert Vocabulary.of(tiny_model).digest in told
    assert main(["rank", journal.name, "--model", str(tmp_path / "nowhere")]) == 2
    assert "llguidance, and a vocabulary: model's, of 50 tokens" in capsys.readouterr().err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (elsewhere / name).write_bytes((toy_model / name).read_bytes())
    assert main(["rank", journal.name, "--model", str(elsewhere)]) == 0


def test_a_flipped_comparison_is_found_at_the_step_where_it_first_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = record(tmp_path, 3, 500)
    right = Planner._place
    monkeypatch.setattr(Planner, "_place", lambda self, row: tuple(-part for part in right(self, row)))
    assert main(["rank", str(tmp_path)]) == 1
    assert "PartialSchedule" in capsys.readouterr().out
    outcome = replay(journal, journal.header())
    assert outcome.at is not None
    assert outcome.at.number == first_choice_of_a_victim(journal, monkeypatch)


def first_choice_of_a_victim(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> int:
    """The first record at which the right code and the wrong one would preempt different rows."""
    monkeypatch.undo()
    right = Planner._victim
    chosen = []

    def watch(self: Planner) -> int:
        rows = self._batch.running.tolist()
        chosen.append(max(rows, key=self._place) != min(rows, key=self._place))
        return right(self)

    monkeypatch.setattr(Planner, "_victim", watch)
    run = Replay(journal.header(), subject(journal.header()))
    for record in journal.records():
        assert isinstance(record, Record)
        run.feed(record.turn)
        if any(chosen):
            return record.number
    raise AssertionError("no choice was ever made")


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_core_goes_on_as_the_one_that_was_captured(seed: int) -> None:
    config = msgspec.structs.replace(CONFIG, **(DRAFTS if seed > 1 else {}))
    twins = Twins(lambda: build(config))
    Traffic(seed, twins, config).run(400)
    assert twins.compared > 10


@pytest.mark.parametrize("seed", range(2))
def test_a_restored_core_goes_on_in_the_middle_of_grammars(seed: int, toy_model: Path) -> None:
    twins = Twins(lambda: build(msgspec.structs.replace(CONFIG, model=str(toy_model))))
    Traffic(seed, twins, compile=lambda grammar: None).run(400)
    assert twins.compared > 10


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals whose files are small, and begun when they should be, not when a thread has time for it."""
    monkeypatch.setattr("bus.journal.recorder.Writer", Inline)
    monkeypatch.setattr("bus.journal.recorder.BATCH_BYTES", 4000)
    monkeypatch.setattr("bus.journal.recorder.STATE_RETRY_S", 0.0)
    monkeypatch.setattr("bus.journal.recorder.MB", 200)


@pytest.mark.usefixtures("small_files")
def test_begins_in_the_middle_where_a_state_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, 3, 500)
    assert len(journal.files) > 3
    said = [item for record in journal.records() for item in items(record.turn)]  # type: ignore[union-attr]
    late = max(step_of(item) or 0 for item in said) * 2 // 3
    whole = replay(journal, journal.header())
    assert whole.difference is None
    later = replay(journal, journal.header(), begin=late)
    assert later.difference is None
    assert 100 < later.events < whole.events - 100
    assert main(["rank", journal.name, "--from", f"step={late}"]) == 0
    journal.files[0].unlink()
    rest = find_one([journal.name])
    outcome = replay(rest, rest.header())
    assert outcome.difference is None
    assert later.events <= outcome.events < whole.events
    for file in journal.files[2:]:
        file.unlink()
    journal.files[1].write_bytes(journal.files[1].read_bytes()[:2000])
    assert main(["rank", journal.name]) == 2
    assert "no state is recorded" in capsys.readouterr().err


def test_vllms_scheduler_is_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 10, scheduler="vllm")
    assert main(["rank", str(tmp_path)]) == 2
    assert "only scheduler = native is replayed" in capsys.readouterr().err


def test_replays_with_next_to_nothing_installed(tmp_path: Path) -> None:
    journal = record(tmp_path, 5, 100)
    allowed = {"bus", "ranks", "frontend", "zmq", "msgspec", "structlog", "numpy"}
    code = (
        "import sys\n"
        "class Guard:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] not in sys.stdlib_module_names | {allowed}:\n"
        "            raise ImportError(f'{name} is not installed here')\n"
        "sys.meta_path.insert(0, Guard())\n"
        "sys.argv = ['rankbus', 'replay', 'rank', sys.argv[1]]\n"
        "from frontend.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, journal.name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no difference in ")
