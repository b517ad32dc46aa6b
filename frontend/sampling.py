"""Sampling parameters: from what clients write to vLLM's, and from vLLM's to what ranks and executor need."""

import secrets
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from bus.messages import GenerateParams, Pooling, PoolingKind, Sampling
from bus.sampling import pooled
from frontend.errors import RequestError, unsupported
from frontend.structured import from_grammar, to_grammar

SEED_MASK = 2**63 - 1
"""Seeds are non-negative and fit a signed 64-bit integer; a client's seed is taken modulo 2**63."""


def draw_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(63)


def to_sampling(
    request: EngineCoreRequest, max_model_len: int, pooling: PoolingKind, draw_seed: Callable[[], int] = draw_seed
) -> Sampling:
    """The complete parameters of one sequence. `request` is not changed: vLLM's children of `n` share its parameters.

    `pooling` is what is done where an embedding is asked for.

    A seeded child arrives with the parent's seed plus its index, so it keeps that; each unseeded one draws its own.

    Raises:
        RequestError: a feature that this engine does not have.
    """
    _refuse_unsupported(request)
    if request.pooling_params is not None:
        return pooled(Pooling(kind=pooling, normalize=request.pooling_params.use_activation is not False))
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    assert request.prompt_token_ids is not None
    greedy = params.temperature == 0.0
    return Sampling(
        seed=draw_seed() if params.seed is None else params.seed & SEED_MASK,
        max_tokens=min(params.max_tokens, max_model_len - len(request.prompt_token_ids)),
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=0 if greedy or params.top_k < 0 else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=params.eos_token_id,
        stop_token_ids=list(params.stop_token_ids or ()),
        logit_bias=params.logit_bias or None,
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=params.bad_words_token_ids or None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=None if params.structured_outputs is None else to_grammar(params.structured_outputs),
    )


def from_generate(params: GenerateParams, *, detokenize: bool) -> SamplingParams:
    """vLLM's parameters for a client's text request, streaming deltas.

    Raises:
        VLLMValidationError: a value that vLLM does not allow.
        RequestError: a seed that is not allowed, or a feature that this engine does not have.
    """
    if params.seed is not None and not 0 <= params.seed <= SEED_MASK:
        raise RequestError("invalid", f"seed {params.seed} is not allowed; it must be from 0 to {SEED_MASK}")
    return SamplingParams(
        n=params.n,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=list(params.bad_words),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured_outputs=None if params.grammar is None else from_grammar(params.grammar),
        detokenize=detokenize,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _refuse_unsupported(request: EngineCoreRequest) -> None:
    """Raise for the first thing the request asks for that would otherwise be ignored."""
    params = request.sampling_params
    pooling = request.pooling_params
    asked: dict[str, Any] = {
        "multimodal input": request.mm_features,
        "a prompt of embeddings": request.prompt_embeds,
        "streaming input": request.resumable,
        "`kv_hints`": request.kv_hints,
        "`dimensions`": pooling is not None and pooling.dimensions,
    }
    if params is not None:
        asked |= {
            "`prompt_logprob_token_ids`": params.prompt_logprob_token_ids is not None,
            "`logprob_token_ids`": params.logprob_token_ids,
            "`repetition_detection`": params.repetition_detection,
            "`trace_decode_token_ids`": params.trace_decode_token_ids,
            "`vllm_xargs`, `kv_transfer_params` or `ec_transfer_params`": params.extra_args,
            "`routed_experts_prompt_start`": params.routed_experts_prompt_start,
        }
    for feature, value in asked.items():
        if value:
            raise unsupported(feature)
