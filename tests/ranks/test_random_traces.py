"""Random adds, aborts, resets and pauses in small pools: whatever happens, tokens, rows, positions and KV are right."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import Grammar, KvPool, Sampling
from bus.prefix import split_hashes
from bus.wire import unpack_floats, unpack_ints
from ranks.grammars import Grammars
from ranks.native import NativeScheduler
from tests.ranks.toy import (
    GRAMMARS,
    VOCAB,
    NextToken,
    ToyExecutor,
    generate,
    next_repeating,
    next_token,
    request,
    vector_of,
)
from tests.tiny_model import EOS

MAX_MODEL_LEN = 48


class Trace:
    """One rank's life from a seed. Every token is checked when it comes, everything is clean when it ends."""

    def __init__(
        self,
        make: Callable[..., Any],
        seed: int,
        model: NextToken = next_token,
        vocabulary: Path | None = None,
        **settings: Any,
    ) -> None:
        """With `vocabulary`, a folder with the toy's, half of the requests have grammars."""
        self.model = model
        self.draw = random.Random(seed)
        self.has_grammars = vocabulary is not None
        self.config = Config(
            model=str(vocabulary),
            max_num_seqs=self.draw.choice([1, 2, 5]),
            max_num_batched_tokens=self.draw.choice([5, 12, 40]),
            policy=self.draw.choice(["fcfs", "priority"]),
            async_depth=self.draw.choice([1, 2]),
            long_prefill_token_threshold=self.draw.choice([0, 3]),
            enable_prefix_caching=self.draw.random() < 0.8,
            **settings,
        )
        pool = KvPool(
            num_blocks=self.draw.choice([6, 9, 14, 60]), block_size=8, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB
        )
        self.max_model_len = min(MAX_MODEL_LEN, (pool.num_blocks - 1) * 8)
        self.counters = Counters()
        self.scheduler = make(self.config, pool, self.counters)
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.executor = ToyExecutor(pool, *limits, model, self.config.most_drafts, self.config.speculation == "model")
        self.step = 0
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.output: dict[int, list[int]] = {}
        self.vectors: dict[int, list[float]] = {}
        """Of those that are pooled."""
        self.names: set[bytes] = set()
        self.aborted = 0
        self.compiling: list[tuple[int, Grammar]] = []

    def compile(self, grammar: Grammar) -> Any:
        scheduler = self.scheduler
        return (scheduler._grammars if isinstance(scheduler, NativeScheduler) else scheduler._engine).compile(grammar)

    def run(self, num_requests: int) -> None:
        for handle in range(num_requests):
            self.add(handle)
            for _ in range(self.draw.randrange(6)):
                self.turn()
        for _ in range(3000):
            if not self.turn(quiet=True):
                break
        assert not self.output, "requests are left that never run"
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
        assert not self.scheduler.has_finished()
        assert self.scheduler.reset_prefix_cache(False)

    def add(self, handle: int) -> None:
        shared = [7] * self.draw.randrange(0, 20) if self.draw.random() < 0.5 else []
        prompt = [*shared, *(self.draw.randrange(VOCAB) for _ in range(self.draw.randrange(1, 18)))]
        prompt = prompt[: self.max_model_len - 1]
        options: dict[str, Any] = {"max_tokens": self.draw.randrange(1, 25)}
        if self.draw.random() < 0.5:
            options["stop_token_ids"] = [self.draw.randrange(VOCAB) for _ in range(4)]
        if self.draw.random() < 0.1:
            self.add_pooled(handle, prompt, self.draw.choice(["last", "mean"]))
            return
        matcher = None
        if self.has_grammars and self.draw.random() < 0.5:
            options["grammar"] = self.draw.choice(GRAMMARS)
            options["eos_token_id"] = EOS
            matcher = Grammars(self.config).compile(options["grammar"])
        self.expected[handle] = generate(prompt, Sampling(seed=0, **options), self.max_model_len, self.model, matcher)
        self.output[handle] = []
        if self.draw.random() < 0.1 and len(self.expected[handle][0]) > 2:
            self.output[handle] = self.expected[handle][0][: self.draw.randrange(1, len(self.expected[handle][0]))]
        message = request(
            handle, prompt, output=self.output[handle], priority=self.draw.choice([0, 0, 0, 1, -1]), **options
        )
        self.scheduler.add(handle % 3, message, 0.0)
        self.compiling += self.scheduler.take_grammars()

    def add_pooled(self, handle: int, prompt: list[int], kind: str) -> None:
        self.vectors[handle] = vector_of(prompt, kind)
        self.output[handle] = []
        self.expected[handle] = [], "stop"
        self.scheduler.add(handle % 3, request(handle, prompt, pooling=kind), 0.0)

    def turn(self, quiet: bool = False) -> bool:
        """One thing a rank may do; whether anything was left to do."""
        what = 1.0 if quiet else self.draw.random()
        if what < 0.08 and self.output:
            self.abort(self.draw.choice(sorted(self.output)))
        elif what < 0.12:
            self.scheduler.reset_prefix_cache(self.draw.random() < 0.5)
        elif what < 0.15:
            self.scheduler.set_pause(self.draw.choice(["paused_new", "paused_all"]))
            self.turn()
            self.scheduler.set_pause("unpaused")
        sent = False
        while self.compiling and (quiet or self.draw.random() < 0.3):
            ticket, grammar = self.compiling.pop(self.draw.randrange(len(self.compiling)))
            assert self.scheduler.compiled(ticket, self.compile(grammar), "") == []
            sent = True
        while len(self.executor.results) < self.config.async_depth:
            schedule = self.scheduler.schedule(self.step, 0.0)
            if schedule is None:
                break
            self.step += 1
            sent = True
            self.executor.run(schedule)
            if self.draw.random() < 0.3:
                break
        if self.executor.results and (quiet or self.draw.random() < 0.8):
            self.receive()
            sent = True
        self.check_names()
        return sent

    def abort(self, handle: int) -> None:
        self.aborted += 1
        ended = self.scheduler.finish_ids([f"r{handle}"], "abort")
        assert [item.request_id for item in ended] == [f"r{handle}"]
        self.output.pop(handle)

    def receive(self) -> None:
        for frontend, message in self.scheduler.update(self.executor.take()):
            handles, tokens = unpack_ints(message.handles).tolist(), unpack_ints(message.tokens).tolist()
            counts = unpack_ints(message.counts).tolist() or [1] * len(handles)
            for handle, token in zip(np.repeat(handles, counts).tolist(), tokens, strict=True):
                assert handle % 3 == frontend
                done = self.output[handle]
                assert token == self.expected[handle][0][len(done)]
                done.append(token)
            vectors = {item.owner: unpack_floats(item.vector).tolist() for item in message.pooled}
            assert vectors == {handle: self.vectors[handle] for handle in vectors}
            for ended in message.ended:
                assert (ended.handle in vectors) == (ended.handle in self.vectors)
                assert (self.output.pop(ended.handle), ended.reason) == self.expected[ended.handle]

    def check_names(self) -> None:
        changes = self.scheduler.take_kv_changes()
        if changes.cleared:
            self.names = set(split_hashes(self.scheduler.kv_snapshot()))
            return
        stored, removed = set(split_hashes(changes.stored)), set(split_hashes(changes.removed))
        assert not stored & self.names
        assert removed <= self.names
        self.names = (self.names | stored) - removed


