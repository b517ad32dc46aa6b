"""What rows try as the tokens to come next: found in the request's own, or the draft model's."""

from typing import ClassVar

import numpy as np

from bus.config import Config
from ranks.batch import NONE
from ranks.request import Int32

MISSES = 2
"""So many tries in a row with nothing right are let pass before a row rests."""
MOST_MISSES = 7
"""More are not counted: a row rests 63 steps at most."""


class Drafts:
    """How many drafts of each row are worth a try: a function of what became of those it had.

    Twice as many as were right the last time and one, `num_speculative_tokens` at most, and in the beginning. From
    `MISSES` tries in a row with nothing right on, a row rests after each: 1 step, 3, 7 and so on.
    """

    def __init__(self, config: Config) -> None:
        self._worth = np.full(config.max_num_seqs, config.num_speculative_tokens, np.int32)
        self._misses = np.zeros(config.max_num_seqs, np.int32)
        self._rest = np.zeros(config.max_num_seqs, np.int32)
        self._most_drafts = config.num_speculative_tokens

    def begin(self, row: int) -> None:
        """Somebody else has the row."""
        self._worth[row] = self._most_drafts
        self._misses[row] = self._rest[row] = 0

    def judged(self, row: int, right: int) -> None:
        """So many of the row's drafts were right."""
        self._worth[row] = min(2 * right + 1, self._most_drafts)
        if right:
            self._misses[row] = 0
            return
        self._misses[row] = min(self._misses[row] + 1, MOST_MISSES)
        if self._misses[row] >= MISSES:
            self._rest[row] = 2 ** int(self._misses[row] - MISSES + 1) - 1

    def allowed(self, row: int, room: int) -> int:
        """How many to try in the row's next step, `room` at most; a step of its rest has gone by if that is none."""
        if self._rest[row]:
            self._rest[row] -= 1
            return 0
        return max(min(int(self._worth[row]), room), 0)


class DraftModel(Drafts):
    """Drafts that the executor's draft model draws: how many is all that is known here."""

    are_known: ClassVar[bool] = False

    def drafts(self, row: int, tokens: Int32, room: int) -> list[int]:
        """As many tokens as are to be drawn; what they are means nothing."""
        return [NONE] * self.allowed(row, room)


class PromptLookup(Drafts):
    """Finds drafts in the tokens of rows: what followed the last ones where they stood before."""

    are_known: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def drafts(self, row: int, tokens: Int32, room: int) -> list[int]:
        """What may come after the `tokens` [n] of a row, `room` of it at most.

        It is nothing if their end stands nowhere else in them.

        Of the places where at least the last `prompt_lookup_min` tokens stand once more, those count where most of them
        do, up to `prompt_lookup_max`, and of these the last. From there it goes on as the tokens do, and if they end
        there, as what is tried does: a repetition is taken to go on. Where fewer than `prompt_lookup_max` agree, so
        many are tried at most.
        """
        count = self.allowed(row, room)
        if count == 0:
            return []
        end = tokens.size - 1
        places = np.flatnonzero(tokens[:end] == tokens[end])
        agree = 1
        while agree < self._most and places.size:
            further = places[places >= agree]
            further = further[tokens[further - agree] == tokens[end - agree]]
            if further.size == 0:
                break
            places = further
            agree += 1
        if places.size == 0 or agree < self._least:
            return []
        if agree < self._most:
            count = min(count, agree)
        period = end - int(places[-1])
        drafts: list[int] = tokens[tokens.size - period + np.arange(count) % period].tolist()
        return drafts
