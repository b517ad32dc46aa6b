"""Both schedulers behind the rank's interface, against a toy executor that checks every row, position and block."""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import AppendInput, KvPool, Logprobs, Sampling, StepResult
from bus.prefix import block_hashes, split_hashes
from bus.wire import pack_ints, unpack_floats, unpack_ints
from ranks.native import NativeScheduler
from ranks.scheduler import BrokenResult, Refused
from tests.ranks.toy import VOCAB, ToyExecutor, generate, next_token, request, vector_of

MakeScheduler = Callable[..., Any]


class Bench:
    """One scheduler and one toy executor, driven step by step as a rank does it."""

    def __init__(
        self, make: MakeScheduler, num_blocks: int = 64, max_model_len: int = 64, block_size: int = 8, **settings: Any
    ) -> None:
        self.config = Config(max_num_seqs=4, max_num_batched_tokens=16, **settings)
        self.pool = KvPool(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, vocab_size=VOCAB)
        self.counters = Counters()
        self.scheduler = make(self.config, self.pool, self.counters)
        self.executor = ToyExecutor(self.pool, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.step = 0
        self.output: dict[int, list[int]] = {}
        self.ended: dict[int, Any] = {}
        self.started: dict[int, int] = {}
        self.prompts: dict[int, list[Logprobs]] = {}
        self.vectors: dict[int, list[float]] = {}

    def add(self, handle: int, prompt: list[int], max_tokens: int = 8, **options: Any) -> None:
        self.scheduler.add(0, request(handle, prompt, max_tokens, **options), 0.0)

    def send(self) -> bool:
        """Make a step and let the executor have it."""
        schedule = self.scheduler.schedule(self.step, 0.0)
        if schedule is None:
            return False
        self.step += 1
        self.executor.run(schedule)
        return True

    def receive(self) -> None:
        for frontend, message in self.scheduler.update(self.executor.take()):
            assert frontend == 0
            self.started |= {item.handle: item.cached_tokens for item in message.started}
            for found in message.logprobs:
                assert not self.output.get(found.owner), "a prompt's log-probabilities come after its first token"
                self.prompts.setdefault(found.owner, []).append(found)
            tokens = unpack_ints(message.tokens).tolist()
            handles = unpack_ints(message.handles).tolist()
            counts = unpack_ints(message.counts).tolist() or [1] * len(handles)
            for handle, count in zip(handles, counts, strict=True):
                assert handle not in self.ended
                self.output.setdefault(handle, []).extend(tokens[:count])
                del tokens[:count]
            assert not tokens
            assert {item.owner for item in message.pooled} <= {item.handle for item in message.ended}
            self.vectors |= {item.owner: unpack_floats(item.vector).tolist() for item in message.pooled}
            self.note(message.ended)

    def note(self, ended: list[Any]) -> None:
        for item in ended:
            assert item.handle not in self.ended
            self.ended[item.handle] = item

    def turn(self) -> bool:
        """Fill the credit, then take one result; whether anything happened."""
        while len(self.executor.results) < self.config.async_depth and self.send():
            pass
        if self.executor.results:
            self.receive()
            return True
        return False

    def run(self) -> None:
        """Until nothing is left."""
        for _ in range(2000):
            if not self.turn():
                return
        raise AssertionError("the scheduler does not come to an end")

    def check_clean(self) -> None:
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.used_blocks, load.pending_prefill_tokens) == (0, 0, 0, 0)
        assert load.min_remaining_output is None
        assert self.scheduler.unfinished() == self.scheduler.token_count() == 0
        assert not self.scheduler.has_finished()


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def bench(make_scheduler: MakeScheduler, request: pytest.FixtureRequest) -> Callable[..., Bench]:
    return lambda **settings: Bench(make_scheduler, **{"async_depth": request.param} | settings)


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"seed": 0, "max_tokens": 8} | options)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7 + i * i) % VOCAB for i in range(length)]


def test_chunked_prefill_and_decode(bench: Any) -> None:
    b = bench()
    b.add(0, prompt(40), 10)
    b.run()
    assert (b.output[0], b.ended[0].reason) == generate(prompt(40), sampling(max_tokens=10), 64)
    assert b.step >= 3 + 9
    b.check_clean()


