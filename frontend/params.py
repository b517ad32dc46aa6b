"""From what a client writes (`GenerateParams`) to what ranks and executor need (`Sampling`), with every check."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from bus.messages import GenerateParams, MultimodalFeature, Sampling
from bus.sampling import fault_of
from bus.wire import all_below

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


def check_prompt(
    tokens: Sequence[int] | npt.NDArray[np.int32], limits: ModelLimits, room: int = 1
) -> npt.NDArray[np.int32]:
    """The prompt as int32 [n], unless it is empty, too long, or has tokens the model does not know.

    It has to leave `room` for so many tokens of output.

    Raises:
        BadRequest: with the sentence.
    """
    if len(tokens) == 0:
        raise BadRequest("the prompt is empty; at least one token is needed")
    if len(tokens) + room > limits.max_model_len:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens; with max_model_len {limits.max_model_len} it may have "
            f"{limits.max_model_len - room}"
        )
    return check_tokens(tokens, limits)


def check_tokens(tokens: Sequence[int] | npt.NDArray[np.int32], limits: ModelLimits) -> npt.NDArray[np.int32]:
    """Any number of tokens as int32 [n], unless there are some the model does not know.

    Raises:
        BadRequest: with the sentence.
    """
    if len(tokens) == 0:
        return np.empty(0, np.int32)
    if isinstance(tokens, np.ndarray) and all_below(tokens, limits.vocab_size):
        return tokens
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadRequest(f"token id {wrong} is not in the vocabulary; ids go from 0 to {limits.vocab_size - 1}")
    return np.asarray(tokens, dtype=np.int32)


def check_features(features: Sequence[MultimodalFeature], tokens: int) -> None:
    """Look at what else than text an input of so many tokens has.

    Raises:
        BadRequest: a feature is not within the input; the text says which.
    """
    for feature in features:
        if feature.offset < 0 or feature.length < 1 or feature.offset + feature.length > tokens:
            raise BadRequest(
                f"the feature {feature.hash!r} with {feature.length} tokens from offset {feature.offset} on is not "
                f"within the {tokens} tokens it comes with"
            )


def sampling_for(params: GenerateParams, prompt_tokens: int, limits: ModelLimits, seed: int) -> Sampling:
    """The complete sampling parameters of one sequence that draws with `seed`.

    Raises:
        BadRequest: a value is not allowed; the sentence names it and what is.
    """
    _check_supported(params)
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
    sampling = Sampling(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=eos[0] if eos else None,
        stop_token_ids=[*params.stop_token_ids, *eos[1:]],
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
    )
    fault = fault_of(sampling, limits.vocab_size)
    if fault:
        raise BadRequest(fault)
    return sampling


class Samplings:
    """Makes sampling parameters for requests that are given as tokens.

    Most ask for the same as the one before, and what was found good is not looked at again.
    """

    def __init__(self) -> None:
        self._asked: GenerateParams | None = None
        self._limits: ModelLimits | None = None
        self._made: Sampling | None = None

    def make(self, params: GenerateParams, prompt_tokens: int, limits: ModelLimits, seed: int) -> Sampling:
        """As `sampling_for`."""
        fits = params.max_tokens is not None and params.max_tokens <= limits.max_model_len - prompt_tokens
        if fits and self._made is not None and limits is self._limits and params == self._asked:
            return structs.replace(self._made, seed=seed)
        made = sampling_for(params, prompt_tokens, limits, seed)
        self._asked, self._limits, self._made = params, limits, made
        return made


def session_sampling(params: GenerateParams, limits: ModelLimits, seed: int) -> Sampling:
    """As `sampling_for`, for a turn of a session: how much room there is shows only when the turn runs, and ends it.

    Raises:
        BadRequest: a value is not allowed; the sentence names it and what is.
    """
    if params.n != 1:
        raise BadRequest(f"n {params.n} is not allowed in a session; it must be 1")
    if params.stop or params.include_stop_str_in_output:
        raise BadRequest("stop strings are not allowed in a session; use stop_token_ids")
    if params.bad_words:
        raise BadRequest("bad_words are not allowed in a session; use logit_bias")
    if params.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs are not available in a session: of most of its context they are not computed")
    if params.max_tokens is not None and params.max_tokens > limits.max_model_len:
        raise BadRequest(f"max_tokens {params.max_tokens} is more than max_model_len {limits.max_model_len}")
    return sampling_for(params, 0, limits, seed)


def _check_supported(params: GenerateParams) -> None:
    """Refuse what `Sampling` could not hold, or what needs text."""
    for name, value, low, high in (
        ("n", params.n, 1, MAX_CHILDREN),
        ("seed", params.seed, 0, MAX_SEED),
        ("presence_penalty", params.presence_penalty, -2, 2),
        ("frequency_penalty", params.frequency_penalty, -2, 2),
    ):
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} {value} is not allowed; it must be from {low} to {high}")
    for name, given in (
        ("stop", params.stop),
        ("bad_words", params.bad_words),
        ("include_stop_str_in_output", params.include_stop_str_in_output),
    ):
        if given:
            raise BadRequest(f"{name} needs text: leave text_output on")
