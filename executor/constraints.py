"""What rows' parameters ask of `sampling.adjust`, put together on the host for the lines of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bus.messages import Sampling
from bus.sampling import BAD_WORD_MAX
from executor.sampling import Adjustments
from executor.step import Float32, Int32, Words

ENTRIES = BAD_WORD_MAX
"""Biases, and entries of bans, that one call of `sampling.adjust` takes for a shard: enough for the longest ban."""

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Constraints:
    """One row's. `bans` are sequences of tokens of which the last must not follow the others."""

    prompt_len: int
    min_tokens: int
    allowed: Words | None
    """uint32 [ceil(vocabulary / 32)], see `Adjustments`."""
    bias_tokens: Int32
    biases: Float32
    stops: Int32
    """Tokens that may not come before `min_tokens` of output."""
    bans: tuple[Int32, ...]
    penalizes: bool

    @classmethod
    def of(cls, sampling: Sampling, prompt_len: int, vocabulary: int) -> "Constraints | None":
        """None for a row that asks for nothing of the kind."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        penalizes = penalties != (0, 0, 1)
        bans, allowed = sampling.bad_words_token_ids, sampling.allowed_token_ids
        if not (penalizes or sampling.min_tokens or sampling.logit_bias or bans or allowed is not None):
            return None
        bias = sampling.logit_bias or {}
        eos = [] if sampling.eos_token_id is None else [sampling.eos_token_id]
        return cls(
            prompt_len=prompt_len,
            min_tokens=sampling.min_tokens,
            allowed=None if allowed is None else _words(allowed, vocabulary),
            bias_tokens=np.array(list(bias), np.int32),
            biases=np.array(list(bias.values()), np.float32),
            stops=np.array(sorted({*eos, *sampling.stop_token_ids}), np.int32),
            bans=tuple(np.array(word, np.int32) for word in bans or ()),
            penalizes=penalizes,
        )


UNCONSTRAINED = Constraints(
    prompt_len=0,
    min_tokens=0,
    allowed=None,
    bias_tokens=_NONE,
    biases=np.zeros(0, np.float32),
    stops=_NONE,
    bans=(),
    penalizes=False,
)


class Line(NamedTuple):
    """A line of the logits whose row has constraints, and how many tokens that row has.

    `mask` says which tokens the row may draw in this step, whatever its constraints.
    """

    line: int
    end: int
    constraints: Constraints
    mask: Words | None = None

    @property
    def early_stops(self) -> Int32:
        """Tokens that would end the output before its minimum; none if nothing else is allowed: a grammar's end."""
        of_row = self.constraints
        if self.end - of_row.prompt_len >= of_row.min_tokens or of_row.stops.size == 0:
            return _NONE
        if self.mask is not None:
            others = self.mask.copy()
            np.bitwise_and.at(others, of_row.stops >> 5, ~(np.uint32(1) << (of_row.stops & 31).astype(np.uint32)))
            if not others.any():
                return _NONE
        return of_row.stops


def compose(shards: Sequence[Sequence[Line]], lines: int, vocabulary: int) -> Iterator[Adjustments]:
    """Arguments, with a leading axis of shards, for the calls of `sampling.adjust` that do all that `shards` ask for.

    There is one call unless there are more biases or bans than one takes; penalties come in the last, as they must.
    """
    allowed, masks = _allowed(shards, lines, vocabulary)
    biases = [_biases(shard) for shard in shards]
    bans = [_pack_bans(shard) for shard in shards]
    penalizes = any(line.constraints.penalizes for shard in shards for line in shard)
    calls = max(1, *(-(-shard[0].size // ENTRIES) for shard in biases), *(len(packs) for packs in bans))
    for call in range(calls):
        part = slice(call * ENTRIES, (call + 1) * ENTRIES)
        bias_line, bias_token, bias = (
            np.stack([_padded(shard[field][part], fill) for shard in biases])
            for field, fill in enumerate((lines, 0, 0))
        )
        ban_line, ban_group, ban_back, ban_token = (
            np.stack([_padded(packs[call][field] if call < len(packs) else _NONE, fill) for packs in bans])
            for field, fill in enumerate((lines, ENTRIES - 1, 0, 0))
        )
        use = [masks and call == 0, bool((bias_line < lines).any()), bool((ban_line < lines).any())]
        use.append(penalizes and call == calls - 1)
        yield Adjustments(
            allowed,
            bias_line,
            bias_token,
            bias,
            ban_line,
            ban_group,
            ban_back,
            ban_token,
            np.array([use] * len(shards)),
        )


def _words(allowed: Sequence[int], vocabulary: int) -> Words:
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[np.array(allowed, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def _allowed(shards: Sequence[Sequence[Line]], lines: int, vocabulary: int) -> tuple[Words, bool]:
    masks = np.full((len(shards), lines, -(-vocabulary // 32)), 2**32 - 1, np.uint32)
    used = False
    for shard, of_shard in enumerate(shards):
        for line in of_shard:
            for mask in (line.constraints.allowed, line.mask):
                if mask is not None:
                    masks[shard, line.line] &= mask
                    used = True
    return masks, used


def _biases(shard: Sequence[Line]) -> tuple[Int32, Int32, Float32]:
    """Lines, tokens and values of all biases, and of the stops that may not come yet."""
    lines: list[Int32] = [_NONE]
    tokens: list[Int32] = [_NONE]
    values: list[Float32] = [np.zeros(0, np.float32)]
    for line in shard:
        stops, of_row = line.early_stops, line.constraints
        tokens += [of_row.bias_tokens, stops]
        values += [of_row.biases, np.full(stops.size, -np.inf, np.float32)]
        lines.append(np.full(of_row.biases.size + stops.size, line.line, np.int32))
    return np.concatenate(lines), np.concatenate(tokens), np.concatenate(values)


def _pack_bans(shard: Sequence[Line]) -> list[tuple[Int32, Int32, Int32, Int32]]:
    """Lines, groups, places from the end and tokens of all bans, in packs of at most `ENTRIES`."""
    packs: list[tuple[Int32, Int32, Int32, Int32]] = []
    words: list[Int32] = []
    owners: list[int] = []
    size = 0

    def close() -> None:
        if words:
            sizes = [word.size for word in words]
            packs.append(
                (
                    np.repeat(np.array(owners, np.int32), sizes),
                    np.repeat(np.arange(len(words), dtype=np.int32), sizes),
                    np.concatenate([np.arange(size - 1, -1, -1, dtype=np.int32) for size in sizes]),
                    np.concatenate(words),
                )
            )
            words.clear()
            owners.clear()

    for line in shard:
        for word in line.constraints.bans:
            if size + word.size > ENTRIES:
                close()
                size = 0
            size += word.size
            words.append(word)
            owners.append(line.line)
    close()
    return packs


def _padded(values: npt.NDArray, fill: int) -> npt.NDArray:
    return np.pad(values, (0, ENTRIES - values.size), constant_values=fill)
