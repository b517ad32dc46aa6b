"""A frontend's journal: with the same code it replays as recorded; with a fault, up to where that first shows."""

import inspect
import random
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from bus import messages as m
from bus.config import Config
from bus.core import Drained, Peer, PeerDown, PeerUp, Posted, Received, Send, Tick
from bus.journal.blocks import frame
from bus.journal.items import Tracker, items, step_of
from bus.journal.reader import Journal, Record
from bus.journal.records import ENCODER
from bus.journal.writer import Files
from bus.journal.zstd import compressor
from bus.links import Identity
from bus.prefix import block_hashes
from bus.replay_command import main, replay
from bus.wire import pack_ints
from frontend.core import FrontendCore
from frontend.params import ModelLimits
from frontend.replay import Construction, build
from frontend.seam import AbortCall, AddCall, CommandCall, TextOutput
from tests.frontend.driving import singly
from tests.journals import INCARNATION, PLENTY, Recording, Twins, model, turn

CLIENTS = [Peer("client", "client", index, 70 + index) for index in range(3)]
EXECUTOR = Peer("command", "executor", 0, 30)
RANKS = [Peer("command", "rank", index, 10 + index) for index in range(3)]
CONFIG = Config(ranks=3)
CONSTRUCTION = Construction(
    limits=ModelLimits(vocab_size=1000, max_model_len=256, eos_token_ids=(2,)), seed_key=b"a key of this start"
)


