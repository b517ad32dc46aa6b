"""Sessions on the native scheduler: every corner of docs/sessions.md that no frontend is needed for."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.config import Config
from bus.counters import Counters
from bus.messages import AppendInput, KvPool, MultimodalFeature, PartialSchedule, Sampling, StepResult, StopTurn
from bus.prefix import block_hashes, split_hashes
from bus.wire import pack_ints
from ranks.native import NativeScheduler
from ranks.scheduler import Refused
from tests.ranks.session_traces import SessionTrace, play, refusal, with_drafts
from tests.ranks.toy import VOCAB, next_repeating, next_token, request

EVERY_TOKEN = list(range(VOCAB))
SOON = Sampling(seed=0, max_tokens=3)


def pool(num_blocks: int, max_model_len: int = 64) -> KvPool:
    return KvPool(num_blocks=num_blocks, block_size=8, max_model_len=max_model_len, vocab_size=VOCAB)


def life(num_blocks: int = 60, **options: Any) -> SessionTrace:
    """A rank on which nothing happens by chance."""
    common: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "policy": "fcfs",
        "async_depth": 2,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
    }
    return SessionTrace(0, pool(num_blocks), **common | options)


def count(trace: SessionTrace, what: str) -> int:
    return int(trace.counters.snapshot().get(f"scheduler_{what}", 0))


@pytest.mark.timeout(300)
def test_random_sessions() -> None:
    happened = play(SessionTrace, range(40), num_sessions=8, num_turns=25)
    del happened["accepted"], happened["rejected"], happened["masked"], happened["bad"]
    assert min(happened.values()) >= 10, happened


@pytest.mark.timeout(300)
def test_random_sessions_with_drafts() -> None:
    """Turns end in the middle of drafts that are right, and while drafts are in flight."""
    happened = play(with_drafts, range(25), num_sessions=8, num_turns=25)
    del happened["masked"], happened["bad"]
    assert min(happened.values()) >= 10, happened


@pytest.mark.timeout(300)
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_random_sessions_whose_turns_have_grammars(toy_model: Path, speculation: str) -> None:
    model = next_token if speculation == "off" else next_repeating
    life = partial(SessionTrace, next_token=model, vocabulary=toy_model, speculation=speculation, prompt_lookup_min=1)
    happened = play(life, range(500, 525), num_sessions=8, num_turns=25)
    if speculation == "off":
        del happened["accepted"], happened["rejected"]
    assert min(happened.values()) >= 5, happened


@pytest.mark.parametrize("async_depth", [1, 2])
@settings(max_examples=15, deadline=None)
@given(inputs=st.lists(st.integers(0, 9), min_size=1, max_size=8), seqs=st.integers(1, 3))
def test_turns_whose_first_token_is_their_last(async_depth: int, inputs: list[int], seqs: int) -> None:
    """Nothing of their output is kept, and the next input is there already: each has its boundary."""
    trace = life(async_depth=async_depth, max_num_seqs=seqs)
    stops = Sampling(seed=0, max_tokens=9, stop_token_ids=EVERY_TOKEN)
    for handle in range(3):
        trace.open(handle, [1 + handle, 2, 3], stops)
        for size in inputs[: 6 - handle]:
            trace.append(handle, list(range(size)))
        trace.close(handle)
    trace.run_on()
    assert not trace.models
    assert count(trace, "preemptions") == 0
    trace.check_clean()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(8, 40), min_size=2, max_size=5),
    more=st.integers(1, 20),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2]),
)
def test_sessions_that_hold_all_blocks_make_room_for_each_other(
    sizes: list[int], more: int, caching: bool, depth: int
) -> None:
    """All wake at the same time, and nothing runs that could be preempted: the one that slept longest goes first."""
    trace = life(num_blocks=8, enable_prefix_caching=caching, async_depth=depth, max_num_seqs=5)
    for handle, size in enumerate(sizes):
        trace.open(handle, [handle + place % 7 for place in range(size)], SOON)
        trace.run_on()
    for handle in range(len(sizes)):
        trace.append(handle, list(range(more)))
    first = trace.models[0]
    trace.run_on()
    assert first.present is None
    assert all(model.present is None and model.turn == 2 for model in trace.models.values())
    for handle in range(len(sizes)):
        trace.close(handle)
    trace.check_clean()


def test_two_sessions_that_each_need_the_others_blocks() -> None:
    trace = life(num_blocks=8, enable_prefix_caching=False)
    for handle in (0, 1):
        trace.open(handle, [handle] * 28, SOON)
        trace.run_on()
    assert trace.scheduler.load().used_blocks == 8
    for handle in (0, 1):
        trace.append(handle, [5] * 20)
    trace.run_on()
    assert [model.turn for model in trace.models.values()] == [2, 2]
    assert all(model.present is None for model in trace.models.values())
    assert count(trace, "reclaimed_sessions") >= 2
    assert count(trace, "preemptions") == 0


def test_a_new_request_gets_the_blocks_of_sessions_that_sleep() -> None:
    trace = life(num_blocks=8, enable_prefix_caching=False)
    for handle in (0, 1):
        trace.open(handle, [handle] * 28, SOON)
        trace.run_on()
    trace.open(2, [9] * 30, SOON)
    trace.run_on()
    assert trace.models[2].present is None
    assert count(trace, "reclaimed_sessions") == 1  # that of session 0, which sleeps longer, is enough
    trace.append(1, [4])
    trace.run_on()
    assert count(trace, "scheduled_tokens") == 28 + 2 + 28 + 2 + 30 + 2 + 1 + 2


@pytest.mark.parametrize("async_depth", [1, 2])
def test_a_session_as_long_as_the_context(async_depth: int) -> None:
    trace = life(async_depth=async_depth)
    other = Sampling(seed=0, max_tokens=40)
    trace.open(0, [1] * 30, Sampling(seed=0, max_tokens=1000))
    trace.open(1, [2] * 10, other)
    trace.append(0, [5] * 30)  # there may be room when it comes; there is none when it is its turn
    trace.run_on()
    assert len(trace.models[0].context) == 63
    assert trace.counts["late refusals"] == 1
    assert "the input has 1 tokens and the session 63; the context holds 64" in trace.append(0, [1])
    assert trace.append(0, []) == ""  # nothing always fits
    trace.append(1, [3])
    trace.run_on()
    assert [model.turn for model in trace.models.values()] == [2, 2]
    for handle in (0, 1):
        trace.close(handle)
    trace.check_clean()


def test_tokens_of_a_turn_that_has_ended_are_dropped_and_counted() -> None:
    """The step after a stop token was sent before it was known; the next turn begins in the same row meanwhile."""
    trace = life()
    stops = Sampling(seed=0, max_tokens=60, stop_token_ids=EVERY_TOKEN)
    trace.open(0, [1, 2, 3], stops)
    for token in range(5):
        trace.append(0, [token])
    trace.run_on()
    trace.close(0)
    trace.check_clean()
    assert trace.executor.continued == 5
    assert count(trace, "dropped_tokens") == 6
    assert count(trace, "generated_tokens") == 6
    assert count(trace, "turns") == 6


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(0, 3)), max_size=6))
def test_turns_that_are_stopped(cuts: list[tuple[int, int, int]]) -> None:
    """After some steps of a turn, with some kept, and some appends queued before."""
    trace = life()
    trace.open(0, [1, 2, 3], Sampling(seed=0, max_tokens=9))
    for steps, keep, appends in cuts:
        for place in range(appends):
            trace.append(0, [place])
        for _ in range(steps):
            trace.move()
        trace.stop(0, keep)
    trace.run_on()
    trace.close(0)
    trace.check_clean()


def test_what_cannot_be_done_to_a_session() -> None:
    trace = life()
    scheduler = trace.scheduler

    def append(handle: int, tokens: tuple[int, ...] = (1,), frontend: int = 0, **options: Any) -> str:
        turn = AppendInput(handle=handle, sequence=9, prompt_token_ids=pack_ints(tokens), **options)
        return refusal(lambda: scheduler.append(frontend, turn, 0.0))[0]

    def stop(handle: int, turn: int, n: int = 0) -> str:
        return refusal(lambda: scheduler.stop_turn(0, StopTurn(handle=handle, sequence=9, turn=turn, n=n)))[0]

    scheduler.add(0, request(0, [1, 2], resumable=True), 0.0)
    scheduler.add(0, request(3, [1, 2]), 0.0)
    assert "not known" in append(7)
    assert "not known" in append(0, frontend=1)  # another frontend's handle
    assert "no session" in append(3)
    assert "no session" in append(3, close=True)
    assert "outside the vocabulary" in append(0, (VOCAB,))
    assert "outside the vocabulary" in append(0, (-1,))
    assert "max_tokens is 0" in append(0, sampling=Sampling(seed=0, max_tokens=0))
    feature = MultimodalFeature(hash="a", offset=1, length=2)
    assert "offset 1 and length 2; it must lie in the input, which has 2" in append(0, (1, 2), mm_features=[feature])
    assert "turn 2 has not begun" in stop(0, 2)
    assert "turn 0 has ended" in stop(0, 0)
    assert "n is -1" in stop(0, 1, -1)
    assert "not known" in stop(7, 1)
    assert append(0, close=True) == ""
    assert "is closed" in append(0)
    assert "is closed" in append(0, close=True)
    assert stop(0, 1) == ""  # what was to close it does, after this
    ((_, outputs),) = scheduler.take_turns()[0]
    assert [(turn.turn, turn.reason) for turn in outputs.turns] == [(1, "interrupted")]
    assert [(ended.handle, ended.reason) for ended in outputs.ended] == [(0, "closed")]
    assert "not known" in append(0, close=True)
    assert "not known" in stop(0, 1)
    with pytest.raises(Refused, match="turn is 0"):
        scheduler.add(0, msgspec.structs.replace(request(0, [1], resumable=True), turn=0), 0.0)
    with pytest.raises(Refused, match="the prompt is empty"):
        scheduler.add(0, request(0, []), 0.0)
    scheduler.add(0, request(0, [1], resumable=True), 0.0)  # the handle and the id are free again
    assert scheduler.finish(0, pack_ints([0]), "abort")
    assert "not known" in append(0)
    assert scheduler.unfinished() == 1


def test_a_lost_frontend_takes_its_sessions_along() -> None:
    trace = life()
    for handle in range(6):  # two of each frontend
        trace.open(handle, [1, 2, handle], SOON)
    for _ in range(4):
        trace.move()
    for handle in (0, 3):
        trace.append(handle, [4])
    ended = trace.scheduler.finish(0, None, "abort")
    assert sorted(item.ended.handle for item in ended) == [0, 3]
    for handle in (0, 3):
        trace.end(handle, "abort")
    trace.run_on()
    for handle in (1, 2, 4, 5):
        trace.close(handle)
    trace.check_clean()


def test_who_sleeps_is_no_load() -> None:
    trace = life()
    trace.open(0, [1] * 20, SOON)
    trace.run_on()
    scheduler = trace.scheduler
    load = scheduler.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens, load.used_blocks) == (0, 0, 0, 3)
    assert (scheduler.unfinished(), scheduler.request_counts(), scheduler.token_count()) == (0, (0, 1), 22)
    assert scheduler.schedule(trace.step, 0.0) is None
    trace.append(0, [1] * 5)
    load = scheduler.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 1, 5)
    assert (scheduler.unfinished(), scheduler.request_counts(), scheduler.token_count()) == (1, (0, 1), 27)


def test_parameters_of_turns() -> None:
    """A turn's own replace the old ones whole; without, it has those that the session was opened with."""
    scheduler = NativeScheduler(Config(async_depth=1), pool(60), Counters())
    opened = request(0, [1, 2], max_tokens=1, resumable=True, temperature=0.5, top_k=7)
    scheduler.add(0, opened, 0.0)
    own = Sampling(seed=8, max_tokens=1, presence_penalty=1.0)
    for sampling in (None, own, None):
        scheduler.append(0, AppendInput(handle=0, sequence=1, prompt_token_ids=pack_ints([3]), sampling=sampling), 0.0)
    sent = _answered(scheduler, 4, token=5)
    assert sent[0].new[0].sampling == opened.sampling
    assert [schedule.continued[0].sampling for schedule in sent[1:]] == [opened.sampling, own, opened.sampling]


