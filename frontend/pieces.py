"""What the client library takes from its users, and gives them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from bus.messages import Delta, Finished

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, tokens, or chat messages."""


class EngineError(Exception):
    """The engine refused or failed what was asked; the text is its sentence, `code` its word for programs."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a request's output, as it came. `finished` is set on the last piece of each child (`index`).

    Log-probabilities are in `delta`, those of the prompt in pieces without tokens before the first that has any: see
    `prompt_position` of `bus.messages.Logprobs`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finished: Finished | None = None
    delta: Delta | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """All output of one child of a request."""

    text: str
    token_ids: list[int]
    finished: Finished
