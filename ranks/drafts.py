"""Prompt-lookup decoding: what followed the last tokens where they stood before is tried as what comes next."""

import numpy as np

from bus.config import Config
from ranks.request import Int32


class PromptLookup:
    """Finds drafts in a request's own tokens. It keeps nothing, so there is nothing to take back when tokens go."""

    def __init__(self, config: Config) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def drafts(self, tokens: Int32, count: int) -> list[int]:
        """What may come after `tokens` [n], `count` of it; nothing if their end stands nowhere else in them.

        Of the places where at least the last `prompt_lookup_min` tokens stand once more, those count where most of them
        do, up to `prompt_lookup_max`, and of these the last. From there it goes on as the tokens do, and if they end
        there, as what is tried does: a repetition is taken to go on.
        """
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
