"""``rankbus generate``: complete one text, in the terminal, over the client bus."""

import sys
from pathlib import Path

from bus.messages import Grammar
from frontend.client import Client, EngineError
from frontend.terminal import parse, parser, sampling, show


def main(arguments: list[str]) -> int:
    """Complete a prompt given as an argument, or on standard input; return the exit code."""
    options = parser("generate", "Complete a text; its continuation appears as it comes.")
    options.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    wanted = options.add_mutually_exclusive_group()
    wanted.add_argument("--schema", type=Path, metavar="FILE", help="the answer is JSON that fits this JSON schema")
    wanted.add_argument("--regex", help="the answer matches this regular expression as a whole")
    options.add_argument("--adapter", default="", help="the name of a LoRA adapter that is loaded")
    parsed, endpoint = parse(options, arguments)
    params = sampling(parsed)
    if parsed.regex is not None:
        params["grammar"] = Grammar(kind="regex", spec=parsed.regex)
    elif parsed.schema is not None:
        try:
            params["grammar"] = Grammar(kind="json", spec=parsed.schema.read_text())
        except (OSError, ValueError) as error:
            options.error(f"--schema: {error}")
    prompt = sys.stdin.read() if parsed.prompt is None else parsed.prompt
    try:
        with Client(endpoint) as client:
            pieces = client.generate(prompt, request_id="text", adapter=parsed.adapter, **params)
            show(pieces, lambda: client.abort("text"))
    except (EngineError, TimeoutError) as error:
        print(f"rankbus generate: {error}", file=sys.stderr)
        return 1
    return 0
