"""The data that goes in and out of one step of the model, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bus.messages import Sampling

Int32 = npt.NDArray[np.int32]
Index = npt.NDArray[np.intp]
"""Numbers that other arrays are asked by: numpy takes them as they are, while it makes these of `Int32` each time."""
Flags = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
"""Bits of tokens: bit t % 32 of word t // 32 stands for token t."""


class RowSetup(msgspec.Struct, frozen=True, eq=False):
    """A global row begins, resumes or continues: what the runner must hold for it before the step runs.

    `tokens` go to positions `start`, `start` + 1, … of the row's history. Output is what lies at positions
    `prompt_len` and after. `sampling` replaces the row's parameters. `adapter` is the slot of its adapter, 0 for none.
    """

    row: int
    start: int
    tokens: Int32
    prompt_len: int
    sampling: Sampling
    adapter: int = 0


class Masks(NamedTuple):
    """Which tokens may be drawn for sequences, by their places `at` [k]: `words` [k, ceil(vocabulary / 32)].

    A sequence with drafts has one for each token that it draws, in their order.
    """

    at: Int32
    words: Words


NO_MASKS = Masks(np.empty(0, np.int32), np.empty((0, 0), np.uint32))
"""All tokens, wherever one is drawn."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a step tries: `counts` [n] for each of its sequences, and the `tokens` one after the other. int32.

    There are no `tokens` where the draft model is to draw them.
    """

    counts: Int32
    tokens: Int32

    @property
    def places(self) -> Int32:
        """Which one of its sequence's drafts each token is, from 0 on. int32 [tokens]."""
        return within(self.counts)


def largest(values: npt.NDArray[Any]) -> int:
    """The largest of integers [n], at least one. For so few as a step has, `values.max()` takes three times as long."""
    return int(values.item(values.argmax()))


def within(counts: Int32) -> Int32:
    """The numbers 0 … count - 1 for each of `counts` [n], one after the other; int32 [their sum]."""
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    places: Int32 = np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(firsts, counts)
    return places


@dataclass(frozen=True, slots=True)
class MergedStep:
    """One batch of all ranks, rank-major, one entry per sequence that runs.

    A global row is rank × max_num_seqs + the rank's row. `positions` is where each sequence's first token of this step
    lies; the token there is in the row's history on the device, or sampled by a step still running. `samples` says
    whether the step reaches the row's last known token and so draws the next one. `block_tables` [n, widest] holds
    the blocks of each sequence, as many as the longest one needs in this step, and 0 where it has none; a rank's block
    numbers begin at `merge.Limits.first_blocks`.

    `drafts` of a sequence are the last of its tokens of this step; they are not in the row's history. A sequence with
    drafts draws a token after its last known one, and one after each draft as if that were known.

    A step of the same sequences as the one before has the same objects for `ranks`, `rows`, `num_tokens` and `samples`.
    """

    setups: list[RowSetup]
    ranks: Int32
    rows: Int32
    positions: Int32
    num_tokens: Int32
    samples: Flags
    block_tables: Int32
    drafts: Drafts | None = None
    masks: Masks = NO_MASKS


class Part(msgspec.Struct, frozen=True, eq=False):
    """A schedule that was applied to the rows: one rank's share of a merged step.

    `rows` [n] are global; `ends` [n] is the position after each sequence's last token of the step. `again` says that
    they are the rows of the rank's part before, one token each. `masks` are by place in these rows.
    """

    rank: int
    step: int
    setups: list[RowSetup]
    rows: Int32
    ends: Int32
    num_tokens: Int32
    samples: Flags
    again: bool = False
    drafts: Drafts | None = None
    masks: Masks = NO_MASKS


def firsts(parts: Sequence[Part]) -> list[int]:
    """Where the rows of each part begin in the step that is made of them."""
    return [0, *accumulate(part.rows.size for part in parts[:-1])]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of tokens of a prompt that the `entry`th sequence of a step gave, from `position` on.

    `token_ids` and `values` hold [n, 1 + k], line by line: the prompt's token, then the most likely ones. `ranks` [n]
    are those of the prompt's tokens.
    """

    entry: int
    position: int
    token_ids: Int32
    values: Float32
    ranks: Int32


class Pooled(NamedTuple):
    """The vector [hidden size] of the prompt of the `entry`th sequence of a step, which came to its end in it."""

    entry: int
    vector: Float32


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What a step drew: `tokens` in the order of the merged step, -1 where it did not sample, -2 for NaN logits.

    It is -3 for those in `pooled`, which come in the order of the merged step.

    `counts` [n] tokens of each sequence, left out (None) when each has one: of a sequence with drafts those that it
    would have drawn one by one, which are drafts but for the last.

    `logprobs` maps an index of the step to one (token ids [1 + k], values [1 + k], rank of the sampled token) for each
    of its tokens. `prompt_logprobs` come in the order of the merged step.
    """

    tokens: Int32
    logprobs: dict[int, list[tuple[Int32, Float32, int]]] = field(default_factory=dict)
    counts: Int32 | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
