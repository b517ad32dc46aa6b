"""Which sampling parameters are refused, and what is said then."""

import math
from typing import Any

import pytest

from bus.messages import Sampling
from bus.sampling import fault_of


@pytest.mark.parametrize(
    "allowed",
    [
        {},
        {"seed": 2**64 - 1, "temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "logprobs": -1, "eos_token_id": 99},
        {"logit_bias": {0: -100.0, 99: 100.0}, "allowed_token_ids": [0], "bad_words_token_ids": [[1, 2]]},
    ],
)
def test_nothing_is_wrong_with_what_can_be_sampled(allowed: dict[str, Any]) -> None:
    assert fault_of(Sampling(**{"seed": 1, "max_tokens": 1} | allowed), vocab_size=100) == ""


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seed": 2**64}, "seed 18446744073709551616 is not allowed; it must be a whole number of 64 bits"),
        ({"max_tokens": 0}, "max_tokens 0 is not allowed; it must be at least 1"),
        ({"min_tokens": -1}, "min_tokens -1 is"),
        ({"temperature": -0.1}, "temperature -0.1 is not allowed; it must be a number of at least 0"),
        ({"temperature": math.nan}, "temperature nan is"),
        ({"temperature": math.inf}, "temperature inf is"),
        ({"top_k": -1}, "top_k -1 is"),
        ({"top_p": 0.0}, "top_p 0.0 is not allowed; it must be more than 0 and at most 1"),
        ({"min_p": 1.5}, "min_p 1.5 is"),
        ({"presence_penalty": math.nan}, "presence_penalty nan is"),
        ({"frequency_penalty": math.inf}, "frequency_penalty inf is"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is"),
        ({"logit_bias": {1: math.nan}}, "logit_bias {1: nan} is"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1; tokens are 0 to 99"),
        ({"allowed_token_ids": []}, "allowed_token_ids [] is not allowed; it must be left out or not empty"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids names token 100; tokens are 0 to 99"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words_token_ids [[1], []] is"),
        ({"bad_words_token_ids": [[1] * 1025]}, "it must be words of 1 to 1024 tokens"),
        ({"bad_words_token_ids": [[1, 2**40]]}, "bad_words_token_ids names token 1099511627776"),
        ({"stop_token_ids": [100]}, "stop_token_ids names token 100"),
        ({"eos_token_id": 100}, "eos_token_id names token 100"),
        ({"logprobs": 101}, "logprobs 101 is"),
        ({"prompt_logprobs": -2}, "prompt_logprobs -2 is"),
    ],
)
def test_what_cannot_be_sampled_is_named(wrong: dict[str, Any], sentence: str) -> None:
    assert sentence in fault_of(Sampling(**{"seed": 1, "max_tokens": 1} | wrong), vocab_size=100)
