"""Vectors of prompts: sums over their tokens' hidden states, which are added up while the prompts are computed.

Each token has a weight in its row's sum: with `mean` one by the length of the prompt, with `last` the last token has 1
and the others nothing. The sums are on the device, in float32.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bus.messages import Pooling
from executor import hosts
from executor.network import Network, Output, zeros
from executor.placement import Places
from executor.sampling import NAN_TOKEN
from executor.shards import Array
from executor.step import Float32, Int32, MergedStep, Pooled, RowSetup, SampledStep, within

POOLED_TOKEN = -3
"""Stands in results where a prompt was pooled."""

SHORTEST = 1e-12
"""Vectors that are shorter are not scaled to a length of 1."""


class _Span(NamedTuple):
    """What the `entry`th sequence of a step runs of a prompt that is pooled.

    Its last `tokens` of the step go into the row's sum with `weight` each. With `begins` they are the first to do so.
    """

    entry: int
    pooling: Pooling
    tokens: int
    weight: float
    begins: bool
    ends: bool


class AskedPooling(NamedTuple):
    """What the device has been asked to tell of a step; see `collect`."""

    spans: list[_Span]
    """Those of prompts that come to their end."""
    vectors: Array
    """float32 [shards, lines, hidden]; `at` says where in it each span's is."""
    at: tuple[Int32, Int32]


class Pools:
    """Holds the sums, and which rows are pooled and have not come to their end: how, and how long their prompts are."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sums = zeros(network.steps.sums)
        self._waiting: dict[int, tuple[int, Pooling]] = {}

    def set_up(self, setup: RowSetup) -> None:
        """A row begins, or goes on with other tokens: such a row is not pooled."""
        pooling = setup.sampling.pooling
        if pooling is None:
            self._waiting.pop(setup.row, None)
        else:
            self._waiting[setup.row] = setup.prompt_len, pooling

    def take(self, step: MergedStep) -> list[_Span]:
        """What this step gives, if it is the next."""
        if not self._waiting or self._waiting.keys().isdisjoint(rows := step.rows.tolist()):
            return []
        spans = []
        for entry, row in enumerate(rows):
            if row not in self._waiting:
                continue
            size, pooling = self._waiting[row]
            position, count = int(step.positions[entry]), int(step.num_tokens[entry])
            ends = position + count >= size
            if ends:
                del self._waiting[row]
            if pooling.kind == "mean":
                spans.append(_Span(entry, pooling, count, 1 / size, position == 0, ends))
            elif ends:
                spans.append(_Span(entry, pooling, 1, 1.0, True, True))
        return spans

    def dispatch(self, spans: list[_Span], step: MergedStep, places: Places, output: Output) -> AskedPooling | None:
        """Have the device add up what `spans`, at least one, have, with the `output` of the step.

        Returns what is to be fetched, None if no prompt comes to its end.
        """
        steps = self._network.steps
        run, placement = steps.programs.run, steps.placement
        ended = [span for span in spans if span.ends]
        begun = np.array([step.rows[span.entry] for span in spans if span.begins], np.int32)
        told = placement.place(step.rows[[span.entry for span in ended]])
        counts = np.array([span.tokens for span in spans], np.int32)
        entries = np.repeat(np.array([span.entry for span in spans], np.int32), counts)
        weights = np.repeat(np.array([span.weight for span in spans], np.float32), counts)
        lines = placement.place(step.rows[entries])
        # Of the tokens that each shard runs, those that are added up
        ends = placement.token_ends(step, places)[entries]
        numbers = ends - np.repeat(counts, counts) + within(counts)
        last_only = bool((numbers == ends - 1).all())
        vectors = None
        for begin in range(0, lines.most, steps.lines):
            mine = np.flatnonzero((lines.places >= begin) & (lines.places < begin + steps.lines))
            at = lines.shards[mine], lines.places[mine] - np.int32(begin)
            piece = placement.pooling_piece(steps.lines, begun if begin == 0 else begun[:0], told)
            piece.rows[at], piece.weights[at] = lines.rows[mine], weights[mine]
            ending = output.ending
            if last_only:
                piece.which[at] = places.places[entries[mine]]
            else:
                which = np.zeros((placement.shards, steps.lines), np.int32)
                which[at], piece.which[at] = numbers[mine], at[1]
                ending = run("lines", output.size, output.x, which)
            self._sums, vectors = run("pool", steps.lines, self._network.outer, ending, self._sums, piece)
        if not ended:
            return None
        if hosts.are_several():
            vectors = run("gather pooled", steps.lines, vectors)
        return AskedPooling(ended, vectors, (told.shards, told.places))


def without_draws(step: MergedStep, spans: list[_Span]) -> npt.NDArray[np.bool_]:
    """Which sequences of a step draw a token: as `samples`, but none that is pooled."""
    draws = step.samples.copy()
    draws[[span.entry for span in spans if span.ends]] = False
    return draws


def collect(asked: AskedPooling, sampled: SampledStep) -> None:
    """Wait for the vectors, and put them into what the step gave."""
    vectors = np.asarray(asked.vectors)[asked.at]
    counts = np.ones_like(sampled.tokens) if sampled.counts is None else sampled.counts
    firsts = np.cumsum(counts) - counts
    for span, vector in zip(asked.spans, vectors, strict=True):
        is_number = bool(np.isfinite(vector).all())
        sampled.tokens[firsts[span.entry]] = POOLED_TOKEN if is_number else NAN_TOKEN
        if is_number:
            sampled.pooled.append(Pooled(span.entry, _scaled(vector) if span.pooling.normalize else vector))


def _scaled(vector: Float32) -> Float32:
    scaled: Float32 = vector / np.maximum(np.linalg.norm(vector), np.float32(SHORTEST))
    return scaled
