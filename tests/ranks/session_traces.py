"""Random lives of sessions on one rank: ``python -m tests.ranks.session_traces --traces 1000``.

Every token, boundary, row, position and KV place is checked against a model.

The model knows what a client knows: what was appended, stopped and closed, and which tokens came. From that alone it
says what each turn must give and leave: the toy model's next token hangs on all that was kept, and on nothing else.
"""

import argparse
import random
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bus.config import Config
from bus.counters import Counters
from bus.messages import AppendInput, Grammar, KvPool, MultimodalFeature, Outputs, Sampling, StopTurn
from bus.prefix import block_hashes, split_hashes
from bus.wire import pack_ints, unpack_ints
from ranks.grammars import Grammars, Matcher
from ranks.native import NativeScheduler
from ranks.scheduler import Refused
from tests.ranks.toy import (
    GRAMMARS,
    VOCAB,
    NextToken,
    ToyExecutor,
    allowed_token,
    next_repeating,
    next_token,
    request,
    write_vocabulary,
)
from tests.tiny_model import EOS

MAX_MODEL_LEN = 64


@dataclass
class Input:
    """What a turn is to begin with."""

    tokens: list[int]
    sampling: Sampling
    sequence: int = 0
    features: list[MultimodalFeature] = field(default_factory=list)
    matcher: Matcher | None = None
    """How far its output is in its grammar, if it has one and that was compiled."""


BAD = Grammar(kind="regex", spec="(")


@dataclass
class Model:
    """A session as its client sees it."""

    opened_with: Sampling
    context: list[int]
    present: Input | None
    turn: int = 1
    output: list[int] = field(default_factory=list)
    queued: deque[Input] = field(default_factory=deque)
    closing: bool = False
    boundaries: int = 0
    features: list[MultimodalFeature] = field(default_factory=list)
    """At their places in all of the session."""


