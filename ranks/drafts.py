"""Prompt-lookup decoding: what followed the last tokens where they stood before is tried as what comes next."""

import numpy as np

from bus.config import Config
from ranks.request import Int32


class PromptLookup:
    """Finds drafts in the tokens of rows.

    All that it keeps of a row is how many drafts are worth a try: twice as many as were right the last time and one,
    `num_speculative_tokens` at most, and in the beginning.
    """

    def __init__(self, config: Config) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._worth = np.full(config.max_num_seqs, config.num_speculative_tokens, np.int32)
        self._most_drafts = config.num_speculative_tokens

    def begin(self, row: int) -> None:
        """Somebody else has the row."""
        self._worth[row] = self._most_drafts

    def judged(self, row: int, right: int) -> None:
        """So many of the row's drafts were right."""
        self._worth[row] = min(2 * right + 1, self._most_drafts)

    def drafts(self, row: int, tokens: Int32, room: int) -> list[int]:
        """What may come after the `tokens` [n] of a row, `room` of it at most.

        It is nothing if their end stands nowhere else in them.

        Of the places where at least the last `prompt_lookup_min` tokens stand once more, those count where most of them
        do, up to `prompt_lookup_max`, and of these the last. From there it goes on as the tokens do, and if they end
        there, as what is tried does: a repetition is taken to go on.
        """
        count = min(int(self._worth[row]), room)
        if count < 1:
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
        period = end - int(places[-1])
        drafts: list[int] = tokens[tokens.size - period + np.arange(count) % period].tolist()
        return drafts
