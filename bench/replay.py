"""What the journal costs and how fast a rank replays, then a mixed run that all replay and trace: `make bench-replay`.

The cost is the CPU time, that of the writing thread included, of recording once more what the processes of the stub
workload (`bench.scheduler`: 2 × 256 requests, steady decode) recorded. The mixed run has the real model, all kinds of
requests, and a rank that is killed. The figures go to bench/results/replay.json.
"""

import argparse
import gc
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from bench.scheduler import ROOT
from bench.scheduler import Engine as StubEngine
from bus import model_files
from bus.config import load
from bus.core import Core, Event, Received, Send
from bus.journal import recorder
from bus.journal.reader import Journal, Record, find
from bus.links import Identity
from bus.messages import StepResult
from bus.replay import EventReader, Replay, Subject, config_of
from bus.replay_command import replay, subject_of
from bus.trace.coverage import Coverage, Pieces, coverage
from bus.trace.timeline import read
from tests.engine import Engine
from tests.process.test_journal import run_traffic, wait_for_ranks

RESULTS = ROOT / "bench" / "results" / "replay.json"
STEPS = 800
STREAMS, STREAM_TOKENS = 16, 128
ROUNDS = 5


class Given(NamedTuple):
    """What the shell gave a recorder for one event."""

    event: Event
    body: bytes
    effects: list[tuple[Any, bytes | None]]


