"""Log-probabilities of prompts: found while a prompt is computed, for they follow from the same output as its KV."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from executor import hosts, sampling
from executor.network import Network, Output
from executor.placement import Places
from executor.programs import bucket
from executor.sampling import TOP_LOGPROBS, most_likely
from executor.step import Float32, Int32, MergedStep, PromptLogprobs, RowSetup, within


class _Span(NamedTuple):
    """`tokens` [n] of a prompt, from `position` on, that come after tokens that the `entry`th sequence of a step runs.

    The first of them comes after the first of those. `most` is `Sampling.prompt_logprobs`.
    """

    entry: int
    position: int
    tokens: Int32
    most: int


class _Piece(NamedTuple):
    """Some of the tokens of spans, which one call of the programs had `at` these shards and lines.

    `numbers` [n] count the tokens of all spans, one after the other: a piece has some of each shard's.
    """

    numbers: npt.NDArray[np.intp]
    at: tuple[Int32, Int32]
    found: sampling.Logprobs
    logits: Float32 | None
    """[tokens, vocabulary], on the host, where a span wants more than `TOP_LOGPROBS`."""


class AskedPrompts(NamedTuple):
    """What the device has been asked to find in a step; see `collect`."""

    spans: list[_Span]
    pieces: list[_Piece]


class Prompts:
    """Holds the prompts that log-probabilities are yet to be found of, by row: their tokens, on the host."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._waiting: dict[int, tuple[Int32, int]] = {}

    def set_up(self, setup: RowSetup) -> None:
        """A row begins. One that goes on with other tokens has no prompt to look at, or still the one it had."""
        most = setup.sampling.prompt_logprobs
        if most is None:
            self._waiting.pop(setup.row, None)
        elif setup.start == 0:
            self._waiting[setup.row] = setup.tokens[: setup.prompt_len], most

    def take(self, step: MergedStep) -> list[_Span]:
        """What this step gives, if it is the next."""
        if not self._waiting or self._waiting.keys().isdisjoint(rows := step.rows.tolist()):
            return []
        spans = []
        for index, row in enumerate(rows):
            if row not in self._waiting:
                continue
            tokens, most = self._waiting[row]
            first = int(step.positions[index]) + 1
            end = first + int(step.num_tokens[index])
            if end >= tokens.size:
                del self._waiting[row]
            if first < tokens.size:
                spans.append(_Span(index, first, tokens[first:end], most))
        return spans

    def dispatch(self, spans: list[_Span], step: MergedStep, places: Places, output: Output) -> AskedPrompts:
        """Ask the device for the log-probabilities of `spans`, at least one, with the `output` of the step.

        Where a span wants more than `TOP_LOGPROBS`, this waits: the logits of a prompt take more memory than a device
        may have left.
        """
        steps = self._network.steps
        placement, run = steps.placement, steps.programs.run
        lengths = np.array([span.tokens.size for span in spans], np.int32)
        entries = np.repeat(np.array([span.entry for span in spans], np.int32), lengths)
        targets = np.concatenate([span.tokens for span in spans])
        lines = placement.place(step.rows[entries])
        # Of the tokens that each shard runs, those that the lines come after
        numbers = (placement.token_ends(step, places) - step.num_tokens)[entries] + within(lengths)
        one_each = int(step.num_tokens.max()) == 1
        wants_all = any(not 0 <= span.most <= TOP_LOGPROBS for span in spans)
        pieces = []
        for begin in range(0, lines.most, steps.lines):
            mine = np.flatnonzero((lines.places >= begin) & (lines.places < begin + steps.lines))
            at = lines.shards[mine], lines.places[mine] - np.int32(begin)
            size = bucket(steps.draw_sizes, int(at[1].max()) + 1)
            picks = placement.blank_picks(size)
            picks[*at, 0] = places.places[entries[mine]] if one_each else at[1]
            picks[*at, 1] = lines.rows[mine]
            ending = output.ending
            if not one_each:
                after = np.zeros((placement.shards, steps.lines), np.int32)
                after[at] = numbers[mine]
                ending = run("lines", output.size, output.x, after)
            asked = np.zeros((placement.shards, size), np.int32)
            asked[at] = targets[mine]
            logits = run("head", size, self._network.outer, ending, picks)
            found = run("logprobs", size, logits, asked)
            if hosts.are_several():
                found = run("gather logprobs", size, found)
                logits = run("gather logits", size, logits) if wants_all else logits
            pieces.append(_Piece(mine, at, found, np.asarray(logits)[at] if wants_all else None))
        return AskedPrompts(spans, pieces)


def collect(asked: AskedPrompts) -> list[PromptLogprobs]:
    """Wait for what was asked for, and fetch it."""
    order = np.argsort(np.concatenate([piece.numbers for piece in asked.pieces]))
    fetched = [sampling.Logprobs(*(np.asarray(array)[piece.at] for array in piece.found)) for piece in asked.pieces]
    found = sampling.Logprobs(*(np.concatenate(arrays)[order] for arrays in zip(*fetched, strict=True)))
    kept = [piece.logits for piece in asked.pieces if piece.logits is not None]
    logits = np.concatenate(kept)[order] if kept else None
    collected, end = [], 0
    for span in asked.spans:
        begin, end = end, end + span.tokens.size
        ids, values = found.tokens[begin:end], found.values[begin:end]
        if logits is not None and not 0 <= span.most <= TOP_LOGPROBS:
            ids, values = most_likely(logits[begin:end], found.norm[begin:end])
        most = ids.shape[1] if span.most < 0 else span.most
        collected.append(
            PromptLogprobs(
                span.entry,
                span.position,
                np.column_stack([span.tokens, ids[:, :most]]).ravel(),
                np.column_stack([found.sampled[begin:end], values[:, :most]]).ravel(),
                found.rank[begin:end],
            )
        )
    return collected
