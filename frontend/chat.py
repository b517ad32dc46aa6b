"""``rankbus chat``: a conversation in the terminal, over the client bus."""

import sys
from typing import Any

from frontend.client import Client, EngineError
from frontend.terminal import parse, parser, sampling, show


def main(arguments: list[str]) -> int:
    """Ask line by line, until the input ends; return the exit code."""
    options = parser("chat", "Talk to the model, line by line; Ctrl-D ends the conversation.")
    options.add_argument("--system", help="instructions for the model, before the conversation")
    parsed, endpoint = parse(options, arguments)
    conversation: list[dict[str, Any]] = []
    if parsed.system:
        conversation.append({"role": "system", "content": parsed.system})
    with Client(endpoint) as client:
        while (line := _ask()) is not None:
            conversation.append({"role": "user", "content": line})
            try:
                answer = show(client, client.generate(conversation, **sampling(parsed)))
            except (EngineError, TimeoutError) as error:
                print(f"rankbus chat: {error}", file=sys.stderr)
                conversation.pop()
            else:
                conversation.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str | None:
    """The next line that is not empty; None when the input has ended."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if line:
            return line
