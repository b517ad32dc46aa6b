"""Which of vLLM's parsers may be chosen; what they do over HTTP is in `test_server`."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bus.config import Config, ConfigError
from frontend import parsers


def command_line() -> Namespace:
    return Namespace(structured_outputs_config=SimpleNamespace(reasoning_parser=""))


def test_the_chosen_parsers_are_in_the_command_line() -> None:
    args = command_line()
    parsers.choose(args, Config(tool_call_parser="hermes", reasoning_parser="granite"))
    assert (args.tool_call_parser, args.enable_auto_tool_choice) == ("hermes", True)
    assert args.structured_outputs_config.reasoning_parser == args.reasoning_parser == "granite"
    parsers.choose(args, Config())
    assert (args.tool_call_parser, args.enable_auto_tool_choice, args.reasoning_parser) == (None, False, "")


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_there_is_not(key: str) -> None:
    settings: dict[str, Any] = {key: "herms"}
    with pytest.raises(ConfigError, match=f"^{key}: 'herms' is not allowed; it must be empty or one of .*granite"):
        parsers.choose(command_line(), Config(**settings))


def test_a_parser_that_needs_tokens_which_the_model_does_not_have(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    parsers.try_out(Config(tool_call_parser="hermes", reasoning_parser="granite"), tokenizer)
    with pytest.raises(ConfigError, match=r"^reasoning_parser: 'deepseek_r1' cannot be used with this model: .*token"):
        parsers.try_out(Config(reasoning_parser="deepseek_r1"), tokenizer)