class SessionTrace:
    """One rank's life from a seed."""

    def __init__(
        self,
        seed: int,
        pool: KvPool | None = None,
        next_token: NextToken = next_token,
        vocabulary: Path | None = None,
        **settings: Any,
    ) -> None:
        """With `vocabulary`, a folder with the toy's, many turns have grammars, good ones and bad ones."""
        self.next_token = next_token
        self.draw = draw = random.Random(seed)
        self.has_grammars = vocabulary is not None
        drawn = {
            "max_num_seqs": draw.choice([1, 2, 5]),
            "max_num_batched_tokens": draw.choice([5, 12, 40]),
            "policy": draw.choice(["fcfs", "priority"]),
            "async_depth": draw.choice([1, 2, 2]),
            "long_prefill_token_threshold": draw.choice([0, 3]),
            "enable_prefix_caching": draw.random() < 0.6,
        }
        self.config = Config(model=str(vocabulary), **drawn | settings)
        self.grammars = Grammars(self.config)
        self.compiling: list[tuple[int, Grammar, int, Input]] = []
        num_blocks = draw.choice([5, 8, 12, 60])
        self.pool = pool or KvPool(num_blocks=num_blocks, block_size=8, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
        self.max_len = min(self.pool.max_model_len, self.pool.num_blocks * self.pool.block_size)
        self.counters = Counters()
        self.scheduler = NativeScheduler(self.config, self.pool, self.counters)
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.executor = ToyExecutor(
            self.pool, *limits, next_token, self.config.most_drafts, self.config.speculation == "model"
        )
        self.step = 0
        self.sequence = 0
        self.models: dict[int, Model] = {}
        self.settled: set[bytes] = set()
        """Names of blocks that have only tokens which will stay."""
        self.refused: list[int] = []
        """Messages whose inputs the model refuses late, since frontends were last told."""
        self.counts = dict.fromkeys(
            ("turns", "stopped", "empty", "late refusals", "closed", "named", "masked", "bad"), 0
        )

    def run(self, num_sessions: int, num_turns: int) -> None:
        for handle in range(num_sessions):
            self.open(handle)
            for _ in range(num_turns):
                self.act()
        for handle in list(self.models):
            if not self.models[handle].closing:
                self.close(handle)
        self.run_on()
        assert not self.models, "sessions are left that never end"
        self.check_clean()

    def run_on(self) -> None:
        """Until nothing is left to do."""
        for _ in range(20_000):
            if not self.move(quiet=True):
                return
        raise AssertionError("there is no end to it")

    def check_clean(self) -> None:
        self.run_on()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.pending_prefill_tokens, load.used_blocks) == (0, 0, 0, 0)
        assert self.scheduler.request_counts() == (0, 0)
        assert (self.scheduler.unfinished(), self.scheduler.token_count()) == (0, 0)
        assert not self.scheduler.has_finished()
        assert self.scheduler.reset_prefix_cache(False)

    # What clients do

    def sampling(self) -> Sampling:
        draw = self.draw
        stops = draw.sample(range(VOCAB), draw.choice([0, 4, 20]))
        sampling = Sampling(seed=0, max_tokens=draw.choice([1, 2, 5, 12, 60]), stop_token_ids=stops)
        if not self.has_grammars or draw.random() < 0.4:
            return sampling
        return msgspec.structs.replace(sampling, grammar=draw.choice([*GRAMMARS, BAD]), eos_token_id=EOS)

    def tokens(self, most: int = 14) -> list[int]:
        if self.draw.random() < 0.15:
            return []
        return [self.draw.randrange(VOCAB) for _ in range(self.draw.randrange(1, most))]

    def features(self, size: int) -> list[MultimodalFeature]:
        if size < 3 or self.draw.random() < 0.7:
            return []
        offset = self.draw.randrange(size)
        length = self.draw.randrange(1, size - offset + 1)
        return [MultimodalFeature(hash=self.draw.choice("ab"), offset=offset, length=length)]

    def open(self, handle: int, prompt: list[int] | None = None, sampling: Sampling | None = None) -> None:
        prompt = self.tokens(20) if prompt is None else prompt
        sampling = sampling or self.sampling()
        features = self.features(len(prompt))
        message = request(handle, prompt, resumable=True)
        message = msgspec.structs.replace(message, mm_features=features, sampling=sampling)
        self.scheduler.add(handle % 3, message, 0.0)
        what = Input(prompt, sampling, 0, features)
        self.have_compiled(handle, what)
        self.models[handle] = Model(sampling, [], None, turn=0, queued=deque([what]))
        self.go_on(handle)

    def have_compiled(self, handle: int, what: Input) -> None:
        asked = self.scheduler.take_grammars()
        assert len(asked) == (what.sampling.grammar is not None and len(what.tokens) > 0)
        self.compiling += [(*item, handle, what) for item in asked]

    def compile(self) -> None:
        """A grammar is compiled, or cannot be, while its turn waits for that, waits its turn, or is over."""
        ticket, grammar, handle, what = self.compiling.pop(self.draw.randrange(len(self.compiling)))
        fault = "it is bad" if grammar is BAD else ""
        ended = self.scheduler.compiled(ticket, None if fault else self.grammars.compile(grammar), fault)
        model = self.models.get(handle)
        place = next((place for place, item in enumerate(model.queued) if item is what), None) if model else None
        if model is None or (model.present is not what and place is None):
            assert not ended
            return
        if not fault:
            what.matcher = self.grammars.compile(grammar)
            return
        self.counts["bad"] += 1
        if what.sequence == 0:
            assert [(item.ended.handle, item.ended.code) for item in ended] == [(handle, "invalid")]
            self.end(handle, "error")
            return
        self.refused = [what.sequence]
        if place is not None:
            del model.queued[place]
        else:
            model.present = None
            model.turn -= 1
            del model.features[len(model.features) - len(what.features) :]
            self.go_on(handle)
        outputs, refused = self.scheduler.take_turns()
        assert [item.sequence for item in refused] == self.refused
        assert "it is bad" in refused[0].sentence
        for frontend, message in outputs:
            self.hear(frontend, message)

    def append(self, handle: int, tokens: list[int] | None = None, own: Sampling | None = None) -> str:
        """Returns the sentence with which it is refused, if it is."""
        model = self.models[handle]
        if tokens is None and self.draw.random() < 0.5:
            own = self.sampling()
        self.sequence += 1
        tokens = self.tokens() if tokens is None else tokens
        what = Input(tokens, own or model.opened_with, self.sequence, self.features(len(tokens)))
        message = AppendInput(
            handle=handle,
            sequence=self.sequence,
            prompt_token_ids=pack_ints(tokens),
            sampling=own,
            mm_features=what.features,
        )
        surely = len(model.context) + sum(len(item.tokens) for item in (model.present, *model.queued) if item)
        fits = not what.tokens or surely + len(what.tokens) < self.max_len
        sentence, ended = refusal(lambda: self.scheduler.append(handle % 3, message, 0.0))
        assert not ended
        assert bool(sentence) == (model.closing or not fits), sentence
        if sentence:
            assert model.closing or str(self.max_len) in sentence
            return sentence
        self.have_compiled(handle, what)
        model.queued.append(what)
        self.go_on(handle)
        return ""

    def stop(self, handle: int, n: int | None = None) -> None:
        model = self.models[handle]
        turn = model.turn
        if n is None:
            turn += self.draw.choice([0, 0, 0, 0, -1, 1])
            n = self.draw.choice([0, 1, len(model.output) // 2, len(model.output), 50])
        message = StopTurn(handle=handle, sequence=0, turn=turn, n=n)
        sentence, _ = refusal(lambda: self.scheduler.stop_turn(handle % 3, message))
        assert bool(sentence) == (turn != model.turn or model.present is None)
        if sentence:
            return
        self.counts["stopped"] += 1
        self.expect_end(handle, "interrupted", min(n, len(model.output)))

    def close(self, handle: int) -> None:
        model = self.models[handle]
        message = AppendInput(handle=handle, sequence=0, prompt_token_ids=pack_ints([1, 2]), close=True)
        sentence, ended = refusal(lambda: self.scheduler.append(handle % 3, message, 0.0))
        assert ("closed" in sentence) == model.closing
        if model.closing:
            return
        model.closing = True
        if model.present is None:
            assert [(item.ended.handle, item.ended.reason) for item in ended] == [(handle, "closed")]
            self.end(handle, "closed")
        else:
            assert ended == []

    def abort(self, handle: int) -> None:
        ended = self.scheduler.finish(handle % 3, pack_ints([handle]), "abort")
        assert [(item.ended.handle, item.ended.reason) for item in ended] == [(handle, "abort")]
        self.end(handle, "abort")

    def end(self, handle: int, reason: str) -> None:
        self.counts["closed"] += reason == "closed"
        del self.models[handle]
        assert not self.scheduler.has(handle % 3, handle)

    # What the model says

    def go_on(self, handle: int) -> None:
        """Between turns, the next input is taken, unless there turns out to be no room for it."""
        model = self.models[handle]
        while model.present is None and model.queued:
            what = model.queued.popleft()
            if what.tokens and len(model.context) + len(what.tokens) >= self.max_len:
                self.refused.append(what.sequence)
                self.counts["late refusals"] += 1
                continue
            model.present = what
            model.turn += 1
            base = len(model.context)
            model.features += [
                MultimodalFeature(hash=feature.hash, offset=feature.offset + base, length=feature.length)
                for feature in what.features
            ]
            self.will_stay(model, what.tokens)

    def will_stay(self, model: Model, tokens: list[int]) -> None:
        """No token of the context, with these at its end, is going to be dropped: its blocks may have their names."""
        everything = pack_ints([*model.context, *tokens])
        self.settled.update(split_hashes(block_hashes(everything, self.pool.block_size, "", model.features)))

    def expect_end(self, handle: int, reason: str, kept: int) -> None:
        """The present turn is over: take its boundary, and what comes with it, from the scheduler."""
        self.refused = []
        outputs, refused = self.scheduler.take_turns()
        for frontend, message in outputs:
            self.hear(frontend, message, {handle: (reason, kept)})
        assert [item.sequence for item in refused] == self.refused

    def hear(self, frontend: int, message: Outputs, stopped: dict[int, tuple[str, int]] | None = None) -> None:
        """Everything a frontend is told must be what the model says, in that order."""
        handles, tokens = unpack_ints(message.handles).tolist(), unpack_ints(message.tokens).tolist()
        counts = unpack_ints(message.counts).tolist() or [1] * len(handles)
        for handle, token in zip(np.repeat(handles, counts).tolist(), tokens, strict=True):
            model = self.models[handle]
            assert handle % 3 == frontend
            assert model.present is not None, "a token came between turns"
            everything = [*model.context, *model.present.tokens, *model.output]
            assert self.reason(model) is None, "a token came after the end of the turn"
            expected = self.next_token(everything)
            if model.present.sampling.grammar is not None:
                assert model.present.matcher is not None
                expected = allowed_token(expected, model.present.matcher.masks([])[0])
                assert model.present.matcher.accept([token])
                self.counts["masked"] += 1
            assert token == expected
            model.output.append(token)
        for started in message.started:
            assert self.models[started.handle].present is not None
            kept = len(self.models[started.handle].context)
            assert self.config.enable_prefix_caching or started.cached_tokens <= kept
        for turn in message.turns:
            self.hear_end(turn, (stopped or {}).get(turn.handle))
        for ended in message.ended:
            assert ended.reason == "closed"
            assert self.models[ended.handle].closing
            assert self.models[ended.handle].present is None
            self.end(ended.handle, ended.reason)

    def hear_end(self, turn: Any, stopped: tuple[str, int] | None) -> None:
        model = self.models[turn.handle]
        assert turn.turn == model.turn
        assert model.present is not None
        if stopped is not None:
            reason, kept, stop_reason = *stopped, None
        elif not model.present.tokens and not model.output:
            reason, kept, stop_reason = "empty", 0, None
            self.counts["empty"] += 1
        else:
            found = self.reason(model)
            assert found is not None, "the turn ended too early"
            (reason, stop_reason), kept = found, len(model.output) - 1
        assert (turn.reason, turn.stop_reason, turn.kept_tokens) == (reason, stop_reason, kept)
        model.context = [*model.context, *model.present.tokens, *model.output[:kept]]
        assert turn.context_tokens == len(model.context)
        self.will_stay(model, [])
        model.present, model.output = None, []
        model.boundaries += 1
        self.counts["turns"] += 1
        assert model.boundaries == model.turn
        self.refused = []
        self.go_on(turn.handle)

    def reason(self, model: Model) -> tuple[str, int | None] | None:
        """Why the present turn is over, None if it is not."""
        assert model.present is not None
        sampling = model.present.sampling
        if not model.output:
            return None
        if model.output[-1] == sampling.eos_token_id:
            return "stop", None
        if model.output[-1] in sampling.stop_token_ids:
            return "stop", model.output[-1]
        length = len(model.context) + len(model.present.tokens) + len(model.output)
        if len(model.output) >= sampling.max_tokens or length >= self.max_len:
            return "length", None
        return None

    # What happens

    def act(self) -> None:
        draw = self.draw
        if self.models:
            handle = draw.choice(sorted(self.models))
            what = draw.random()
            if what < 0.35:
                self.append(handle)
            elif what < 0.45:
                self.stop(handle)
            elif what < 0.47:
                self.close(handle)
            elif what < 0.49:
                self.abort(handle)
            elif what < 0.5:
                self.scheduler.reset_prefix_cache(draw.random() < 0.5)
            elif what < 0.52:
                self.scheduler.set_pause(draw.choice(["paused_new", "paused_all"]))
                self.move()
                self.scheduler.set_pause("unpaused")
        for _ in range(draw.randrange(4)):
            self.move()

    def move(self, quiet: bool = False) -> bool:
        """Schedule as far as it goes and perhaps take a result; whether there was anything."""
        moved = False
        while self.compiling and (quiet or self.draw.random() < 0.3):
            self.compile()
            moved = True
        while len(self.executor.results) < self.config.async_depth:
            schedule = self.scheduler.schedule(self.step, 0.0)
            moved |= self.take_turns()
            if schedule is None:
                break
            self.step += 1
            moved = True
            self.executor.run(schedule)
            if not quiet and self.draw.random() < 0.3:
                break
        if self.executor.results and (quiet or self.draw.random() < 0.8):
            self.refused = []
            for frontend, message in self.scheduler.update(self.executor.take()):
                self.hear(frontend, message)
            self.take_turns()
            moved = True
        self.check_figures()
        return moved

    def take_turns(self) -> bool:
        outputs, refused = self.scheduler.take_turns()
        for frontend, message in outputs:
            assert not message.handles.nbytes
            self.hear(frontend, message)
        return bool(outputs or refused)

    def check_figures(self) -> None:
        """What the rank says of itself, by what the model knows."""
        idle = sum(model.present is None for model in self.models.values())
        running, waiting = self.scheduler.request_counts()
        assert running + waiting == len(self.models)
        assert self.scheduler.unfinished() == len(self.models) - idle
        load = self.scheduler.load()
        assert load.running + load.waiting == len(self.models) - idle
        held = sum(
            len(model.context) + len(model.present.tokens if model.present else []) + len(model.output)
            for model in self.models.values()
        )
        assert self.scheduler.token_count() == held
        assert load.pending_prefill_tokens >= 0
        names = split_hashes(self.scheduler.kv_snapshot())
        assert self.settled.issuperset(names), "a block can be found that has tokens which may be dropped"
        self.counts["named"] = max(self.counts["named"], len(names))


def refusal(call: Callable[[], Any]) -> tuple[str, Any]:
    """The sentence with which a call is refused, and what it gives if it is not."""
    try:
        return "", call()
    except Refused as refused:
        return str(refused), None


def play(make: Callable[[int], SessionTrace], seeds: range, num_sessions: int, num_turns: int) -> dict[str, int]:
    """Lives of these seeds; what happened in them, counted."""
    totals: dict[str, int] = {}
    for seed in seeds:
        trace = make(seed)
        try:
            trace.run(num_sessions, num_turns)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        counted = trace.counters.snapshot()
        found = trace.counts | {
            "preempted": int(counted.get("scheduler_preemptions", 0)),
            "dropped": int(counted.get("scheduler_dropped_tokens", 0)),
            "reclaimed": int(counted.get("scheduler_reclaimed_sessions", 0)),
            "continued": trace.executor.continued,
            "resumed": trace.executor.resumed,
            "accepted": trace.executor.accepted,
            "rejected": trace.executor.rejected,
        }
        for what, count in found.items():
            totals[what] = totals.get(what, 0) + count
    return totals


def with_drafts(seed: int, **options: Any) -> SessionTrace:
    """A life with drafts from here or there, as many as the seed says, and tokens that repeat themselves."""
    source = ("ngram", "ngram", "model")[seed % 3]
    settings = {"speculation": source, "num_speculative_tokens": 1 + seed % 5, "prompt_lookup_min": 1}
    return SessionTrace(seed, next_token=next_repeating, **settings, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=1000, help="of each kind")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.traces)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = write_vocabulary(Path(folder) / "model")
        kinds: dict[str, Callable[[int], SessionTrace]] = {
            "plain": SessionTrace,
            "with drafts": with_drafts,
            "with grammars": partial(SessionTrace, vocabulary=vocabulary),
            "with grammars and drafts": partial(with_drafts, vocabulary=vocabulary),
        }
        for kind, make in kinds.items():
            print(f"{kind}:")
            for what, count in play(make, seeds, num_sessions=8, num_turns=25).items():
                print(f"  {what:14} {count:8}", flush=True)


if __name__ == "__main__":
    main()
