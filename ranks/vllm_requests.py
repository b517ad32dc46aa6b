"""From the bus's requests to vLLM's: sampling parameters, block names, and what can never be served."""

from collections.abc import Callable

import msgspec
import numpy as np
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from bus.messages import AddRequest, AppendInput, Grammar, Sampling
from bus.prefix import chain_hash, root_hash, split_hashes
from bus.wire import unpack_ints
from ranks.pooling import takes_all

_SAMPLING = "rankbus"

BlockHasher = Callable[[Request], list[bytes]]


def new_request(
    number: int, frontend: int, request: AddRequest, block_size: int, enable_prefix_caching: bool
) -> Request:
    """vLLM's request for the rank's `number`th. Tokens that were output before stay output.

    Among equal priorities, who came to this rank first is served first and preempted last: the number stands for
    the time of arrival, because frontends' clocks differ and vLLM would preempt the first of several that tie.

    Raises:
        ValueError, VLLMClientError: vLLM refuses the sampling parameters.
    """
    vllm = Request(
        request_id=f"{number:012d}",
        client_index=frontend,
        prompt_token_ids=unpack_ints(request.prompt_token_ids).tolist(),
        sampling_params=_sampling_params(request.sampling),
        pooling_params=None,
        arrival_time=float(number),
        priority=request.priority,
        cache_salt=request.cache_salt or None,
        block_hasher=_block_hasher(request, block_size) if enable_prefix_caching else None,
        resumable=request.resumable,
    )
    vllm.prefill_stats = None  # vLLM's bookkeeping asserts that a new request has no output yet
    if request.output_token_ids.nbytes:
        vllm.append_output_token_ids(unpack_ints(request.output_token_ids).tolist())
    return vllm


def next_turn(session: Request, turn: AppendInput, sampling: Sampling) -> Request:
    """What vLLM takes as a session's next input: a request with the same id."""
    return Request(
        request_id=session.request_id,
        client_index=session.client_index,
        prompt_token_ids=unpack_ints(turn.prompt_token_ids).tolist(),
        sampling_params=_sampling_params(sampling),
        pooling_params=None,
        arrival_time=session.arrival_time,
        priority=session.priority,
        resumable=not turn.close,
    )


def sampling_of(request: Request) -> Sampling:
    """The bus's parameters that are in effect: a session's turns replace them."""
    return request.sampling_params.extra_args[_SAMPLING]


def _sampling_params(sampling: Sampling) -> SamplingParams:
    """As much as scheduling depends on; the executor samples."""
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
        skip_reading_prefix_cache=True if takes_all(sampling) else None,
        structured_outputs=structured_outputs(sampling.grammar) if sampling.grammar else None,
        extra_args={_SAMPLING: sampling},
        detokenize=False,
    )
    params.update_from_generation_config({}, sampling.eos_token_id)
    return params


def structured_outputs(grammar: Grammar) -> StructuredOutputsParams:
    """What vLLM calls a grammar.

    Raises:
        ValueError: it is not of its kind at all.
    """
    if grammar.kind == "json_object":
        params = StructuredOutputsParams(json_object=True)
    elif grammar.kind == "choice":
        params = StructuredOutputsParams(choice=_choices(grammar.spec))
    else:
        params = StructuredOutputsParams(**{grammar.kind: grammar.spec})
    params._backend = "guidance"
    return params


def _choices(spec: str) -> list[str]:
    try:
        return msgspec.json.decode(spec, type=list[str])
    except msgspec.DecodeError:
        raise ValueError("choice must be a JSON list of strings") from None


def _block_hasher(request: AddRequest, block_size: int) -> BlockHasher:
    """Names the full blocks a request has got since the last call. The prompt's come with the request."""
    root = root_hash(request.cache_salt, request.adapter)
    given = split_hashes(request.block_hashes)
    if len(given) != request.prompt_token_ids.nbytes // 4 // block_size:
        given = []

    def names(vllm: Request) -> list[bytes]:
        done = len(vllm.block_hashes)
        full = vllm.num_tokens // block_size
        if full <= done:
            return []
        if done == 0 and len(given) == full and not vllm.output_token_ids:
            return given
        new = np.asarray(vllm._all_token_ids[done * block_size : full * block_size], dtype="<i4").tobytes()
        parent = vllm.block_hashes[-1] if done else root
        step = 4 * block_size
        result = []
        for begin in range(0, len(new), step):
            parent = chain_hash(parent, new[begin : begin + step])
            result.append(parent)
        return result

    return names
