"""What `rankbus generate` and `rankbus chat` share: their arguments, and output that appears as it comes."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bus.config import load, split_flags
from frontend.client import Piece


def parser(program: str, summary: str) -> argparse.ArgumentParser:
    """A parser with the options that both commands have."""
    parser = argparse.ArgumentParser(prog=f"rankbus {program}", description=summary, epilog=EPILOG)
    parser.add_argument("--endpoint", help="client bus to talk to (default: the one of frontend 0 in run_dir)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens up to this sum")
    parser.add_argument("--seed", type=int, help="the same seed draws the same answer")
    return parser


EPILOG = "Settings of the engine (--run-dir and so on) are taken as well; `rankbus config` lists them."


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, str]:
    """The options, and the endpoint of the client bus.

    Raises:
        ConfigError: a setting among the arguments cannot be used.
    """
    flags, rest = split_flags(arguments)
    options = parser.parse_args(rest)
    return options, options.endpoint or load(flags).client_endpoint(0)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters among the options."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def show(pieces: Iterator[Piece], stop: Callable[[], None]) -> str:
    """Print an answer as it comes; return its text. Ctrl-C ends the answer by `stop`, not the program."""
    text = ""
    try:
        for piece in pieces:
            text += piece.text
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        stop()
        print(" [stopped]", end="", file=sys.stderr)
    print()
    return text
