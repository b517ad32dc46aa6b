"""What prompt lookup finds, and what becomes of it in a rank."""

from typing import Any

import numpy as np
import pytest

from bus.config import Config, ConfigError, load
from bus.counters import Counters
from bus.messages import KvPool, Logprobs, StepResult
from bus.wire import pack_floats, pack_ints, unpack_floats, unpack_ints
from ranks.drafts import PromptLookup
from ranks.native import NativeScheduler
from ranks.scheduler import BrokenResult
from tests.ranks.toy import VOCAB, request


def lookup(**settings: Any) -> PromptLookup:
    return PromptLookup(Config(num_speculative_tokens=5, **settings))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4]),  # no more than agree
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], [5, 6]),  # the last place
        ([9, 1, 2, 3, 4, 0, 8, 1, 2, 5, 6, 0, 9, 1, 2], [3, 4, 0]),  # more agree further back
        ([7, 7, 7], [7, 7]),
        ([1, 2, 1, 2, 1], [2, 1, 2]),  # the drafts go on as they began
        ([*range(1, 8), 0, *range(1, 8), 9, *range(1, 8)], [9, 1, 2, 3, 4]),  # all that are looked at agree
        ([1, 2, 3, 4, 2], []),  # one token is not enough
        ([1, 2, 3, 4, 5], []),
        ([1], []),
    ],
)
def test_what_followed_is_found(tokens: list[int], found: list[int]) -> None:
    assert lookup().drafts(0, np.array(tokens, np.int32), 99) == found
    assert lookup().drafts(0, np.array(tokens, np.int32), 2) == found[:2]
    assert lookup().drafts(0, np.array(tokens, np.int32), 0) == []


def test_how_many_must_agree() -> None:
    tokens = np.array([9, 1, 2, 3, 4, 0, 1, 2, 5, 6, 9, 1, 2], np.int32)
    assert lookup(prompt_lookup_min=3, prompt_lookup_max=3).drafts(0, tokens, 2) == [3, 4]
    assert lookup(prompt_lookup_min=1, prompt_lookup_max=2).drafts(0, tokens, 2) == [5, 6]
    assert lookup(prompt_lookup_min=4).drafts(0, tokens, 2) == []


def test_wrong_drafts_make_the_next_ones_fewer() -> None:
    subject, tokens = lookup(), np.full(9, 7, np.int32)
    sizes = []
    for right in (5, 2, 1, 0, 1, 5):
        subject.judged(3, right)
        sizes.append(len(subject.drafts(3, tokens, 99)))
    assert sizes == [5, 5, 3, 1, 3, 5]
    subject.judged(3, 0)
    subject.begin(3)
    assert len(subject.drafts(3, tokens, 99)) == 5


def test_rows_rest_where_nothing_is_right() -> None:
    subject, tokens = lookup(), np.full(9, 7, np.int32)

    def tries(right: int, count: int) -> list[int]:
        """Steps from one try to the next, with so many right in each."""
        waits = []
        for _ in range(count):
            waits.append(1)
            while not subject.drafts(1, tokens, 99):
                waits[-1] += 1
            subject.judged(1, right)
        return waits

    assert tries(0, 9) == [1, 1, 2, 4, 8, 16, 32, 64, 64]
    assert tries(1, 3) == [64, 1, 1]
    assert tries(0, 3) == [1, 1, 2]
    subject.begin(1)
    assert tries(0, 3) == [1, 1, 2]
    assert subject.drafts(2, tokens, 99) == [7] * 5


def tried(**options: Any) -> NativeScheduler:
    """A rank of one request in row 0, whose step in flight tries 8, 7, 8 after 7, 8, 7, 8, 7."""
    config = Config(max_num_seqs=2, max_num_batched_tokens=40, speculation="ngram", num_speculative_tokens=3)
    pool = KvPool(num_blocks=9, block_size=8, max_model_len=64, vocab_size=VOCAB)
    scheduler = NativeScheduler(config, pool, Counters())
    scheduler.add(0, request(5, [7, 8, 7, 8], 20, **options), 0.0)
    assert scheduler.schedule(0, 0.0) is not None
    scheduler.update(StepResult(step=0, tokens=pack_ints([7])))
    schedule = scheduler.schedule(1, 0.0)
    assert schedule is not None
    assert unpack_ints(schedule.num_tokens).tolist() == [4]
    assert unpack_ints(schedule.drafts).tolist() == [8, 7, 8]
    assert scheduler.schedule(2, 0.0) is None, "a row with drafts has one step in flight"
    return scheduler


@pytest.mark.parametrize(
    ("tokens", "counts", "sentence"),
    [
        ([7, 7], [], "2 tokens for 1 rows"),
        ([7, 7], [1, 1], "counts for 2 rows; 1 ran"),
        ([7] * 5, [5], "row 0 has 5 tokens; it may have from 1 to 4"),
        ([], [0], "row 0 has 0 tokens"),
        ([7, 7], [3], "2 tokens; the counts of the rows make 3"),
        ([7, VOCAB], [2], f"row 0, which samples, has token {VOCAB}"),
        ([7, -2], [2], "several tokens of which one is none"),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(tokens: list[int], counts: list[int], sentence: str) -> None:
    scheduler = tried()
    with pytest.raises(BrokenResult, match=sentence):
        scheduler.update(StepResult(step=1, tokens=pack_ints(tokens), counts=pack_ints(counts)))
    ((_, told),) = scheduler.update(StepResult(step=1, tokens=pack_ints([8, 7, 3]), counts=pack_ints([3])))
    assert unpack_ints(told.tokens).tolist() == [8, 7, 3]
    assert unpack_ints(told.counts).tolist() == [3]


def test_what_comes_after_the_end_is_dropped_with_its_log_probabilities() -> None:
    scheduler = tried(stop_token_ids=[8], logprobs=1)
    logprobs = Logprobs(
        owner=0,
        positions=4,
        token_ids=pack_ints([8, 1, 7, 2, 8, 3, 9, 4]),
        values=pack_floats([-0.5 * place for place in range(8)]),
        ranks=pack_ints([1, 2, 3, 4]),
    )
    result = StepResult(step=1, tokens=pack_ints([8, 7, 8, 9]), counts=pack_ints([4]), logprobs=[logprobs])
    ((_, told),) = scheduler.update(result)
    assert unpack_ints(told.tokens).tolist() == [8]
    assert [(end.reason, end.stop_reason) for end in told.ended] == [("stop", 8)]
    (own,) = told.logprobs
    assert (own.owner, own.positions) == (5, 1)
    assert unpack_ints(own.token_ids).tolist() == [8, 1]
    assert unpack_floats(own.values).tolist() == [0.0, -0.5]
    assert unpack_ints(own.ranks).tolist() == [1]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min: 8 is not allowed; it must be at most prompt_lookup_max"):
        load({"prompt_lookup_min": "8"}, {})
    with pytest.raises(ConfigError, match="speculation: 'ngram' is not allowed with scheduler vllm"):
        load({"speculation": "ngram", "scheduler": "vllm"}, {})
    with pytest.raises(ConfigError, match="draft_model: '' is not allowed with speculation model; it must be a folder"):
        load({"speculation": "model"}, {})
    with pytest.raises(ConfigError, match="draft_model: 'small' is not allowed with speculation ngram; it must be emp"):
        load({"speculation": "ngram", "draft_model": "small"}, {})
