"""From what a client writes (`GenerateParams`) to what ranks and executor need (`Sampling`), with every check."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bus.messages import GenerateParams, Sampling

MAX_CHILDREN = 64
MAX_SEED = 2**63 - 1


class BadRequest(Exception):
    """A request that cannot be served; the text is the sentence for the client."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows. Lengths in tokens; `eos_token_ids` ends a text, the first one without a reason."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def check_prompt(tokens: Sequence[int] | npt.NDArray[np.int32], limits: ModelLimits) -> npt.NDArray[np.int32]:
    """The prompt as int32 [n], unless it is empty, too long, or has tokens the model does not know.

    Raises:
        BadRequest: with the sentence.
    """
    if len(tokens) == 0:
        raise BadRequest("the prompt is empty; at least one token is needed")
    if len(tokens) >= limits.max_model_len:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens; with max_model_len {limits.max_model_len} it may have "
            f"{limits.max_model_len - 1}"
        )
    lowest, highest = (min(tokens), max(tokens)) if isinstance(tokens, list) else (np.min(tokens), np.max(tokens))
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadRequest(f"token id {wrong} is not in the vocabulary; ids go from 0 to {limits.vocab_size - 1}")
    return np.asarray(tokens, dtype=np.int32)


def sampling_for(params: GenerateParams, prompt_tokens: int, limits: ModelLimits, seed: int) -> Sampling:
    """The complete sampling parameters of one sequence that draws with `seed`.

    Raises:
        BadRequest: a value is not allowed; the sentence names it and what is.
    """
    _check(params, limits)
    room = limits.max_model_len - prompt_tokens
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise BadRequest(
            f"max_tokens {max_tokens} and a prompt of {prompt_tokens} tokens exceed max_model_len "
            f"{limits.max_model_len}; at most {room} are possible"
        )
    if params.min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {params.min_tokens} is more than max_tokens {max_tokens}")
    eos = () if params.ignore_eos else limits.eos_token_ids
    greedy = params.temperature == 0.0
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=0 if greedy else params.top_k,
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=eos[0] if eos else None,
        stop_token_ids=[*params.stop_token_ids, *eos[1:]],
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        logprobs=params.logprobs,
    )


def _check(params: GenerateParams, limits: ModelLimits) -> None:
    for name, low, high in (
        ("n", 1, MAX_CHILDREN),
        ("temperature", 0, math.inf),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("top_k", 0, limits.vocab_size),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0, math.inf),
        ("min_tokens", 0, limits.max_model_len),
        ("max_tokens", 1, limits.max_model_len),
        ("logprobs", -1, limits.vocab_size),
        ("seed", 0, MAX_SEED),
    ):
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            bounds = f"from {low} to {high}" if high != math.inf else f"{low} or more"
            raise BadRequest(f"{name} {value} is not allowed; it must be {bounds}")
    for name, allowed in (("top_p", params.top_p > 0), ("repetition_penalty", params.repetition_penalty > 0)):
        if not allowed:
            raise BadRequest(f"{name} must be more than 0")
    if not math.isfinite(params.temperature) or not math.isfinite(params.repetition_penalty):
        raise BadRequest("temperature and repetition_penalty must be finite numbers")
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or []),
        ("logit_bias", list(params.logit_bias or {})),
    ):
        wrong = [token for token in tokens if not 0 <= token < limits.vocab_size]
        if wrong:
            raise BadRequest(f"{name}: token id {wrong[0]} is not in the vocabulary (0 to {limits.vocab_size - 1})")
    if params.allowed_token_ids == []:
        raise BadRequest("allowed_token_ids is empty; leave it out, or name at least one token")
    if any(not math.isfinite(bias) for bias in (params.logit_bias or {}).values()):
        raise BadRequest("logit_bias values must be finite numbers")
    for name, given in (("stop", params.stop), ("bad_words", params.bad_words)):
        if given:
            raise BadRequest(f"{name} needs text: leave text_output on")
    if params.include_stop_str_in_output:
        raise BadRequest("include_stop_str_in_output needs text: leave text_output on")
    if params.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not supported; logprobs of sampled tokens are")
    if params.grammar is not None:
        raise BadRequest("structured output is not supported yet")