def make_native(config: Config, pool: KvPool, counters: Counters) -> NativeScheduler:
    """A scheduler that leaves one block of the pool unused, as vLLM's does."""
    return NativeScheduler(config, msgspec.structs.replace(pool, num_blocks=pool.num_blocks - 1), counters)


def play(trace: Trace, seed: int) -> None:
    """Run a trace; whoever reads of its failure can make it again."""
    try:
        trace.run(num_requests=12)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def note(trace: Trace, seen: dict[str, int]) -> None:
    """Count what has happened in a trace."""
    totals = trace.counters.snapshot()
    seen["preempted"] += totals.get("scheduler_preemptions", 0) > 0
    seen["hit"] += totals["scheduler_cached_prompt_tokens"] > 0
    seen["dropped"] += totals["scheduler_dropped_tokens"] > 0
    seen["aborted"] += trace.aborted > 0
    seen["resumed"] += trace.executor.resumed > 0
    seen["pooled"] += trace.executor.pooled > 0


@pytest.mark.timeout(180)
def test_random_traces_with_grammars(make_scheduler: Callable[..., Any], toy_model: Path) -> None:
    play_with_grammars(range(1000, 1040), lambda seed: Trace(make_scheduler, seed, vocabulary=toy_model))


def test_random_traces_with_grammars_and_drafts(toy_model: Path) -> None:
    settings: dict[str, Any] = {"speculation": "ngram", "prompt_lookup_min": 1, "vocabulary": toy_model}
    make = partial(Trace, make_native, model=next_repeating, **settings)
    traces = play_with_grammars(range(2000, 2040), lambda seed: make(seed=seed))
    assert sum(trace.executor.accepted > 0 for trace in traces) >= 20
    assert sum(trace.executor.rejected > 0 for trace in traces) >= 20


def play_with_grammars(seeds: range, make: Callable[[int], Trace]) -> list[Trace]:
    traces = [make(seed) for seed in seeds]
    for seed, trace in zip(seeds, traces, strict=True):
        play(trace, seed)
    assert sum(trace.counters.snapshot().get("scheduler_preemptions", 0) > 0 for trace in traces) >= 8
    assert sum(trace.aborted > 0 for trace in traces) >= 8
    assert sum(trace.executor.resumed > 0 for trace in traces) >= 8
    assert sum(trace.executor.masked > 20 for trace in traces) >= 20
    assert sum(any(reason == "stop" for _, reason in trace.expected.values()) for trace in traces) >= 20
    return traces


def test_random_traces(make_scheduler: Callable[..., Any]) -> None:
    seen = {"preempted": 0, "hit": 0, "dropped": 0, "aborted": 0, "resumed": 0, "pooled": 0}
    for seed in range(60):
        trace = Trace(make_scheduler, seed)
        play(trace, seed)
        note(trace, seen)
    assert min(seen.values()) >= 12, seen


@pytest.mark.parametrize("source", ["ngram", "model"])
def test_random_traces_with_drafts(source: str) -> None:
    """Drafts change how many steps a request takes, and nothing else."""

    seen = {
        "preempted": 0,
        "hit": 0,
        "dropped": 0,
        "aborted": 0,
        "resumed": 0,
        "pooled": 0,
        "accepted": 0,
        "rejected": 0,
    }
    for seed in range(40):
        most = 1 + seed % 5
        trace = Trace(
            make_native, seed, next_repeating, speculation=source, num_speculative_tokens=most, prompt_lookup_min=1
        )
        play(trace, seed)
        totals = trace.counters.snapshot()
        assert totals["scheduler_draft_tokens"] >= totals["scheduler_accepted_tokens"]
        note(trace, seen)
        seen["accepted"] += trace.executor.accepted > 0
        seen["rejected"] += trace.executor.rejected > 0
    assert min(seen.values()) >= 12, seen
