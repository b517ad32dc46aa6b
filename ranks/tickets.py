"""Which requests wait for grammars that are being compiled elsewhere, by the numbers that these have there."""

from bus.messages import Grammar, Sampling
from ranks.request import Request


class Tickets:
    """Numbers the grammars that a scheduler wants compiled, from 1 on."""

    def __init__(self) -> None:
        self._number = 0
        self._wanted: dict[int, tuple[Request, Grammar]] = {}
        """By ticket, all that have not come back; whoever wanted them may have ended."""
        self._untold: list[tuple[int, Grammar]] = []

    def draw(self, request: Request, sampling: Sampling) -> int:
        """The ticket of the grammar that a request, or a turn of it, is to be sampled by; 0 if there is none."""
        if sampling.grammar is None:
            return 0
        self._number += 1
        self._wanted[self._number] = request, sampling.grammar
        self._untold.append((self._number, sampling.grammar))
        return self._number

    def take(self) -> list[tuple[int, Grammar]]:
        """The tickets drawn since the last call, and their grammars."""
        untold, self._untold = self._untold, []
        return untold

    def redeem(self, ticket: int) -> tuple[Request, Grammar]:
        """Who wanted a grammar that comes back, and what it was asked for as."""
        return self._wanted.pop(ticket)