class Watched:
    """A core, and what it answered last."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.effects: list[Any] = []

    def handle(self, event: Event) -> list[Any]:
        self.effects = list(self._core.handle(event))
        return self.effects


def given(journal: Journal) -> list[Given]:
    """What the recorder of this journal was given."""
    header = journal.header()
    subject: Subject = subject_of(header, run_model=False)
    watched = Watched(subject.core)
    run = Replay(header, subject._replace(core=watched))
    events = EventReader(header.role, subject.posted)
    found = []
    for record in journal.records():
        assert isinstance(record, Record)
        assert run.feed(record.turn) is None
        turn = record.turn
        body = msgspec.msgpack.decode(turn.data) if turn.kind == "received" else b""
        bodies = [
            msgspec.msgpack.decode(told.data) if isinstance(effect, Send) else None
            for effect, told in zip(watched.effects, turn.effects, strict=True)
        ]
        found.append(Given(events.event(turn), body, list(zip(watched.effects, bodies, strict=True))))
    return found


def cost_us(journal: Journal, steps: int) -> float:
    """Microseconds of CPU per step of recording all that is in a journal; the least of 7 times."""
    header = journal.header()
    all_given = given(journal)
    plain = subject_of(header, run_model=False).plain
    costs = []
    gc.freeze()
    for _ in range(7):
        with tempfile.TemporaryDirectory(prefix="rb-") as folder:
            config = msgspec.structs.replace(config_of(header), journal="on", journal_dir=folder)
            again = recorder.start(config, Identity(header.role, header.index, 1), msgspec.Raw(b"\x80"), plain)
            assert again is not None
            begin = time.process_time()
            for event, body, effects in all_given:
                again.begin(event, body)
                for effect in effects:
                    again.effect(*effect)
                again.end()
            again.close()
            costs.append((time.process_time() - begin) / steps * 1e6)
    gc.unfreeze()
    return min(costs)  # whatever else runs on the machine only adds to it


def stub_workload(folder: Path) -> tuple[dict[str, float], float]:
    """Cost in microseconds per step of each process; steps per second at which rank 0 replays."""
    engine = StubEngine(ranks=2, max_num_seqs=256, async_depth=2, journal="on", journal_dir=str(folder))
    engine.wait_for_ranks()
    (client,) = engine.clients(1, 512, 1, "--max-tokens", str(STEPS))
    client.communicate()
    steps = len(engine.close())
    journals = {journal.process: journal for journal in find([str(folder)])}
    costs = {name: cost_us(journal, steps) for name, journal in journals.items()}
    rank = journals["rank-0"]
    begin = time.perf_counter()
    outcome = replay(rank, rank.header())
    seconds = time.perf_counter() - begin
    assert outcome.difference is None
    done = sum(isinstance(one.event, Received) and isinstance(one.event.message, StepResult) for one in given(rank))
    return costs, done / seconds


def tokens_per_s(engine: Engine) -> float:
    """Of 16 streams at once."""
    from frontend.client import Client

    with Client(engine.config.client_endpoint(0), 600.0) as client:
        params = {"text_output": False, "ignore_eos": True, "temperature": 1.0, "n": STREAMS}
        begin = time.perf_counter()
        client.complete([1, 2, 3, 4, 5], max_tokens=STREAM_TOKENS, **params)
        return STREAMS * STREAM_TOKENS / (time.perf_counter() - begin)


class Mixed(NamedTuple):
    """What came of the mixed run: of its replays, of the trace, and tokens per second with the journal on and off.

    `overhead_percent` is the median of the rounds', in each of which both ran one right after the other.
    """

    differences: int
    frames: int
    traced: Coverage
    rates: dict[str, float]
    overhead_percent: float


def mixed_run(folder: Path, seconds: float) -> Mixed:
    """Run the real model under all kinds of requests, a rank being killed again and again; replay all processes."""
    settings = load()
    model = model_files.resolve(settings).folder
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 64}
    with (
        Engine(model, settings.cache_path, journal="off", **limits) as bare,
        Engine(model, settings.cache_path, journal="on", journal_dir=str(folder), **limits) as engine,
    ):
        engines = {"off": bare, "on": engine}
        for one in engines.values():
            one.start()
            one.wait_ready(600.0)  # all programs may have to be compiled
            wait_for_ranks(one)
        # In turns, so that whatever else the machine does is borne by both; the first round is for nothing
        rounds = [{name: tokens_per_s(one) for name, one in engines.items()} for _ in range(1 + ROUNDS)][1:]
        bare.stop()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            run_traffic(engine)
            engine.restart("rank-1", by=signal.SIGKILL)
            wait_for_ranks(engine)
        engine.stop()
    rates = {name: statistics.median(rates[name] for rates in rounds) for name in engines}
    overhead = statistics.median(100 * (1 - rates["on"] / rates["off"]) for rates in rounds)
    journals = find([str(folder)])
    timeline = read(journals)
    pieces = Pieces(timeline)
    traced = coverage(map(pieces.of, timeline.steps.values()))
    differences = frames = 0
    for one in journals:
        outcome = replay(one, one.header())
        damage = outcome.damage
        assert damage is None or damage.last is None, damage  # a process that is killed may cut its last record
        differences += outcome.difference is not None
        frames += outcome.frames
    return Mixed(differences, frames, traced, rates, overhead)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the mixed run")
    options = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="rb-") as name, console.status("2 × 256 without the model"):
        costs, rank_steps_per_s = stub_workload(Path(name))
    for process, cost in costs.items():
        console.print(f"{process}: {cost:.1f} µs of CPU per step")
    console.print(f"A rank replays {rank_steps_per_s:,.0f} steps per second at 256 running requests")
    with tempfile.TemporaryDirectory(prefix="rb-") as name, console.status("the mixed run, and its replay"):
        mixed = mixed_run(Path(name), options.seconds)
    rates = ", ".join(f"{rate:.1f} with the journal {journal}" for journal, rate in mixed.rates.items())
    console.print(f"{mixed.differences} processes replay with a difference; {mixed.frames} frames compared")
    console.print(f"Tokens per second: {rates}")
    console.print(f"{mixed.traced.percent:.1f}% of the time of {mixed.traced.steps} steps is accounted for")
    RESULTS.parent.mkdir(exist_ok=True)
    figures = {
        "differences": mixed.differences,
        "frames": mixed.frames,
        "rank_steps_per_s": rank_steps_per_s,
        "overhead_us_per_step": max(costs.values()),
        "overhead_percent": mixed.overhead_percent,
        "trace_coverage_percent": mixed.traced.percent,
    }
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