def test_more_requests_than_rows(bench: Any) -> None:
    b = bench()
    for handle in range(11):
        b.add(handle, prompt(5 + handle, handle), 3 + handle % 4)
    b.run()
    for handle in range(11):
        expected = generate(prompt(5 + handle, handle), sampling(max_tokens=3 + handle % 4), 64)
        assert (b.output[handle], b.ended[handle].reason) == expected
    b.check_clean()


def test_prefix_hit_and_kv_names(bench: Any) -> None:
    b = bench()
    shared = prompt(33)
    b.add(0, shared, 2)
    b.run()
    changes = b.scheduler.take_kv_changes()
    names = split_hashes(block_hashes(pack_ints(shared), 8))
    assert split_hashes(changes.stored) == names
    assert not changes.removed
    assert b.scheduler.computed_tokens(pack_ints(shared), "", "") == 32
    assert b.scheduler.computed_tokens(pack_ints(shared[:32]), "", "") == 24  # the last token is computed in any case
    assert b.scheduler.computed_tokens(pack_ints(shared), "salt", "") == 0
    b.add(1, [*shared[:20], 1, 2, 3], 2)
    b.add(2, shared, 2, salt="salt")
    b.run()
    assert b.started == {0: 0, 1: 16, 2: 0}
    assert b.scheduler.kv_snapshot()[: 4 * 16] == b"".join(names)
    assert b.scheduler.reset_prefix_cache(False)
    assert b.scheduler.take_kv_changes() == (b"", b"", True)
    assert b.scheduler.kv_snapshot() == b""
    b.check_clean()


def test_output_is_cached_under_the_names_a_prompt_would_have(bench: Any) -> None:
    b = bench()
    b.add(0, prompt(13), 30, salt="a")
    b.run()
    everything = prompt(13) + b.output[0]
    names = split_hashes(block_hashes(pack_ints(everything[:-1]), 8, "a"))
    assert split_hashes(b.scheduler.kv_snapshot()) == names
    assert len(names) == 5
    b.add(1, everything, 2, salt="a")
    b.run()
    assert b.started[1] == 40


def test_adapters_go_with_rows_and_have_blocks_of_their_own(bench: Any) -> None:
    b = bench()
    shared = prompt(33)
    for handle, adapter in enumerate(("A", "B", "", "A")):
        b.add(handle, shared, 12, adapter=adapter)
        assert b.scheduler.adapters() == ([adapter] if adapter else [])
        b.run()
        assert b.scheduler.adapters() == []
    assert b.started == {0: 0, 1: 0, 2: 0, 3: 32}
    found = [b.scheduler.computed_tokens(pack_ints(shared), "", adapter) for adapter in ("A", "B", "", "C")]
    assert found == [32, 32, 32, 0]
    everything = pack_ints(shared + b.output[0])
    assert b.scheduler.computed_tokens(everything, "", "A") == 40
    assert b.executor.adapters == [("NewRow", f"r{handle}", name) for handle, name in enumerate(("A", "B", "", "A"))]


def test_preempted_requests_keep_their_adapters(bench: Any) -> None:
    b = bench(num_blocks=9)
    for handle, adapter in enumerate(("A", "B", "A", "B")):
        b.add(handle, prompt(12, handle), 20, adapter=adapter)
    assert sorted(b.scheduler.adapters()) == ["A", "B"]
    b.run()
    assert {name for name, _, _ in b.executor.adapters} == {"NewRow", "ResumeRow"}
    assert all(adapter == ("A", "B", "A", "B")[int(name[1:])] for _, name, adapter in b.executor.adapters)


def test_names_that_come_with_a_request_are_used(bench: Any) -> None:
    b = bench()
    given = bytes(range(32))
    message = msgspec.structs.replace(request(0, prompt(20)), block_hashes=memoryview(given))
    b.scheduler.add(0, message, 0.0)
    b.run()
    assert b.scheduler.kv_snapshot()[:32] == given


def test_evicted_names_are_reported(bench: Any) -> None:
    b = bench(num_blocks=9)
    known: set[bytes] = set()
    for handle in range(6):
        b.add(handle, prompt(30, handle), 3)
        b.run()
        changes = b.scheduler.take_kv_changes()
        stored, removed = set(split_hashes(changes.stored)), set(split_hashes(changes.removed))
        assert not stored & known
        assert removed <= known
        known = (known | stored) - removed
        assert set(split_hashes(b.scheduler.kv_snapshot())) == known
    assert len(known) <= 8


