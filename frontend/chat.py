"""``rankbus chat``: a conversation in the terminal, over the client bus."""

import sys
from typing import Any

from frontend.client import Client, EngineError, Session
from frontend.terminal import parse, parser, sampling, show


def main(arguments: list[str]) -> int:
    """Ask line by line, until the input ends; return the exit code."""
    options = parser("chat", "Talk to the model, line by line; Ctrl-D ends the conversation.")
    options.add_argument("--system", help="instructions for the model, before the conversation")
    options.add_argument(
        "--session",
        action="store_true",
        help="keep the conversation in the engine: each line is appended to it, and nothing is computed twice; "
        "/stats shows what that has saved",
    )
    parsed, endpoint = parse(options, arguments)
    conversation = [{"role": "system", "content": parsed.system}] if parsed.system else []
    with Client(endpoint) as client:
        if parsed.session:
            _hold(client, conversation, sampling(parsed))
        else:
            _resend(client, conversation, sampling(parsed))
    return 0


def _resend(client: Client, conversation: list[dict[str, Any]], params: dict[str, Any]) -> None:
    """Send the whole conversation with each line."""
    while (line := _ask()) is not None:
        conversation.append({"role": "user", "content": line})
        request_id = f"line-{len(conversation)}"
        try:
            pieces = client.generate(conversation, request_id=request_id, **params)
            answer = show(pieces, lambda name=request_id: client.abort(name))  # type: ignore[misc]
        except (EngineError, TimeoutError) as error:
            print(f"rankbus chat: {error}", file=sys.stderr)
            conversation.pop()
        else:
            conversation.append({"role": "assistant", "content": answer})


def _hold(client: Client, opening: list[dict[str, Any]], params: dict[str, Any]) -> None:
    """Hold a session: each line is appended to it."""
    session: Session | None = None
    saved = _Saved()
    while (line := _ask()) is not None:
        if line == "/stats":
            print(saved)
            continue
        message = {"role": "user", "content": line}
        try:
            if session is None:
                session = client.session([*opening, message], **params)
                turn = session.first
            else:
                turn = session.append([message])
            show(iter(turn), turn.stop)
            saved.add(turn.end().prompt_tokens, turn.end().cached_tokens)
        except (EngineError, TimeoutError) as error:
            print(f"rankbus chat: {error}", file=sys.stderr)
            if session is not None and session.over:
                print("rankbus chat: the conversation begins anew", file=sys.stderr)
                session = None
    if saved.turns:
        print(saved, file=sys.stderr)
    if session is not None:
        session.close()


class _Saved:
    """How many prompt tokens there were in all turns, and for how many nothing had to be computed again."""

    def __init__(self) -> None:
        self.turns = self._prompt = self._cached = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a turn."""
        self.turns += 1
        self._prompt += prompt_tokens
        self._cached += cached_tokens

    def __str__(self) -> str:
        share = self._cached / self._prompt if self._prompt else 0.0
        return (
            f"{self.turns} turns, {self._prompt} prompt tokens, {self._cached} of them not computed again ({share:.0%})"
        )


def _ask() -> str | None:
    """The next line that is not empty; None when the input has ended."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if line:
            return line
