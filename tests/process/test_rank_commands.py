"""Every command, over real sockets, against a real rank process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from bus.config import Config
from bus.folds import RULES
from bus.messages import (
    AbortRequests,
    AnyCommand,
    AppendInput,
    ComputedBlocks,
    Drain,
    Error,
    FinishRequests,
    GetPauseState,
    Grammar,
    GrammarBitmask,
    HasFinishedRequests,
    KvEvents,
    KvPool,
    ListAdapters,
    Load,
    LoadAdapter,
    MakeStats,
    MinRemainingOutput,
    PendingPrefillTokens,
    RequestCounts,
    ResetEncoderCache,
    ResetPrefixCache,
    Resume,
    Sampling,
    Schedule,
    SetPause,
    Shutdown,
    TokenCount,
    UnfinishedRequests,
    UnloadAdapter,
    UpdateDraftTokens,
    UpdateFromOutput,
)
from bus.prefix import block_hashes
from bus.wire import pack_ints, unpack_ints
from ranks.grammars import Grammars
from tests.engine import Engine
from tests.process.rank import RankUnderTest
from tests.ranks.toy import GRAMMARS, VOCAB, generate, write_vocabulary
from tests.tiny_model import EOS

POOL = KvPool(num_blocks=64, block_size=16, max_model_len=256, vocab_size=VOCAB)


@pytest.fixture(scope="module", params=["native", "vllm"])
def scheduler(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's, in a model folder."""
    return write_vocabulary(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def rank(vocabulary: Path, engine_cache: Path, scheduler: str) -> Iterator[RankUnderTest]:
    with Engine(vocabulary, engine_cache, ranks=1, frontends=2, scheduler=scheduler) as engine:
        rank = RankUnderTest(engine, POOL)
        try:
            yield rank
        finally:
            rank.close()


@pytest.fixture(scope="module")
def single(tiny_model: Path, engine_cache: Path, scheduler: str) -> Iterator[RankUnderTest]:
    settings = {"single_step": True, "async_depth": 1, "scheduler": scheduler}
    with Engine(tiny_model, engine_cache, ranks=1, frontends=2, **settings) as engine:
        rank = RankUnderTest(engine, KvPool(num_blocks=64, block_size=16, max_model_len=256, vocab_size=259))
        try:
            yield rank
        finally:
            rank.close()


def prompt(length: int, salt: int) -> list[int]:
    return [(salt * 13 + i * i + 1) % VOCAB for i in range(length)]


def expected(tokens: list[int], max_tokens: int) -> list[int]:
    return generate(tokens, Sampling(seed=0, max_tokens=max_tokens), POOL.max_model_len)[0]


def test_requests_of_two_frontends_run_to_their_end(rank: RankUnderTest) -> None:
    handles = [rank.add(prompt(5 + 40 * i, i), 6, frontend=i % 2) for i in range(4)]
    for i, handle in enumerate(handles):
        assert rank.ended(handle, i % 2).reason == "length"
        assert rank.tokens(handle, i % 2) == expected(prompt(5 + 40 * i, i), 6)
    assert rank.value(UnfinishedRequests()) == 0


def test_requests_with_grammars_run_among_others(rank: RankUnderTest, vocabulary: Path) -> None:
    grammars = Grammars(Config(model=str(vocabulary)))
    bad = rank.add(prompt(8, 1), 40, grammar=Grammar(kind="regex", spec="("))
    free = rank.add(prompt(9, 2), 30)
    handles = [rank.add(prompt(5 + i, i), 40, grammar=grammar, eos_token_id=EOS) for i, grammar in enumerate(GRAMMARS)]
    ended = rank.ended(bad)
    assert ended.code == "invalid"
    assert ended.message.startswith("the grammar cannot be used: ")
    for i, (handle, grammar) in enumerate(zip(handles, GRAMMARS, strict=True)):
        sampling = Sampling(seed=0, max_tokens=40, eos_token_id=EOS)
        matcher = grammars.compile(grammar)
        tokens, reason = generate(prompt(5 + i, i), sampling, POOL.max_model_len, matcher=matcher)
        assert (rank.ended(handle).reason, rank.tokens(handle)) == (reason, tokens)
    assert rank.ended(free).reason == "length"
    assert rank.tokens(free) == expected(prompt(9, 2), 30)


def test_load_acknowledges_and_comes_to_rest(rank: RankUnderTest) -> None:
    handle = rank.add(prompt(9, 5), 3)
    rank.ended(handle)

    def at_rest() -> bool:
        load = next(m for m in reversed(rank.frontends[0].core.messages) if isinstance(m, Load))
        idle = load.running == load.waiting == load.pending_prefill_tokens == load.used_blocks == 0
        return idle and load.acknowledged == handle + 1

    rank.frontends[0].wait(at_rest, "a load report of an idle rank")
    numbers = [load.number for load in rank.frontends[0].received(Load)]
    assert numbers == sorted(set(numbers))


def test_kv_events_and_computed_blocks(rank: RankUnderTest) -> None:
    tokens = prompt(50, 6)
    rank.ended(rank.add(tokens, 2))
    assert rank.value(ComputedBlocks(prompt_token_ids=tokens)) == [48]
    assert rank.value(ComputedBlocks(prompt_token_ids=tokens, cache_salt="other")) == [0]
    assert rank.error(ComputedBlocks(prompt_token_ids=[2**40])).code == "invalid"
    names = block_hashes(pack_ints(tokens), POOL.block_size)
    for frontend in rank.frontends:
        frontend.wait(
            lambda frontend=frontend: any(
                names in bytes(m.stored) for m in frontend.core.messages if isinstance(m, KvEvents)
            ),
            "the prompt's blocks in a KV event",
        )
        events = frontend.received(KvEvents)
        assert events[0].snapshot
        later = [event.number for event in events if event.number > events[0].number]
        assert later == list(range(events[0].number + 1, events[0].number + 1 + len(later)))


def test_finish_and_probes_while_steps_are_held(rank: RankUnderTest) -> None:
    rank.executor.hold(True)
    runs = rank.add(prompt(20, 20), 30)
    rank.executor.wait(lambda: len(rank.executor.core.toy.results) == 2, "two steps in flight")
    waits = rank.add(prompt(21, 21), 30, frontend=1)
    assert rank.value(TokenCount(), frontend=1) == [41]
    assert rank.value(UnfinishedRequests()) == 2
    assert rank.value(RequestCounts()) == [1, 1]
    assert rank.value(PendingPrefillTokens()) == [21]
    assert rank.value(MinRemainingOutput()) == [30]
    assert rank.value(HasFinishedRequests()) is False
    assert rank.value(FinishRequests(request_ids=[f"r{waits}", "nobody"])) == [f"r{waits}"]
    assert rank.ended(waits, 1).reason == "abort"
    rank.frontends[0].send(AbortRequests(handles=pack_ints([runs, 12345])))
    assert rank.ended(runs).reason == "abort"
    assert rank.value(HasFinishedRequests()) is True  # steps in flight name its row
    assert rank.value(FinishRequests()) == []
    assert rank.value(MinRemainingOutput()) == [None]
    rank.executor.hold(False)
    rank.ended(rank.add(prompt(7, 22), 2))
    assert rank.tokens(runs) == []
    assert any(rank.value(HasFinishedRequests()) is False for _ in range(100))  # as soon as it has taken the results


def test_append_opens_continues_and_closes_a_session(rank: RankUnderTest) -> None:
    first = prompt(10, 30)
    handle = rank.add(first, 3, resumable=True)
    side = rank.frontends[0]
    side.wait(lambda: len(rank.tokens(handle)) == 3, "the first turn")
    assert rank.value(UnfinishedRequests()) == 0
    side.send(AppendInput(handle=handle, sequence=handle + 2, prompt_token_ids=pack_ints([4, 5])))
    side.wait(lambda: len(rank.tokens(handle)) == 6, "the second turn")
    kept = [*first, *expected(first, 3)[:-1], 4, 5]
    assert rank.tokens(handle) == expected(first, 3) + expected(kept, 3)
    side.send(AppendInput(handle=handle, sequence=handle + 3, close=True))
    assert rank.ended(handle).reason == "closed"
    side.send(AppendInput(handle=handle, sequence=handle + 4, prompt_token_ids=pack_ints([4])))
    side.wait(lambda: [m for m in side.core.messages if isinstance(m, Error) and "not known" in m.message], "an error")


def test_reset_of_the_caches(rank: RankUnderTest) -> None:
    tokens = prompt(40, 40)
    rank.executor.hold(True)
    handle = rank.add(tokens, 10)
    rank.executor.wait(lambda: len(rank.executor.core.toy.results) == 2, "two steps in flight")
    assert rank.value(UnfinishedRequests()) == 1
    assert rank.value(ResetPrefixCache()) is False
    assert rank.value(ResetPrefixCache(reset_running_requests=True)) is True
    assert rank.value(ResetEncoderCache()) is True
    rank.executor.hold(False)
    rank.ended(handle)
    assert rank.tokens(handle) == expected(tokens, 10)
    assert rank.value(ResetPrefixCache()) is True
    assert rank.value(ComputedBlocks(prompt_token_ids=tokens)) == [0]


def test_stats(rank: RankUnderTest) -> None:
    rank.value(MakeStats())
    rank.ended(rank.add(prompt(20, 50), 2))
    stats = rank.value(MakeStats())
    assert stats["prefix_cache_stats"]["queries"] == 20
    assert (stats["num_running_reqs"], stats["num_waiting_reqs"], stats["kv_cache_usage"]) == (0, 0, 0)
    assert rank.value(MakeStats())["prefix_cache_stats"]["queries"] == 0


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume(rank: RankUnderTest, mode: Any) -> None:
    rank.executor.hold(True)
    tokens = prompt(12, 60)
    handle = rank.add(tokens, 10)
    rank.executor.wait(lambda: len(rank.executor.core.toy.results) == 2, "two steps in flight")
    assert rank.value(UnfinishedRequests()) == 1
    command = rank.ask(SetPause(mode=mode))
    state = {"keep": "paused_all", "wait": "paused_new", "abort": "paused_new"}[mode]
    assert rank.value(GetPauseState()) == state
    rank.executor.hold(False)
    assert rank.frontends[0].answer(command).value == state  # type: ignore[union-attr]
    late = rank.add(prompt(6, 61), 2, frontend=1)
    assert rank.value(UnfinishedRequests(), frontend=1) == {"keep": 2, "wait": 1, "abort": 1}[mode]
    assert rank.value(Resume()) == "unpaused"
    assert rank.ended(late, 1).reason == "length"
    assert rank.ended(handle).reason == ("abort" if mode == "abort" else "length")
    assert rank.tokens(handle) == ([] if mode == "abort" else expected(tokens, 10))


def test_drain(rank: RankUnderTest) -> None:
    rank.executor.hold(True)
    handle = rank.add(prompt(12, 70), 4)
    late = rank.ask(Drain(), deadline_s=0.2)
    answer = rank.frontends[0].answer(late)
    assert isinstance(answer, Error)
    assert answer.code == "deadline"
    command = rank.ask(Drain())
    refused = rank.add(prompt(3, 71))
    assert rank.ended(refused).code == "unavailable"
    rank.executor.hold(False)
    assert rank.frontends[0].answer(command).value is True  # type: ignore[union-attr]
    assert rank.ended(handle).reason == "length"
    assert rank.value(Resume()) == "unpaused"
    assert rank.ended(rank.add(prompt(3, 71))).reason == "length"


def test_requests_that_cannot_be_served_end_at_once(rank: RankUnderTest) -> None:
    for tokens, sentence in ((prompt(256, 1), "256 tokens"), ([], "empty"), ([VOCAB], "vocabulary")):
        ended = rank.ended(rank.add(tokens))
        assert (ended.reason, ended.code) == ("error", "invalid")
        assert sentence in ended.message


def test_single_step_commands_are_refused_outside_of_it(rank: RankUnderTest) -> None:
    for body in (Schedule(), UpdateFromOutput(sampled_token_ids={}), GrammarBitmask(), UpdateDraftTokens(drafts={})):
        assert rank.error(body).code == "not_single_step"


def test_single_step_mode(single: RankUnderTest) -> None:
    tokens = prompt(70, 1)
    long = f"r{single.add(tokens, 3)}"
    schedule = single.value(Schedule())
    assert schedule["num_scheduled_tokens"] == {long: 64}  # max_num_batched_tokens
    assert schedule["rank_of"] == {long: 0}
    (new,) = schedule["scheduled_new_reqs"]
    assert (new["req_id"], new["prompt_token_ids"], new["num_computed_tokens"]) == (long, tokens, 0)
    assert len(new["block_ids"][0]) == 4
    assert single.error(Schedule()).code == "held"
    assert "must have none" in single.error(UpdateFromOutput(sampled_token_ids={long: [1]})).message
    assert single.value(UpdateFromOutput(sampled_token_ids={})) == {}
    assert single.error(UpdateFromOutput(sampled_token_ids={})).code == "not_held"
    schedule = single.value(Schedule())
    assert schedule["scheduled_cached_reqs"]["req_ids"] == [long]
    assert schedule["total_num_scheduled_tokens"] == 6
    assert "has 0 sampled tokens" in single.error(UpdateFromOutput(sampled_token_ids={})).message
    assert single.value(UpdateFromOutput(sampled_token_ids={long: [9]})) == {
        long: {"new_token_ids": [9], "finish_reason": None, "stop_reason": None}
    }
    assert single.value(UpdateDraftTokens(drafts={long: [5], "nobody": [1]})) == [long]
    schedule = single.value(Schedule())
    assert schedule["scheduled_spec_decode_tokens"] == {long: [5]}
    emitted = single.value(UpdateFromOutput(sampled_token_ids={long: [5, 6]}))
    assert emitted == {long: {"new_token_ids": [5, 6], "finish_reason": "length", "stop_reason": None}}
    assert single.value(HasFinishedRequests()) is True
    schedule = single.value(Schedule())
    assert schedule["finished_req_ids"] == [long]
    assert schedule["num_scheduled_tokens"] == {}
    assert single.value(UpdateFromOutput(sampled_token_ids={})) == {}
    assert single.value(HasFinishedRequests()) is False
    assert single.value(MakeStats())["spec_decoding_stats"] == {
        "num_drafts": 1,
        "num_draft_tokens": 1,
        "num_accepted_tokens": 1,
        "num_accepted_tokens_per_pos": [1],
        "num_draft_tokens_per_pos": [1],
    }
    assert single.tokens(single.handle) == [9, 5, 6]


def test_grammar_bitmask(single: RankUnderTest) -> None:
    grammar = Grammar(kind="choice", spec='["yes", "no"]')
    constrained = f"r{single.add([10, 11, 12], 5, grammar=grammar, eos_token_id=EOS)}"
    free = f"r{single.add([13, 14], 5)}"
    assert single.error(GrammarBitmask()).code == "not_held"
    single.value(Schedule())
    names, (row,) = single.value(GrammarBitmask())
    assert names == [constrained]
    allowed = [token for token in range(259) if unpack_ints(memoryview(row))[token // 32] >> (token % 32) & 1]
    assert len(allowed) == 2  # y and n, one token for each byte
    single.value(UpdateFromOutput(sampled_token_ids={constrained: [allowed[0]], free: [7]}))
    assert sorted(single.value(FinishRequests())) == sorted([constrained, free])
    bad = single.add([1, 2], grammar=Grammar(kind="regex", spec="("))
    assert "the grammar cannot be used" in single.ended(bad).message
    free = f"r{single.add([13, 14], 1)}"
    single.value(Schedule())
    assert single.value(GrammarBitmask()) is None
    assert single.value(UpdateFromOutput(sampled_token_ids={free: [7]}))[free]["finish_reason"] == "length"


def test_shutdown_ends_the_process(rank: RankUnderTest) -> None:
    assert rank.value(Shutdown()) is True
    assert rank.engine["rank-0"].wait_for_end(20) == 0
    rank.frontends[1].wait(lambda: 0 not in rank.frontends[1].core.peers, "the rank's Goodbye")
    rank.engine.stop("rank-0")


def test_every_command_was_asked(rank: RankUnderTest, single: RankUnderTest) -> None:
    others = {LoadAdapter, UnloadAdapter, ListAdapters}
    assert set(get_args(AnyCommand)) == set(RULES) == rank.asked | single.asked | others
