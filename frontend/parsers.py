"""vLLM's parsers of answers, chosen by name: what becomes of tool calls and of reasoning in chat, over HTTP."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from bus.config import Config, ConfigError


def choose(args: Namespace, config: Config) -> None:
    """Put the parsers that `config` names into vLLM's command line.

    Raises:
        ConfigError: there is no parser of that name.
    """
    _check("tool_call_parser", config.tool_call_parser, ToolParserManager.list_registered())
    _check("reasoning_parser", config.reasoning_parser, ReasoningParserManager.list_registered())
    args.tool_call_parser = config.tool_call_parser or None
    args.enable_auto_tool_choice = bool(config.tool_call_parser)
    args.reasoning_parser = args.structured_outputs_config.reasoning_parser = config.reasoning_parser


def try_out(config: Config, tokenizer: Any) -> None:
    """Make each parser once: some need tokens that not every model has, and would fail with each request.

    Raises:
        ConfigError: a parser cannot be used with this model; the text has its reason.
    """
    if config.tool_call_parser:
        _make("tool_call_parser", config.tool_call_parser, ToolParserManager.get_tool_parser, tokenizer)
    if config.reasoning_parser:
        _make("reasoning_parser", config.reasoning_parser, ReasoningParserManager.get_reasoning_parser, tokenizer)


def _check(key: str, name: str, known: list[str]) -> None:
    if name and name not in known:
        raise ConfigError(f"{key}: {name!r} is not allowed; it must be empty or one of {', '.join(known)}")


def _make(key: str, name: str, parser: Callable[[str], Callable[[Any], Any]], tokenizer: Any) -> None:
    try:
        parser(name)(tokenizer)
    except Exception as error:  # whatever a parser raises, it will raise again
        raise ConfigError(f"{key}: {name!r} cannot be used with this model: {error}") from None
