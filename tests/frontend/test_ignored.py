"""Every parameter of vLLM's API does what it says, is a label, or is refused: none is ignored."""

from typing import Any

import msgspec
import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from frontend.ignored import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    LABELS,
    MESSAGES,
    NEUTRAL,
    NOT_IN_BEAM_SEARCH,
    RESPONSES,
    fault_of,
)

COMMON = {"cache_salt", "model", "stream", "temperature", "top_k", "top_p"}
SAMPLED = {"frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p", "presence_penalty"}
SAMPLED |= {"priority", "repetition_penalty", "request_id", "seed", "skip_special_tokens", "stop", "stop_token_ids"}
SAMPLED |= {"structured_outputs"}
COMPLETED = {"add_special_tokens", "allowed_token_ids", "bad_words", "echo", "length_penalty", "logprobs"}
COMPLETED |= {"max_tokens", "min_tokens", "n", "prompt_logprobs", "response_format", "return_token_ids"}
COMPLETED |= {"return_tokens_as_token_ids", "spaces_between_special_tokens", "stream_interval", "stream_options"}
COMPLETED |= {"truncate_prompt_tokens", "truncation_side", "use_beam_search"}
TOOLS = {"tool_choice", "tools"}
TEMPLATED = {"chat_template_kwargs", *TOOLS}
"""Parameters of chat templates change what the template writes, if it reads them."""
HONOURED = {
    COMPLETIONS: COMMON | SAMPLED | COMPLETED | {"prompt"},
    CHAT: COMMON
    | SAMPLED
    | COMPLETED
    | TEMPLATED
    | {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "include_reasoning"}
    | {"max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort", "return_prompt_text"}
    | {"top_logprobs"},
    RESPONSES: COMMON
    | SAMPLED
    | TEMPLATED
    | {"enable_response_messages", "include_reasoning", "input", "instructions", "max_output_tokens"}
    | {"parallel_tool_calls", "reasoning", "text", "top_logprobs", "truncation"},
    MESSAGES: COMMON | TEMPLATED | {"max_tokens", "messages", "output_config", "stop_sequences", "system", "thinking"},
    COUNT_TOKENS: TEMPLATED | {"messages", "model", "output_config", "system", "thinking"},
}
REFUSED_LATER = {"background", "ec_transfer_params", "kv_transfer_params", "logprob_token_ids", "previous_response_id"}
REFUSED_LATER |= {"prompt", "prompt_embeds", "repetition_detection", "routed_experts_prompt_start"}
REFUSED_LATER |= {"thinking_token_budget", "vllm_xargs"}
"""By vLLM, or when the request is taken."""
TYPES: dict[str, Any] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: AnthropicMessagesRequest,
    COUNT_TOKENS: AnthropicCountTokensRequest,
}


def fault(path: str, **given: Any) -> tuple[str, str] | None:
    return fault_of(path, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in given.items()})


@pytest.mark.parametrize("path", TYPES)
def test_it_is_known_of_every_parameter_what_becomes_of_it(path: str) -> None:
    refused = {name for name in NEUTRAL.get(path, {}) if "." not in name}
    known = HONOURED[path] | refused | LABELS | REFUSED_LATER
    assert set(TYPES[path].model_fields) - known == set(), "parameters that nobody has looked at"
    assert refused <= set(TYPES[path].model_fields)
    assert HONOURED[path] <= set(TYPES[path].model_fields)
    assert HONOURED[path].isdisjoint(refused | LABELS)


@pytest.mark.parametrize(
    ("path", "given", "sentence"),
    [
        (COMPLETIONS, {"suffix": "."}, 'suffix "." is not supported by this engine; it may be "", or left out'),
        (CHAT, {"watermarking": True}, "watermarking true is not supported by this engine; it may be false, or left"),
        (CHAT, {"mm_processor_kwargs": {"a": 1}}, 'mm_processor_kwargs {"a":1} is not supported'),
        (RESPONSES, {"service_tier": "flex"}, 'it may be "auto" or "default", or left out'),
        (RESPONSES, {"text": {"verbosity": "low"}}, 'text.verbosity "low" is not supported by this engine; leave it'),
        (RESPONSES, {"max_tool_calls": 1}, "max_tool_calls 1 is not supported"),
        (RESPONSES, {"store": True}, "store true is not supported by this engine; it may be false, or left out"),
        (RESPONSES, {"top_logprobs": 2}, "top_logprobs has no effect without include"),
        (MESSAGES, {"watermarking": True}, "watermarking true is not supported"),
        (COMPLETIONS, {"length_penalty": 2.0}, "length_penalty is for beams; set use_beam_search"),
        (CHAT, {"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p is not supported with use_beam_search"),
        (CHAT, {"use_beam_search": True, "stream": True}, "stream is not supported with use_beam_search"),
    ],
)
def test_what_would_be_ignored_is_refused(path: str, given: dict[str, Any], sentence: str) -> None:
    found = fault(path, **given)
    assert found is not None
    assert found[0].partition(".")[0] in given
    assert sentence in found[1]


@pytest.mark.parametrize("path", NEUTRAL)
def test_what_is_given_and_means_what_happens_anyway_is_taken(path: str) -> None:
    for name, neutral in NEUTRAL[path].items():
        own, _, field = name.partition(".")
        for value in neutral:
            assert fault(path, **{own: {field: value} if field else value}) is None
    assert fault(path, user="me", stream=True, temperature=0.5) is None


def test_beams_may_be_asked_for_with_all_that_they_heed() -> None:
    heeded = {"n": 3, "max_tokens": 5, "ignore_eos": True, "length_penalty": 0.5, "temperature": 0, "logprobs": 1}
    for path in (CHAT, COMPLETIONS):
        assert fault(path, use_beam_search=True, **heeded) is None
        fields = set(TYPES[path].model_fields)
        assert set(NOT_IN_BEAM_SEARCH) & SAMPLED <= fields
    assert (SAMPLED & set(NOT_IN_BEAM_SEARCH)) == SAMPLED - {
        "ignore_eos",
        "include_stop_str_in_output",
        "request_id",
        "skip_special_tokens",
    }