class Traffic:
    """A frontend under random traffic of all kinds: events that are made from a seed and what the core answers."""

    def __init__(self, seed: int, core: Any) -> None:
        self._random = random.Random(seed)
        self._core = core
        self._numbers = [0] * len(RANKS)
        self._kv_numbers = [0] * len(RANKS)
        self._sequences = [0] * len(RANKS)
        self._running: list[dict[int, int]] = [{} for _ in RANKS]
        self._asked: list[tuple[Peer, int]] = []
        self._texts: list[tuple[Peer, str]] = []
        self._count = 0
        self._now = 1.0

    def run(self, events: int) -> None:
        self._feed(Tick(0.0, 1e9, {}))
        for peer in (*RANKS, EXECUTOR, *CLIENTS):
            self._feed(PeerUp(peer, peer.index % 2))
        status = m.ExecutorStatus(model="x", max_model_len=256, num_blocks=99, block_size=16)
        self._feed(Received(EXECUTOR, status))
        for rank in range(len(RANKS)):
            self._load(rank)
        for rank in range(len(RANKS)):
            self._feed(Received(RANKS[rank], m.KvEvents(number=0, snapshot=True)))
        kinds = (
            self._generate,
            self._add,
            self._text,
            self._outputs,
            self._load,
            self._cache,
            self._abort,
            self._command,
        )
        for _ in range(events):
            self._now += self._random.random() / 50
            self._random.choice(kinds)(self._random.randrange(len(RANKS)))
            if self._random.random() < 0.7:
                self._feed(Drained(self._now))
            if self._random.random() < 0.1:
                self._feed(Tick(self._now, 1e9 + self._now, {"bus_sent_frames/client": float(self._count)}))
            if self._random.random() < 0.01:
                self._restart(self._random.randrange(len(RANKS)))

    def _feed(self, event: Any) -> None:
        for effect in self._core.handle(event):
            if not isinstance(effect, Send):
                continue
            rank = effect.peer.index
            for message in singly(effect.message):
                if isinstance(message, m.AddRequest):
                    self._sequences[rank] = message.sequence
                    self._running[rank][message.handle] = message.sampling.max_tokens
                elif isinstance(message, m.CommandRequest):
                    self._asked.append((effect.peer, message.command_id))

    def _name(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def _prompt(self) -> list[int]:
        shared = [self._random.randrange(4)] * 32
        return shared + [self._random.randrange(1000) for _ in range(self._random.randrange(1, 40))]

    def _generate(self, _rank: int) -> None:
        params = m.GenerateParams(n=self._random.choice((1, 1, 3)), max_tokens=self._random.choice((1, 5, 999)))
        request = m.Generate(request_id=self._name(), prompt_token_ids=self._prompt(), params=params, text_output=False)
        self._feed(Received(self._random.choice(CLIENTS), request))

    def _add(self, rank: int) -> None:
        call = AddCall(
            request_id=self._name(),
            prompt_token_ids=pack_ints(self._prompt()),
            sampling=m.Sampling(seed=self._count, max_tokens=self._random.randrange(1, 9)),
            rank=self._random.choice((None, None, rank)),
        )
        self._feed(Posted(call))

    def _text(self, _rank: int) -> None:
        key = self._random.choice(CLIENTS), self._name()
        self._feed(Received(key[0], m.Generate(request_id=key[1], text="Hello")))
        self._feed(Posted(TextOutput(peer=key[0], message=m.Delta(request_id=key[1], text="you"))))

    def _outputs(self, rank: int) -> None:
        running = self._running[rank]
        ended = []
        handles = list(running)
        for handle in handles:
            running[handle] -= 1
            if running[handle] == 0:
                ended.append(m.RequestEnded(handle=handle, reason="length"))
                del running[handle]
        tokens = pack_ints([self._random.randrange(1000) for _ in handles])
        started = [m.RequestStarted(handle=handle, cached_tokens=16) for handle in handles[-1:]]
        message = m.Outputs(step=self._count, handles=pack_ints(handles), tokens=tokens, ended=ended, started=started)
        self._feed(Received(RANKS[rank], message))

    def _cache(self, rank: int) -> None:
        """A rank tells of blocks in its prefix cache: those of a prompt, and one with output that nobody asked for."""
        self._kv_numbers[rank] += 1
        prompt = pack_ints(self._prompt())
        stored = block_hashes(prompt, 16) + self._random.randbytes(16)
        self._feed(Received(RANKS[rank], m.KvEvents(number=self._kv_numbers[rank], stored=memoryview(stored))))

    def _load(self, rank: int) -> None:
        self._numbers[rank] += 1
        load = m.Load(
            number=self._numbers[rank],
            acknowledged=self._sequences[rank],
            running=len(self._running[rank]),
            waiting=0,
            pending_prefill_tokens=self._random.randrange(50),
            num_blocks=99,
        )
        self._feed(Received(RANKS[rank], load))

    def _abort(self, _rank: int) -> None:
        name = f"r{self._random.randrange(1, self._count + 2)}"
        self._feed(Posted(AbortCall(request_ids=[name])))
        self._feed(Received(self._random.choice(CLIENTS), m.Abort(request_id=name)))

    def _command(self, _rank: int) -> None:
        self._feed(Posted(CommandCall(call_id=self._count, body=m.TokenCount())))
        for peer, command_id in self._asked:
            self._feed(Received(peer, m.Reply(command_id=command_id, value=self._random.randrange(99))))
        self._asked.clear()

    def _restart(self, rank: int) -> None:
        self._running[rank].clear()
        self._feed(PeerDown(RANKS[rank], "it began anew"))
        self._feed(PeerUp(RANKS[rank]))
        self._load(rank)


def record(folder: Path, seed: int, events: int, redact: bool = False) -> Journal:
    config = msgspec.structs.replace(CONFIG, journal_redact=redact)
    core = build(0, config, CONSTRUCTION)
    me = Identity("frontend", 0, INCARNATION)
    recording = Recording(folder, me, core, CONSTRUCTION, config, model=model(CONSTRUCTION.limits.vocab_size))
    Traffic(seed, recording).run(events)
    return recording.end()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("redact", [False, True])
def test_replays_without_a_difference(tmp_path: Path, seed: int, redact: bool) -> None:
    journal = record(tmp_path, seed, 400, redact)
    outcome = replay(journal, journal.header())
    assert outcome.difference is None
    assert outcome.damage is None
    assert outcome.events > 800
    assert outcome.frames > 300


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_core_goes_on_as_the_one_that_was_captured(seed: int) -> None:
    twins = Twins(lambda: build(0, CONFIG, CONSTRUCTION))
    Traffic(seed, twins).run(300)
    assert twins.compared > 10


def test_a_fault_is_found_where_it_first_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = record(tmp_path, 1, 400)
    name, place, effect = first_child(journal)
    monkeypatch.setattr(FrontendCore, "_child_seed", staticmethod(lambda seed, index: seed + (index > 1)))
    assert main(["frontend", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert f"record {place}, effect {effect}:" in told
    assert name in told
    assert "sampling.seed: " in told
    outcome = replay(journal, journal.header())
    assert outcome.at is not None
    assert outcome.at.number == place


def first_child(journal: Journal) -> tuple[str, int, int]:
    """The first request with several children; where one but the first is sent: record, and effect there, from 1."""
    for record in journal.records():
        assert isinstance(record, Record)
        for place, item in enumerate(items(record.turn)):
            if item.type in ("AddRequest", "AddRequests"):
                for added in item.fields.get("requests", [item.fields]):
                    name, _, child = added["request_id"].partition("/")
                    if child and child != "0":
                        return name, record.number, place
    raise AssertionError("there is none")


def test_stops_with_the_live_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = record(tmp_path, 1, 400)
    name, _, _ = first_child(journal)
    seen: list[tuple[FrontendCore, Record]] = []
    monkeypatch.setattr("sys.breakpointhook", lambda: seen.append(live(inspect.currentframe())))
    assert main(["frontend", journal.name, "--break", f"request={name}"]) == 0
    core, first = seen[0]
    assert isinstance(core, FrontendCore)
    assert name in {request_id for item in items(first.turn) for request_id in Tracker().requests(item)}
    assert len(seen) > 3  # its outputs too
    seen.clear()
    assert main(["frontend", journal.name, "--until", "step=100"]) == 0
    ((_, stopped),) = seen
    assert any((step_of(item) or 0) >= 100 for item in items(stopped.turn))


def live(frame: FrameType | None) -> tuple[FrontendCore, Record]:
    """What someone at the debugger's prompt sees under the names ``core`` and ``record``."""
    while frame is not None and "record" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    return frame.f_locals["core"], frame.f_locals["record"]


def test_a_cut_journal_is_replayed_up_to_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, 2, 400)
    (path,) = journal.files
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["frontend", str(path)]) == 0
    assert "cannot be read" in capsys.readouterr().err


def test_a_journal_without_its_beginning_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path / "whole", 2, 10)
    rest = Files(tmp_path / "rest", journal.header(), PLENTY, compressor())
    rest.append(b"R", 7, 1, b"".join(frame(data) + data for data in [ENCODER.encode(turn(7))]))
    rest.close()
    assert main(["frontend", str(tmp_path / "rest")]) == 2
    assert "no state is recorded" in capsys.readouterr().err
    assert main(["frontend", str(tmp_path / "nothing")]) == 2
    assert "nothing is no journal" in capsys.readouterr().err
