"""What sampling parameters mean, written plainly: the distribution that a token must be drawn from."""

from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bus.messages import Sampling


def sampling_of(**parameters: Any) -> Sampling:
    return Sampling(**{"seed": 0, "max_tokens": 100} | parameters)


def plain_adjust(logits: np.ndarray, tokens: list[int], prompt_len: int, asked: Sampling) -> np.ndarray:
    """The logits [vocabulary] after `tokens`, with what the parameters do to single tokens, one at a time."""
    output = tokens[prompt_len:]
    result = logits.astype(np.float64)
    for token in range(len(result)):
        if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
            result[token] = -np.inf
        for word in asked.bad_words_token_ids or []:
            prefix = word[:-1]
            if word[-1] == token and (not prefix or output[-len(prefix) :] == prefix):
                result[token] = -np.inf
        if len(output) < asked.min_tokens and token in [asked.eos_token_id, *asked.stop_token_ids]:
            result[token] = -np.inf
        result[token] += (asked.logit_bias or {}).get(token, 0.0)
        if token in tokens:
            penalty = asked.repetition_penalty
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        result[token] -= asked.frequency_penalty * output.count(token)
        result[token] -= asked.presence_penalty * (token in output)
    return result


def probabilities(adjusted: np.ndarray, asked: Sampling) -> np.ndarray:
    """Of the tokens, float64 [n, vocabulary], by their adjusted logits: what transformers' warpers leave."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(asked.temperature)])
    if asked.min_p:
        warpers.append(MinPLogitsWarper(asked.min_p))
    if asked.top_k:
        warpers.append(TopKLogitsWarper(asked.top_k))
    if asked.top_p < 1:
        warpers.append(TopPLogitsWarper(asked.top_p))
    ids = torch.empty((len(adjusted), 0), dtype=torch.long)
    return np.asarray(torch.softmax(warpers(ids, torch.tensor(adjusted)), -1).numpy())


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How far `counts` are from what `probabilities` let expect, in units of what chance allows for.

    Chi-square as a normal variable (Wilson and Hilferty), so about 1 in 10,000 times it is over 3.7 by chance. Tokens
    that are expected fewer than 5 times count as one; what must not come at all makes it infinite.
    """
    if counts[probabilities == 0].any():
        return np.inf
    expected = probabilities / probabilities.sum() * counts.sum()
    often = expected >= 5
    found, wanted = ([*of[often], of[~often].sum()] for of in (counts, expected))
    pairs = [(count, want) for count, want in zip(found, wanted, strict=True) if want > 0]
    freedom = len(pairs) - 1
    total = sum((count - want) ** 2 / want for count, want in pairs)
    return float(((total / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / np.sqrt(2 / (9 * freedom)))


CHANCE = 3.7
"""See `chi_square`."""

SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all three": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.4},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.2},
    "negative": {"temperature": 0.9, "presence_penalty": -0.8, "frequency_penalty": -0.1, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {3: 2.0, 7: -100.0, 11: 1.0}},
    "allowed": {"allowed_token_ids": list(range(4, 20))},
    "banned": {"bad_words_token_ids": [[5], [9, 6], [6, 9, 13]], "min_tokens": 1000, "stop_token_ids": [8]},
    "chat": {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "all": {
        "temperature": 0.8,
        "top_k": 15,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.5, 12: -2.0},
        "bad_words_token_ids": [[4], [3, 3]],
    },
}
"""Every parameter that changes the distribution, and some that are often used together; tokens are below 32."""
