"""Which sampling parameters a sequence can be sampled with: one answer for whoever takes them from someone else."""

import math
from itertools import chain

from bus.messages import Pooling, Sampling

BAD_WORD_MAX = 1024
"""Tokens of the longest bad word: what one call of the program that bans them takes."""


def pooled(pooling: Pooling) -> Sampling:
    """The parameters of a request whose prompt is pooled."""
    return Sampling(seed=0, max_tokens=1, pooling=pooling)


def fault_of(sampling: Sampling, vocab_size: int) -> str:
    """What is wrong with `sampling` for a model of `vocab_size` tokens, in a sentence; empty if nothing is."""
    holds = (
        -(2**63) <= sampling.seed < 2**64,
        sampling.max_tokens >= 1,
        sampling.min_tokens >= 0,
        0 <= sampling.temperature < math.inf,
        0 <= sampling.top_k < 2**31,
        0 < sampling.top_p <= 1,
        0 <= sampling.min_p <= 1,
        math.isfinite(sampling.presence_penalty),
        math.isfinite(sampling.frequency_penalty),
        0 < sampling.repetition_penalty < math.inf,
        not sampling.logit_bias or all(map(math.isfinite, sampling.logit_bias.values())),
        sampling.allowed_token_ids is None or len(sampling.allowed_token_ids) > 0,
        not sampling.bad_words_token_ids
        or all(1 <= len(word) <= BAD_WORD_MAX for word in sampling.bad_words_token_ids),
        sampling.logprobs is None or -1 <= sampling.logprobs <= vocab_size,
        sampling.prompt_logprobs is None or -1 <= sampling.prompt_logprobs <= vocab_size,
        sampling.pooling is None or sampling == pooled(sampling.pooling),
    )
    if False in holds:
        name, allowed = list(_ALLOWED.items())[holds.index(False)]
        return f"{name} {getattr(sampling, name)!r} is not allowed; it must be {allowed}"
    for name, tokens in (
        ("eos_token_id", () if sampling.eos_token_id is None else (sampling.eos_token_id,)),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words_token_ids", chain.from_iterable(sampling.bad_words_token_ids or ())),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{name} names token {token}; tokens are 0 to {vocab_size - 1}"
    return ""


_ALLOWED = {
    "seed": "a whole number of 64 bits",
    "max_tokens": "at least 1",
    "min_tokens": "at least 0",
    "temperature": "a number of at least 0",
    "top_k": "0 (off) or a positive number of tokens",
    "top_p": "more than 0 and at most 1",
    "min_p": "from 0 to 1",
    "presence_penalty": "a finite number",
    "frequency_penalty": "a finite number",
    "repetition_penalty": "more than 0",
    "logit_bias": "finite numbers",
    "allowed_token_ids": "left out or not empty",
    "bad_words_token_ids": f"words of 1 to {BAD_WORD_MAX} tokens",
    "logprobs": "a number of tokens, or -1 for the whole vocabulary",
    "prompt_logprobs": "a number of tokens, or -1 for the whole vocabulary",
    "pooling": "all there is, with a max_tokens of 1 and a seed of 0",
}
"""What each value may be, in the order in which they are looked at."""