def test_output_continued_from_elsewhere_stays_output(bench: Any) -> None:
    b = bench()
    begun = generate(prompt(12), sampling(max_tokens=5), 64)[0]
    b.add(0, prompt(12), 9, output=begun)
    b.run()
    assert begun + b.output[0] == generate(prompt(12), sampling(max_tokens=9), 64)[0]
    b.add(1, prompt(12), 9, output=begun)  # all of it but the last token may come from the cache now
    b.run()
    assert b.output[1] == b.output[0]
    assert b.started[1] == 16
    assert b.executor.resumed == 2
    b.check_clean()


def test_preemption_under_a_small_pool(bench: Any) -> None:
    b = bench(num_blocks=8)
    for handle in range(4):
        b.add(handle, prompt(10, handle), 20)
    b.run()
    for handle in range(4):
        assert b.output[handle] == generate(prompt(10, handle), sampling(max_tokens=20), 64)[0]
    assert b.executor.resumed > 0
    assert b.counters.snapshot()["scheduler_preemptions"] > 0
    b.check_clean()


def test_the_last_to_come_is_preempted_and_priority_goes_first(bench: Any) -> None:
    b = bench(num_blocks=8)
    b.add(0, prompt(20, 0), 20, priority=1)
    b.add(1, prompt(20, 1), 20, priority=0)
    b.add(2, prompt(20, 2), 20, priority=0)
    ends: list[int] = []
    for _ in range(200):
        if not b.turn():
            break
        ends += [handle for handle in b.ended if handle not in ends]
    assert ends == [1, 2, 0]
    b.check_clean()


def test_a_request_that_makes_room_for_others_does_not_stop_them(bench: Any) -> None:
    """The first in the batch is the one to be preempted, and is so before anything else was scheduled."""
    b = bench(num_blocks=5, policy="priority")
    b.add(0, prompt(5, 0), 8, priority=1)
    b.turn()
    b.add(1, prompt(20, 1), 4, priority=0)
    b.run()
    assert [b.ended[handle].reason for handle in (0, 1)] == ["length", "length"]
    assert b.counters.snapshot()["scheduler_preemptions"] >= 1
    b.check_clean()


def test_stop_tokens_and_eos(bench: Any) -> None:
    b = bench()
    free = generate(prompt(9), sampling(max_tokens=30), 64)[0]
    stop = free[4]
    b.add(0, prompt(9), 30, stop_token_ids=[stop])
    b.add(1, prompt(9), 30, eos_token_id=stop)
    b.add(2, prompt(9), 30, eos_token_id=free[0])
    b.run()
    cut = free[: free.index(stop) + 1]
    assert b.output == {0: cut, 1: cut, 2: free[:1]}
    assert [(b.ended[i].reason, b.ended[i].stop_reason) for i in range(3)] == [
        ("stop", stop),
        ("stop", None),
        ("stop", None),
    ]
    b.check_clean()


def test_a_step_sent_too_many_is_dropped_and_counted(make_scheduler: MakeScheduler) -> None:
    b = Bench(make_scheduler, async_depth=2)
    first = next_token(prompt(9))
    b.add(0, prompt(9), 30, stop_token_ids=[first])
    assert b.send()
    assert b.send()  # the next step is out before the stop token is seen
    b.receive()
    assert b.ended[0].reason == "stop"
    assert b.scheduler.load().used_blocks == 0
    assert b.scheduler.has_finished()  # its row is still named by a step in flight
    b.add(1, prompt(7, 1), 2)
    b.run()
    assert b.output == {0: [first], 1: generate(prompt(7, 1), sampling(max_tokens=2), 64)[0]}
    assert b.counters.snapshot()["scheduler_dropped_tokens"] == 1
    b.check_clean()


def test_max_model_len_ends_a_request(bench: Any) -> None:
    b = bench()
    b.add(0, prompt(60), 50)
    b.run()
    assert (b.output[0], b.ended[0].reason) == generate(prompt(60), sampling(max_tokens=50), 64)
    assert len(b.output[0]) == 4


def test_a_pool_smaller_than_the_context_limits_requests(bench: Any) -> None:
    b = bench(num_blocks=5)
    b.add(0, prompt(20), 50)
    b.run()
    assert (len(b.output[0]), b.ended[0].reason) == (12, "length")
    with pytest.raises(Refused, match="4 KV blocks of 8 tokens hold 32"):
        b.add(1, prompt(32), 1)
    b.check_clean()