def _answered(scheduler: NativeScheduler, count: int, token: int) -> list[PartialSchedule]:
    """So many steps, one after the other, in which every row draws `token`."""
    sent = []
    for step in range(count):
        schedule = scheduler.schedule(step, 0.0)
        assert schedule is not None
        sent.append(schedule)
        scheduler.update(StepResult(step=step, tokens=pack_ints([token] * (schedule.rows.nbytes // 4))))
    return sent


@pytest.mark.timeout(300)
def test_ten_thousand_turns() -> None:
    """One session, which grows by a token a turn; the executor is sent what is new, and nothing else."""
    scheduler = NativeScheduler(Config(max_num_seqs=2), pool(3000, 10_100), counters := Counters())
    scheduler.add(0, request(0, [1], max_tokens=1, resumable=True), 0.0)
    heard = []
    num_sent = 0
    for turn in range(1, 10_001):
        schedule = scheduler.schedule(turn, 0.0)
        assert schedule is not None
        if turn > 1:
            num_sent += schedule.continued[0].token_ids.nbytes // 4
        for _, outputs in scheduler.update(StepResult(step=turn, tokens=pack_ints([2]))):
            heard += [(ended.turn, ended.context_tokens) for ended in outputs.turns]
        scheduler.append(0, AppendInput(handle=0, sequence=turn, prompt_token_ids=pack_ints([3])), 0.0)
    assert heard == [(turn, turn) for turn in range(1, 10_001)]
    assert num_sent == 9_999
    assert counters.snapshot()["scheduler_scheduled_tokens"] == 10_000
    assert scheduler.finish(0, None, "abort")
    assert scheduler.load().used_blocks == 0


def test_features_are_part_of_names() -> None:
    """The same tokens with other pictures are another prompt; those of an append are looked at where they lie then."""
    tokens = list(range(16))

    def after(*hashes: str) -> NativeScheduler:
        scheduler = NativeScheduler(Config(async_depth=1), pool(60), Counters())
        for number, name in enumerate(hashes):
            opening = request(number, [1, 2, 3, 4], max_tokens=1, resumable=True)
            scheduler.add(0, opening, 0.0)
            _answered_from(scheduler, 2 * number)
            picture = MultimodalFeature(hash=name, offset=2, length=9)
            turn = AppendInput(
                handle=number, sequence=1, prompt_token_ids=pack_ints(tokens), mm_features=[picture], sampling=None
            )
            scheduler.append(0, turn, 0.0)
            _answered_from(scheduler, 2 * number + 1)
        return scheduler

    whole = pack_ints([1, 2, 3, 4, *tokens])
    at = MultimodalFeature(hash="one", offset=6, length=9)
    expected = split_hashes(block_hashes(whole, 8, "", [at]))
    assert set(split_hashes(after("one").kv_snapshot())) == set(expected)
    assert not set(expected) & set(split_hashes(block_hashes(whole, 8)))
    assert set(split_hashes(after("one", "one").kv_snapshot())) == set(expected)
    assert len(split_hashes(after("one", "two").kv_snapshot())) == 4


def _answered_from(scheduler: NativeScheduler, step: int) -> None:
    schedule = scheduler.schedule(step, 0.0)
    assert schedule is not None
    scheduler.update(StepResult(step=step, tokens=pack_ints([5])))


def test_a_conversation_computes_each_token_once() -> None:
    """Twenty turns, no prefix cache: what is computed, and what would be if each turn sent all that was said."""
    trace = SessionTrace(
        0,
        pool(200, 1024),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        policy="fcfs",
        async_depth=2,
        long_prefill_token_threshold=0,
        enable_prefix_caching=False,
    )
    draw = np.random.default_rng(0)
    inputs = [draw.integers(0, VOCAB, size).tolist() for size in draw.integers(5, 30, 20)]
    answers = Sampling(seed=0, max_tokens=12)
    trace.open(0, inputs[0], answers)
    resent = len(inputs[0])
    for tokens in inputs[1:]:
        trace.run_on()
        trace.append(0, tokens)
        resent += len(trace.models[0].context) + len(tokens)
    trace.run_on()
    drawn_and_computed = 20 * 11
    prefilled = count(trace, "scheduled_tokens") - drawn_and_computed
    said = sum(map(len, inputs))
    assert prefilled == said
    assert count(trace, "dropped_tokens") == 0
    assert resent > 10 * prefilled
    trace.close(0)
    trace.check_clean()
