"""Drive a `Runner` as the executor's host side does: rows, blocks and positions, without ranks and buses."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bus.config import Config
from bus.messages import Sampling
from executor.runner import Handle, Runner
from executor.step import Drafts, Masks, MergedStep, PromptLogprobs, RowSetup, SampledStep

GREEDY = Sampling(seed=0, max_tokens=1000, temperature=0.0)

Where = tuple[int, int]
"""A rank, and a row of it."""


@dataclass
class _Row:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    pending: int = 0
    adapter: int = 0


class Driver:
    """Runs steps over rows whose blocks are dealt out at random."""

    def __init__(self, model: Path, cache: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {"ranks": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8}
        defaults |= {"max_model_len": 256, "num_blocks": 200, "cache_dir": str(cache)}
        self.config = Config(**defaults | settings)
        self.runner = Runner(self.config, model, lambda *_: None, keep_scores=True)
        self.rows: dict[Where, _Row] = {}
        self.logprobs: dict[Where, tuple[np.ndarray, np.ndarray, int]] = {}
        self.all_logprobs: dict[Where, list[tuple[np.ndarray, np.ndarray, int]]] = {}
        self.prompt_logprobs: dict[Where, list[PromptLogprobs]] = {}
        self.pooled: dict[Where, np.ndarray] = {}
        self._setups: list[RowSetup] = []
        self._random = random.Random(0)
        self._free = [list(range(self.runner.blocks_of_rank(rank))) for rank in range(self.config.ranks)]
        for blocks in self._free:
            self._random.shuffle(blocks)

    def start(
        self,
        where: Where,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        output: Sequence[int] = (),
        adapter: int = 0,
    ) -> None:
        """Set a row up, with output that it had before; `adapter` is a slot, 0 is none."""
        self.stop(where)
        self.rows[where] = _Row([*prompt, *output], adapter=adapter)
        self._set_up(where, 0, [*prompt, *output], len(prompt), sampling)

    def load(self, slot: int, folder: Path, name: str = "adapter") -> None:
        """Put the adapter in a folder into a slot."""
        self.runner.place_adapter(slot, self.runner.read_adapter(name, str(folder)))

    def resume(self, where: Where, drop: int, tokens: Sequence[int], sampling: Sampling = GREEDY) -> None:
        """A session's next turn."""
        row = self.rows[where]
        base = len(row.tokens) - drop
        row.tokens[base:] = tokens
        row.computed = min(row.computed, base)
        self._set_up(where, base, tokens, len(row.tokens), sampling)

    def stop(self, where: Where) -> None:
        """Give a row's blocks back; what is in them stays as it is."""
        if where in self.rows:
            self._free[where[0]] += self.rows.pop(where).blocks
            self._random.shuffle(self._free[where[0]])

    def clear(self) -> None:
        """Stop all rows, and forget what was told of them."""
        for where in list(self.rows):
            self.stop(where)
        self._setups.clear()
        for told in (self.logprobs, self.all_logprobs, self.prompt_logprobs, self.pooled):
            told.clear()

    def history(self, where: Where) -> list[int]:
        """A row's tokens as they are on the device (of one shard), up to where the host knows them."""
        row = where[0] * self.config.max_num_seqs + where[1]
        return np.asarray(self.runner._history)[0, row, : len(self.rows[where].tokens)].tolist()

    def kv(self, where: Where) -> np.ndarray:
        """What the KV cache (of one shard) holds of a row's computed tokens, [layers, tokens, …]."""
        row = self.rows[where]
        first = 1 + sum(self.runner.blocks_of_rank(rank) for rank in range(where[0]))
        blocks = np.array(row.blocks, np.int32) + first
        layers = [np.asarray(kv)[0, blocks] for group in self.runner._network.kv for kv in group]
        return np.stack([layer.reshape(-1, *layer.shape[2:])[: row.computed] for layer in layers])

    def left(self, where: Where) -> int:
        """Known tokens of a row that are not computed."""
        row = self.rows[where]
        return len(row.tokens) + row.pending - row.computed

    def send(
        self,
        num_tokens: Mapping[Where, int],
        drafts: Mapping[Where, Sequence[int] | int] = MappingProxyType({}),
        masks: Mapping[Where, Sequence[Sequence[int]]] = MappingProxyType({}),
    ) -> tuple[list[Where], Handle]:
        """Dispatch a step; `take` its results in the same order. `drafts` come after the `num_tokens` of their row.

        `masks` has what each token that a row draws may be.
        """
        order = sorted(num_tokens)
        many = {where: given if isinstance(given, int) else len(given) for where, given in drafts.items()}
        samples, tables, positions = [], [], []
        for where in order:
            row = self.rows[where]
            positions.append(row.computed)
            row.computed += num_tokens[where]
            assert self.left(where) >= 0
            samples.append(self.left(where) == 0)
            row.pending += samples[-1]
            assert samples[-1] or where not in drafts
            while len(row.blocks) * self.config.block_size < row.computed + many.get(where, 0):
                row.blocks.append(self._free[where[0]].pop())
            first = self.runner.first_blocks[where[0]]
            tables.append([first + block for block in row.blocks])
        widest = max(map(len, tables))
        tried = np.array([many.get(where, 0) for where in order], np.int32)
        known = [given for where in order if not isinstance(given := drafts.get(where, ()), int)]
        tokens = np.array([token for given in known for token in given], np.int32)
        step = MergedStep(
            setups=self._setups,
            ranks=np.array([rank for rank, _ in order], np.int32),
            rows=np.array([rank * self.config.max_num_seqs + row for rank, row in order], np.int32),
            positions=np.array(positions, np.int32),
            num_tokens=np.array([num_tokens[where] for where in order], np.int32) + tried,
            samples=np.array(samples, np.bool_),
            block_tables=np.array([table + [0] * (widest - len(table)) for table in tables], np.int32),
            drafts=Drafts(tried, tokens) if drafts else None,
            masks=self._masks(order, masks),
        )
        self._setups = []
        return order, self.runner.dispatch(step)

    def _masks(self, order: list[Where], allowed: Mapping[Where, Sequence[Sequence[int]]]) -> Masks:
        lines = [(order.index(where), tokens) for where, several in allowed.items() for tokens in several]
        bits = np.zeros((len(lines), -(-self.runner.vocab_size // 32) * 32), np.bool_)
        for line, (_, tokens) in zip(bits, lines, strict=True):
            line[list(tokens)] = True
        at = np.array([place for place, _ in lines], np.int32)
        return Masks(at, np.packbits(bits, axis=1, bitorder="little").view("<u4"))

    def take(self, sent: tuple[list[Where], Handle]) -> dict[Where, int]:
        """What a step without drafts drew: a token for every row that ran, -1 where it did not sample."""
        return {where: token for where, (token,) in self.take_tried(sent).items()}

    def take_tried(self, sent: tuple[list[Where], Handle]) -> dict[Where, list[int]]:
        """What a step drew: a token for every row that ran, -1 where it did not sample, and those that drafts gave."""
        order, handle = sent
        sampled: SampledStep = self.runner.collect(handle)
        counts = np.ones(len(order), np.int32) if sampled.counts is None else sampled.counts
        result = {}
        for found in sampled.prompt_logprobs:
            self.prompt_logprobs.setdefault(order[found.entry], []).append(found)
        for entry, vector in sampled.pooled:
            self.pooled[order[entry]] = vector
        for index, (where, tokens) in enumerate(
            zip(order, np.split(sampled.tokens, np.cumsum(counts)[:-1]), strict=True)
        ):
            result[where] = tokens.tolist()
            if tokens[0] != -1 and where in self.rows:
                self.rows[where].tokens += tokens.tolist()
                self.rows[where].pending -= 1
                self.rows[where].computed += tokens.size - 1
            for drawn in sampled.logprobs.get(index, ()):
                self.logprobs[where] = drawn
                self.all_logprobs.setdefault(where, []).append(drawn)
        return result

    def step(
        self, num_tokens: Mapping[Where, int], masks: Mapping[Where, Sequence[Sequence[int]]] = MappingProxyType({})
    ) -> dict[Where, int]:
        return self.take(self.send(num_tokens, masks=masks))

    def prefill(self, where: Where, chunk: int = 64) -> int:
        """Compute what is known of a row, in chunks; the token drawn at its end."""
        row = self.rows[where]
        token = -1
        while row.computed < len(row.tokens) and token == -1:
            token = self.step({where: min(chunk, len(row.tokens) - row.computed)})[where]
        return token

    def generate(self, where: Where, count: int, chunk: int = 64) -> list[int]:
        """The next `count` tokens of a row that has been set up."""
        tokens = [self.prefill(where, chunk)]
        while len(tokens) < count:
            tokens.append(self.step({where: 1})[where])
        return tokens

    def logits(self, where: Where, chunk: int = 64) -> np.ndarray:
        """Log-probabilities of all tokens after what is known of a row, which was set up with `logprobs` -1."""
        self.prefill(where, chunk)
        return self.drawn_from(where)

    def drawn_from(self, where: Where) -> np.ndarray:
        """Log-probabilities of all tokens where the last one of a row with `logprobs` -1 was drawn."""
        tokens, values, _ = self.logprobs[where]
        by_token = np.empty(self.runner.vocab_size, np.float32)
        by_token[tokens[1:]] = values[1:]
        return by_token

    def take_prompt(self, where: Where) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was found of a row's prompt since the last time, which began with its second token and had no gap.

        Token ids and values [n, 1 + k] and ranks [n], as in `Logprobs`.
        """
        parts = self.prompt_logprobs.pop(where)
        position = 1
        for part in parts:
            assert part.position == position
            position += part.ranks.size
        ids, values = (
            np.concatenate([array.reshape(part.ranks.size, -1) for part, array in zip(parts, arrays, strict=True)])
            for arrays in ([part.token_ids for part in parts], [part.values for part in parts])
        )
        return ids, values, np.concatenate([part.ranks for part in parts])

    def _set_up(self, where: Where, start: int, tokens: Sequence[int], prompt_len: int, sampling: Sampling) -> None:
        row = where[0] * self.config.max_num_seqs + where[1]
        adapter = self.rows[where].adapter
        self._setups.append(RowSetup(row, start, np.array(tokens, np.int32), prompt_len, sampling, adapter))
