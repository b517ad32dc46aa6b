"""Parameters that vLLM's server knows and that would change nothing here: a request with one is refused.

What only names or describes a request (`LABELS`) may be given.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"

LABELS = frozenset({"metadata", "prompt_cache_key", "session_id", "user"})
"""Parameters that are meant to change nothing in the answer."""

NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {"suffix": (None, "")},
    CHAT: {"media_io_kwargs": (None, {}), "mm_processor_kwargs": (None, {})},
    RESPONSES: {
        "include": (None, [], ["message.output_text.logprobs"]),
        "max_tool_calls": (None,),
        "media_io_kwargs": (None, {}),
        "mm_processor_kwargs": (None, {}),
        "previous_input_messages": (None, []),
        "reasoning.generate_summary": (None,),
        "reasoning.summary": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "text.verbosity": (None,),
    },
    MESSAGES: {},
}
"""By path, the values of such parameters that mean what happens anyway. With a dot, they are fields of a parameter."""

for _neutral in NEUTRAL.values():
    _neutral |= {"watermarking": (None, False), "mm_payload": (None, "tensors"), "return_mm_kwargs": (None, True)}
for _path in (COMPLETIONS, CHAT):
    NEUTRAL[_path] |= {"return_token_offsets": (None, False)}

NOT_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "seed": (None,),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "stream": (None, False),
    "structured_outputs": (None,),
    "temperature": (None, 0, 1),
    "tool_choice": (None, "none"),
    "tools": (None,),
    "top_k": (None, -1, 0),
    "top_p": (None, 1),
}
"""The same for what a search for beams does not look at: it takes the likeliest continuations, and draws nothing."""


def fault_of(path: str, given: Mapping[str, msgspec.Raw]) -> tuple[str, str] | None:
    """The parameter of a request to `path` that would be ignored, and a sentence on it; None if there is none."""
    for name, neutral in NEUTRAL.get(path, {}).items():
        value = _value(given, name)
        if value not in neutral:
            allowed = " or ".join(json for value in neutral if value is not None and (json := _json(value)))
            instead = f"it may be {allowed}, or left out" if allowed else "leave it out"
            return name, f"{name} {_json(value)} is not supported by this engine; {instead}"
    if path == RESPONSES and _value(given, "top_logprobs") not in (None, 0) and not _value(given, "include"):
        return "top_logprobs", 'top_logprobs has no effect without include ["message.output_text.logprobs"]; give both'
    if path not in (CHAT, COMPLETIONS):
        return None
    if not _value(given, "use_beam_search"):
        if _value(given, "length_penalty") not in (None, 1):
            return "length_penalty", "length_penalty is for beams; set use_beam_search, or leave it out"
        return None
    for name, neutral in NOT_IN_BEAM_SEARCH.items():
        if _value(given, name) not in neutral:
            return name, f"{name} is not supported with use_beam_search; leave one of them out"
    return None


def _value(given: Mapping[str, msgspec.Raw], name: str) -> Any:
    """What a parameter is given as; None if it is not."""
    name, _, field = name.partition(".")
    value = msgspec.json.decode(given[name]) if name in given else None
    return (value.get(field) if isinstance(value, dict) else None) if field else value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
