"""Which sampling parameters a sequence can be sampled with: one answer for whoever takes them from someone else."""

import math

from bus.messages import Pooling, Sampling

BAD_WORD_MAX = 1024
"""Tokens of the longest bad word: what one call of the program that bans them takes."""


def pooled(pooling: Pooling) -> Sampling:
    """The parameters of a request whose prompt is pooled."""
    return Sampling(seed=0, max_tokens=1, pooling=pooling)


def fault_of(sampling: Sampling, vocab_size: int) -> str:
    """What is wrong with `sampling` for a model of `vocab_size` tokens, in a sentence; empty if nothing is."""
    holds = {
        "seed": -(2**63) <= sampling.seed < 2**64,
        "max_tokens": sampling.max_tokens >= 1,
        "min_tokens": sampling.min_tokens >= 0,
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_k": 0 <= sampling.top_k < 2**31,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "logit_bias": all(map(math.isfinite, (sampling.logit_bias or {}).values())),
        "allowed_token_ids": sampling.allowed_token_ids is None or len(sampling.allowed_token_ids) > 0,
        "bad_words_token_ids": all(1 <= len(word) <= BAD_WORD_MAX for word in sampling.bad_words_token_ids or []),
        "logprobs": sampling.logprobs is None or -1 <= sampling.logprobs <= vocab_size,
        "prompt_logprobs": sampling.prompt_logprobs is None or -1 <= sampling.prompt_logprobs <= vocab_size,
        "pooling": sampling.pooling is None or sampling == pooled(sampling.pooling),
    }
    for name, holds_here in holds.items():
        if not holds_here:
            return f"{name} {getattr(sampling, name)!r} is not allowed; it must be {_ALLOWED[name]}"
    named = {
        "eos_token_id": [] if sampling.eos_token_id is None else [sampling.eos_token_id],
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": list(sampling.logit_bias or ()),
        "allowed_token_ids": sampling.allowed_token_ids or [],
        "bad_words_token_ids": [token for word in sampling.bad_words_token_ids or [] for token in word],
    }
    for name, tokens in named.items():
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
