"""``rankbus generate``: complete one text, in the terminal, over the client bus."""

import sys

from frontend.client import Client, EngineError
from frontend.terminal import parse, parser, sampling, show


def main(arguments: list[str]) -> int:
    """Complete a prompt given as an argument, or on standard input; return the exit code."""
    options = parser("generate", "Complete a text; its continuation appears as it comes.")
    options.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    parsed, endpoint = parse(options, arguments)
    prompt = sys.stdin.read() if parsed.prompt is None else parsed.prompt
    try:
        with Client(endpoint) as client:
            pieces = client.generate(prompt, request_id="text", **sampling(parsed))
            show(pieces, lambda: client.abort("text"))
    except (EngineError, TimeoutError) as error:
        print(f"rankbus generate: {error}", file=sys.stderr)
        return 1
    return 0