def test_a_pool_of_one_block_serves_nothing(make_scheduler: MakeScheduler) -> None:
    b = Bench(make_scheduler, num_blocks=1)
    with pytest.raises(Refused, match="0 KV blocks of 8 tokens hold 0"):
        b.add(0, prompt(1), 1)
    assert not b.turn()
    assert b.scheduler.load().num_blocks == 0


@pytest.mark.parametrize(
    ("length", "options", "sentence"),
    [
        (0, {}, "the prompt is empty"),
        (64, {}, "has 64 tokens; the context holds 64"),
        (70, {}, "has 70 tokens"),
        (5, {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        (5, {"max_tokens": 2, "output": [1, 2]}, "max_tokens is 2; it must be at least 3"),
        (5, {"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3; it must be from 0 to 2"),
        (5, {"top_p": 0.0}, "top_p 0.0 is not allowed"),
        (5, {"stop_token_ids": [VOCAB]}, "stop_token_ids names token 50"),
        (5, {"output": [VOCAB]}, "token ids outside the vocabulary"),
        (5, {"resumable": True, "prompt_logprobs": 1}, "not available in a session"),
        (5, {"prompt_logprobs": 39}, "prompt_logprobs is 39; .* more than 38 for each"),
        (5, {"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        (5, {"resumable": True, "pooling": "last"}, "pooling is not available in a session"),
        (5, {"output": [1], "pooling": "last"}, "max_tokens is 1; it must be at least 2"),
        (5, {"temperature": 0.0, "pooling": "mean"}, "it must be all there is, with a max_tokens of 1"),
        (65, {"pooling": "last"}, "has 65 tokens; the context holds 64"),
    ],
)
def test_what_can_never_be_served_is_refused(
    make_scheduler: MakeScheduler, length: int, options: Any, sentence: str
) -> None:
    b = Bench(make_scheduler, max_message_bytes=9999)
    with pytest.raises(Refused, match=sentence):
        b.add(0, prompt(length), **options)
    assert not b.scheduler.has(0, 0)
    assert not b.turn()
    b.check_clean()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_abort_in_every_state(bench: Any, turns: int) -> None:
    """Waiting, partly prefilled, decoding, with steps in flight, and preempted."""
    b = bench(num_blocks=8)
    for handle in range(5):
        b.add(handle, prompt(18, handle), 12)
    for _ in range(turns):
        b.turn()
    while len(b.executor.results) < b.config.async_depth and b.send():
        pass
    for handle in (1, 4):
        if b.scheduler.has(0, handle):
            ended = b.scheduler.finish(0, pack_ints([handle, handle, 77]), "abort")
            assert [item.request_id for item in ended] == [f"r{handle}"]
            b.note([item.ended for item in ended])
            assert not b.scheduler.has(0, handle)
    b.run()
    for handle in range(5):
        expected, reason = generate(prompt(18, handle), sampling(max_tokens=12), 64)
        got = b.output.get(handle, [])
        if b.ended[handle].reason == "abort":
            assert got == expected[: len(got)]
        else:
            assert (got, b.ended[handle].reason) == (expected, reason)
    b.check_clean()


def test_finish_by_ids_and_all(bench: Any) -> None:
    b = bench()
    for handle in range(6):
        b.scheduler.add(handle % 2, request(handle, prompt(5), 9), 0.0)
    assert b.send()
    ended = b.scheduler.finish_ids(["r3", "nobody"], "abort")
    assert [(item.frontend, item.request_id, item.ended.reason) for item in ended] == [(1, "r3", "abort")]
    assert [item.request_id for item in b.scheduler.finish(0, None, "abort")] == ["r0", "r2", "r4"]
    assert [item.request_id for item in b.scheduler.finish_ids(None, "error", "unavailable", "gone")] == ["r1", "r5"]
    while b.executor.results:
        assert b.scheduler.update(b.executor.take()) == []
    b.turn()
    b.check_clean()


def test_nan_ends_that_request_only(bench: Any) -> None:
    b = bench()
    b.add(0, prompt(5, 0), 6)
    b.add(1, prompt(5, 1), 6)
    assert b.send()
    b.executor.nan_rows.add(1)
    b.receive()
    b.run()
    assert (b.ended[1].reason, b.ended[1].message) == ("error", "the model produced NaN logits")
    assert b.output[0] == generate(prompt(5, 0), sampling(max_tokens=6), 64)[0]
    assert b.counters.snapshot()["scheduler_nan_requests"] == 1
    b.check_clean()


@pytest.mark.parametrize(("aborted", "left"), [(0, 1), (1, 0)])
def test_logprobs_go_to_the_request_that_has_the_row(bench: Any, aborted: int, left: int) -> None:
    b = bench()
    b.add(0, prompt(10, 0), 9)
    b.add(1, prompt(20, 1), 9, prompt_logprobs=0)  # its prompt is not complete in the first step
    b.add(2, prompt(10, 2), 9)
    assert b.send()
    b.scheduler.finish(0, pack_ints([aborted]), "abort")

    def of(row: int) -> Logprobs:
        values = memoryview(struct.pack("<f", -0.5))
        found = Logprobs(owner=row, positions=1, token_ids=pack_ints([row]), values=values, ranks=pack_ints([1]))
        return msgspec.structs.replace(found, prompt_position=int(row == 1))

    result = b.executor.take()
    assert unpack_ints(result.tokens).tolist()[1] == -1
    result = msgspec.structs.replace(result, logprobs=[of(0), of(1), of(3)])
    ((_, outputs),) = b.scheduler.update(result)
    assert [(item.owner, unpack_ints(item.token_ids).tolist()) for item in outputs.logprobs] == [(left, [left])]


def told_of(found: list[Logprobs]) -> tuple[list[int], list[int]]:
    """The positions and tokens of a prompt that a frontend was told of, in order."""
    positions = [item.prompt_position + place for item in found for place in range(item.positions)]
    tokens = [token for item in found for token in unpack_ints(item.token_ids).tolist()[::2]]
    for item in found:
        at = [-float(item.prompt_position + place) for place in range(item.positions) for _ in (0, 1)]
        assert unpack_floats(item.values).tolist() == at
    return positions, tokens


def crowded(bench: Any) -> tuple[Any, list[list[int]]]:
    """A pool of few blocks in which the first of the prompts decodes already: a second one is preempted in prefill."""
    b = bench(num_blocks=8, long_prefill_token_threshold=4)
    prompts = [prompt(20, 0), prompt(30, 1), prompt(1, 2)]
    b.add(0, prompts[0], 20)
    while 0 not in b.output:
        b.turn()
    return b, prompts


def test_log_probabilities_of_prompts_are_told_once_though_rows_are_preempted_in_prefill(bench: Any) -> None:
    """And computed: such a request takes nothing from the prefix cache, though others find its blocks there."""
    b, prompts = crowded(bench)
    b.add(1, prompts[1], 4, prompt_logprobs=1)
    b.run()
    assert b.counters.snapshot()["scheduler_preemptions"] > 0
    assert b.executor.prompt_positions > 29  # some were found again
    b.add(2, prompts[2], 3, prompt_logprobs=1)
    b.run()
    assert told_of(b.prompts.pop(1)) == (list(range(1, 30)), prompts[1][1:])
    found = b.executor.prompt_positions
    b.add(3, prompts[1], 4, prompt_logprobs=1)
    b.run()
    assert (b.started[3], b.executor.prompt_positions - found) == (0, 29)
    assert told_of(b.prompts.pop(3)) == (list(range(1, 30)), prompts[1][1:])
    b.add(4, prompts[1], 4)
    b.run()
    assert b.started[4] == 24
    assert not b.prompts
    for handle, (asked, count) in enumerate([(0, 20), (1, 4), (2, 3), (1, 4), (1, 4)]):
        assert b.output[handle] == generate(prompts[asked], sampling(max_tokens=count), 64)[0]
    b.check_clean()


def test_log_probabilities_of_a_prompt_are_not_found_again_once_there_is_output(bench: Any) -> None:
    b = bench(num_blocks=8)
    for handle in range(4):
        b.add(handle, prompt(10, handle), 20, prompt_logprobs=1)
    b.run()
    assert b.executor.resumed > 0
    assert b.executor.prompt_positions == 4 * 9
    begun = b.output[0][:5]
    b.add(4, prompt(10, 0), 20, prompt_logprobs=1, output=begun)
    b.run()
    assert b.executor.prompt_positions == 4 * 9
    assert begun + b.output[4] == b.output[0]


def test_prompts_are_pooled_beside_others_though_rows_are_preempted_in_prefill(bench: Any) -> None:
    """A mean takes nothing from the prefix cache, and what is pooled can be found there."""
    b, prompts = crowded(bench)
    b.add(1, prompts[1], pooling="mean")
    b.run()
    assert b.counters.snapshot()["scheduler_preemptions"] > 0
    for handle, (place, kind) in enumerate([(2, "last"), (2, "mean"), (1, "mean"), (1, "last")], 2):
        b.add(handle, prompts[place], pooling=kind)
        b.run()
        assert b.vectors[handle] == vector_of(prompts[place], kind)
    assert b.vectors[1] == vector_of(prompts[1], "mean")
    assert [b.started[handle] for handle in (4, 5)] == [0, 24]
    assert b.output == {0: generate(prompts[0], sampling(max_tokens=20), 64)[0]}
    assert {b.ended[handle].reason for handle in b.vectors} == {"stop"}
    b.check_clean()


def test_what_is_pooled_may_be_aborted_or_not_a_number(bench: Any) -> None:
    b = bench()
    for handle in range(3):
        b.add(handle, prompt(5, handle), pooling="last")
    b.add(3, prompt(5, 3), 6)
    b.executor.nan_rows = {1}
    assert b.send()
    b.scheduler.finish(0, pack_ints([0]), "abort")
    b.run()
    assert b.vectors == {2: vector_of(prompt(5, 2), "last")}
    assert (b.ended[1].reason, b.ended[1].code) == ("error", "nan")
    assert b.output == {3: generate(prompt(5, 3), sampling(max_tokens=6), 64)[0]}
    b.check_clean()


def test_the_longest_prompt_is_pooled(make_scheduler: MakeScheduler) -> None:
    """vLLM's scheduler needs room for a token that stands for the vector."""
    b = Bench(make_scheduler)
    if isinstance(b.scheduler, NativeScheduler):
        b.add(0, prompt(64), pooling="mean")
        b.run()
        assert b.vectors == {0: vector_of(prompt(64), "mean")}
    else:
        with pytest.raises(Refused, match="has 64 tokens; the context holds 64, one of which must be left"):
            b.add(0, prompt(64), pooling="mean")
    b.check_clean()


@pytest.mark.parametrize(("pooling", "token"), [("last", 3), ("last", -3), ("last", -1), (None, -3)])
def test_a_vector_goes_to_whoever_is_pooled(bench: Any, pooling: str | None, token: int) -> None:
    b = bench()
    b.add(0, prompt(5), pooling=pooling)
    assert b.send()
    given = b.executor.take()
    broken = msgspec.structs.replace(given, tokens=pack_ints([token]), pooled=[])
    with pytest.raises(BrokenResult, match="row 0"):
        b.scheduler.update(broken)
    b.executor.results.appendleft(given)
    b.executor.in_flight_rows.appendleft([0])
    b.executor.in_flight_parts.appendleft(b.executor.merger._last[0])
    b.run()
    assert b.ended[0].reason in ("stop", "length")


@pytest.mark.parametrize("tokens", [[], [3, 3], [-1], [VOCAB], [-3]])
def test_a_result_that_does_not_fit_is_refused(bench: Any, tokens: list[int]) -> None:
    b = bench()
    b.add(0, prompt(5), 6)
    assert b.send()
    with pytest.raises(BrokenResult):
        b.scheduler.update(StepResult(step=0, tokens=pack_ints(tokens)))
    b.run()
    assert b.ended[0].reason == "length"


def test_reset_of_the_prefix_cache_with_requests_running(bench: Any) -> None:
    b = bench()
    for handle in range(4):
        b.add(handle, prompt(10, handle), 12)
    b.turn()
    b.turn()
    assert not b.scheduler.reset_prefix_cache(False)
    b.send()
    assert b.scheduler.reset_prefix_cache(True)
    b.run()
    for handle in range(4):
        assert b.output[handle] == generate(prompt(10, handle), sampling(max_tokens=12), 64)[0]
    assert b.executor.resumed == 4
    b.check_clean()


def test_pause(bench: Any) -> None:
    b = bench()
    b.add(0, prompt(5), 6)
    b.turn()
    b.scheduler.set_pause("paused_all")
    while b.executor.results:
        b.receive()
    assert not b.turn()
    assert b.scheduler.unfinished() == 1
    b.scheduler.set_pause("paused_new")
    b.add(1, prompt(6), 2)
    b.run()
    assert list(b.ended) == [0]
    assert b.scheduler.request_counts() == (0, 1)
    b.scheduler.set_pause("unpaused")
    b.run()
    b.check_clean()


def test_load_figures(make_scheduler: MakeScheduler) -> None:
    b = Bench(make_scheduler, async_depth=1)
    b.add(0, prompt(10), 9)
    b.add(1, prompt(30, 1), 4)
    load = b.scheduler.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens, load.min_remaining_output) == (0, 2, 40, None)
    assert (load.used_blocks, load.num_blocks) == (0, 63)
    b.turn()  # 10 tokens of the one, 6 of the other
    load = b.scheduler.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens, load.min_remaining_output) == (2, 0, 24, 4)
    assert load.used_blocks == 2 + 1
    assert b.scheduler.token_count() == 41
    b.turn()
    b.turn()
    assert b.scheduler.load().pending_prefill_tokens == 0
    assert b.scheduler.load().min_remaining_output == 3
    b.run()
    b.check_clean()


def test_stats_count_since_the_last_time(make_scheduler: MakeScheduler) -> None:
    b = Bench(make_scheduler)
    b.add(0, prompt(33), 4)
    b.run()
    b.add(1, prompt(33), 4)
    b.run()
    stats = b.scheduler.stats()
    assert stats["prefix_cache_stats"] | {"hits": 32, "queries": 66, "requests": 2} == stats["prefix_cache_stats"]
    assert stats["kv_cache_usage"] == 0
    assert b.scheduler.stats()["prefix_cache_stats"]["queries"] == 0
    assert Bench(make_scheduler, log_stats=False).scheduler.stats() is None


def test_without_prefix_caching(bench: Any) -> None:
    b = bench(enable_prefix_caching=False)
    for handle in range(3):
        b.add(handle, prompt(33), 4)
        b.run()
    assert b.executor.cached == 0
    assert b.scheduler.take_kv_changes() == (b"", b"", False)
    b.check_clean()


@pytest.mark.parametrize("async_depth", [1, 2])
def test_sessions_are_vllms(make_vllm: MakeScheduler, async_depth: int) -> None:
    """Append while running and while waiting for input, then close."""
    b = Bench(make_vllm, async_depth=async_depth)
    b.add(0, prompt(6), 3, resumable=True)
    assert b.turn()
    assert b.scheduler.append(0, AppendInput(handle=0, sequence=2, prompt_token_ids=pack_ints([1, 2, 3])), 0.0) == []
    b.run()
    kept = prompt(6)
    kept += [*generate(kept, sampling(max_tokens=3), 64)[0][:-1], 1, 2, 3]
    second = generate(kept, sampling(max_tokens=3), 64)[0]
    assert b.output[0] == generate(prompt(6), sampling(max_tokens=3), 64)[0] + second
    assert b.scheduler.unfinished() == 0  # it waits for input
    assert b.scheduler.request_counts() == (0, 1)
    assert not b.ended
    kept += [*second[:-1], 4]
    assert b.scheduler.append(0, AppendInput(handle=0, sequence=3, prompt_token_ids=pack_ints([4])), 0.0) == []
    b.run()
    assert b.output[0][6:] == generate(kept, sampling(max_tokens=3), 64)[0]
    ended = b.scheduler.append(0, AppendInput(handle=0, sequence=4, close=True), 0.0)
    assert [(item.request_id, item.ended.reason) for item in ended] == [("r0", "closed")]
    with pytest.raises(Refused, match="not known"):
        b.scheduler.append(0, AppendInput(handle=0, sequence=5, prompt_token_ids=pack_ints([4])), 0.0)
    b.turn()
    b.check_clean()


def test_appends_that_cannot_be_taken(make_vllm: MakeScheduler) -> None:
    b = Bench(make_vllm)
    b.add(0, prompt(6), 3, resumable=True)
    b.add(1, prompt(6), 3)
    for handle, tokens, sentence in ((0, [], "empty"), (0, [1] * 58, "64"), (1, [1], "no session"), (7, [1], "known")):
        with pytest.raises(Refused, match=sentence):
            b.scheduler.append(0, AppendInput(handle=handle, sequence=9, prompt_token_ids=pack_ints(tokens)), 0.0)
