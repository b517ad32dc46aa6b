"""What prompt lookup finds."""

from typing import Any

import numpy as np
import pytest

from bus.config import Config, ConfigError, load
from ranks.drafts import PromptLookup


def lookup(**settings: Any) -> PromptLookup:
    return PromptLookup(Config(num_speculative_tokens=5, **settings))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4, 5, 6, 7]),
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], [5, 6, 1, 2, 5]),  # the last place; and the drafts go on as they began
        ([9, 1, 2, 3, 4, 0, 8, 1, 2, 5, 6, 0, 9, 1, 2], [3, 4, 0, 8, 1]),  # more agree further back
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2]),
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


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min: 5 is not allowed; it must be at most prompt_lookup_max"):
        load({"prompt_lookup_min": "5"}, {})
    with pytest.raises(ConfigError, match="speculation: 'ngram' is not allowed with scheduler vllm"):
        load({"speculation": "ngram", "scheduler": "vllm"}, {})
