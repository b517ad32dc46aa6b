"""The runner: owner of all that is on the device, and the only one to run programs there."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bus import model_files
from bus.config import Config, ConfigError
from bus.model_files import ModelFacts
from executor import compute, device, sampling, weights
from executor.attention import XlaAttention
from executor.attention_cpu import KernelAttention
from executor.compute import FIELDS, Model
from executor.constraints import Constraints, Line, compose
from executor.kernels import library, products
from executor.kv_layout import KvLayout
from executor.placement import SETUP_TOKENS, Placement, Places
from executor.programs import Programs, bucket, sizes_up_to
from executor.progress import Progress
from executor.sampling import HISTORY_MULTIPLE, TOP_LOGPROBS, Adjustments, RowParams
from executor.shards import Array
from executor.step import Float32, Int32, MergedStep, RowSetup, SampledStep

SMALLEST_MIXED = 16
"""Tokens of the smallest program for steps in which a sequence has more than one token."""

MOST_LAYERS = 3
"""Layers in one program on a CPU, at most. With all 30 of the embedded model in one, a start from the cache takes twice
the time; a call costs 0.1 ms. (On a TPU all layers are one program.)"""


class _Drawn(NamedTuple):
    """What the device has been asked to draw."""

    tokens: Array
    """int32 [shards, n]"""
    indices: Int32
    """Entries of the step that draw; `places` says where in `tokens`."""
    places: Places
    wanted: dict[int, int]
    """Which of the entries want log-probabilities, and how many besides the drawn token's; -1 for all."""
    logprobs: sampling.Logprobs | None
    logits: Array | None
    """float32 [shards, n, vocabulary], kept where an entry wants more than `TOP_LOGPROBS`."""
    picks: Int32
    adjusted: Array | None
    """The logits after all adjustments, kept by a runner with `keep_scores`."""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A step that was dispatched: give it to `Runner.collect`, once, in order."""

    size: int
    done: Array
    drawn: _Drawn | None


class Runner:
    """Runs merged steps on one device.

    Per row it keeps, for every rank's `max_num_seqs` rows and one spare row per data shard, which padding uses:

    | where  | what                          | bytes                                                    |
    |--------|-------------------------------|----------------------------------------------------------|
    | device | tokens, prompt and output     | 4 × (max_model_len + 1, up to the next multiple of 256)  |
    | device | sampling parameters, numbers  | 6 × 4 (float32) + 4 × 4 (int32: top_k, prompt_len, seed) |
    | host   | `Constraints`, for rows with  | vocabulary / 8 with allowed tokens, else a few hundred   |
    | host   | whether greedy, log-probs     | 1 + 8                                                    |

    Positions come with each step, penalty counts and bans are derived from the tokens when they are needed, and the
    key of a draw is (seed, position): there is nothing else to roll back when tokens are dropped.

    A row's tokens are where a step's inputs are read from and where drawn tokens are written to, so a step can be
    dispatched before the one before it is done. JAX queues programs on a CPU, too: of a step of 100 ms a dispatch takes
    1 to 2.
    """

    def __init__(
        self, config: Config, model_dir: Path, progress: Progress, shards: int = 1, *, keep_scores: bool = False
    ) -> None:
        """Load the model and allocate everything. `shards` parts the ranks into data shards, all on one device.

        With `keep_scores` handles hold what `scores` needs: the logits of all that a step draws.

        Raises:
            ModelError: the model cannot be served.
            ConfigError: the KV pool is too small for one sequence of `max_model_len`.
        """
        where = device.set_up(config.cache_path)
        facts = model_files.read(model_dir)
        dtype = device.dtype_of(config, where)
        self.block_size: int = config.block_size
        self.max_model_len = _max_model_len(config, facts)
        self.vocab_size = facts.vocab_size
        self._keep_scores = keep_scores

        model = weights.load(facts, dtype, progress)
        kernels = where.platform == "cpu" and dtype == jnp.float32 and library.load(config.cache_path)
        if kernels:
            products.pack_model(model)
        functions, self._outer, layers = Model.take_apart(model)
        block_shape = (self.block_size, 2 * facts.num_kv_heads, facts.head_dim)
        block_bytes = facts.num_layers * math.prod(block_shape) * dtype.itemsize
        self._kv_layout = KvLayout(config, self.max_model_len, block_bytes, device.memory_for_sharing(where), shards)
        together = facts.num_layers if where.platform == "tpu" else _largest_divisor(facts.num_layers, MOST_LAYERS)
        starts = range(0, facts.num_layers, together)
        self._layers = [layers[start : start + together] for start in starts]
        kv_shape = (shards, self._kv_layout.shard_blocks, *block_shape)
        self._kv = [[jnp.zeros(kv_shape, dtype) for _ in range(together)] for _ in starts]

        self._placement = Placement(shards, -(-config.ranks // shards), config.max_num_seqs)
        rows = self._placement.rows
        width = -(-(self.max_model_len + 1) // HISTORY_MULTIPLE) * HISTORY_MULTIPLE
        self._history = jnp.zeros((shards, rows + 1, width), jnp.int32)
        self._params = RowParams(*map(jnp.asarray, self._placement.blank_params()))
        self._greedy = np.ones(shards * rows, np.bool_)
        self._logprobs: dict[int, int] = {}
        self._constraints: dict[int, Constraints] = {}

        self._decode_sizes = sizes_up_to(rows)
        most_tokens = self._placement.ranks_per_shard * config.max_num_batched_tokens
        self._mixed_sizes = sizes_up_to(max(most_tokens, SMALLEST_MIXED), SMALLEST_MIXED)
        self._programs = Programs()
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self._declare(functions, kernels and KernelAttention.takes(*heads, dtype))

    @property
    def num_blocks(self) -> int:
        """KV blocks of all ranks together."""
        return self._kv_layout.num_blocks

    def blocks_of_rank(self, rank: int) -> int:
        """KV blocks of a rank: its equal share of `num_blocks`. A remainder goes to the first ranks, one each."""
        return self._kv_layout.blocks_of_rank(rank)

    @property
    def first_blocks(self) -> list[int]:
        """What steps' block tables have for each rank's block 0; see `merge.Limits`."""
        return self._kv_layout.first_blocks

    def warm_up(self, progress: Progress) -> None:
        """Compile all programs, or take them from the cache of an earlier start. After this no step compiles any."""
        self._trace()
        self._programs.compile_all(progress)

    def dispatch(self, step: MergedStep) -> Handle:
        """Give a step to the device. Steps run in the order of these calls; several may be on their way."""
        self._set_up(step.setups)
        places = self._placement.place(step.rows)
        if step.num_tokens.max() == 1:
            name, size = "decode", bucket(self._decode_sizes, places.most)
            sequences = size
        else:
            name, size = "mixed", bucket(self._mixed_sizes, self._placement.most_tokens(step, places))
            sequences = self._placement.rows
        batch = self._placement.pack_batch(step, places, sequences, self._kv_layout.most_blocks)
        x, shared = self._programs.run(f"{name} enter", size, self._outer, self._history, batch)
        for place, layers in enumerate(self._layers):
            ending, x, self._kv[place] = self._programs.run(f"{name} layers", size, layers, self._kv[place], x, shared)
        drawn = self._draw(step, places, ending) if step.samples.any() else None
        return Handle(step.rows.size, ending, drawn)

    def collect(self, handle: Handle) -> SampledStep:
        """Wait until a step is done, and fetch what it drew."""
        tokens = np.full(handle.size, -1, np.int32)
        if handle.drawn is None:
            handle.done.block_until_ready()
            return SampledStep(tokens)
        drawn = handle.drawn
        tokens[drawn.indices] = np.asarray(drawn.tokens)[drawn.places.shards, drawn.places.places]
        return SampledStep(tokens, dict(_read_logprobs(drawn)))

    def scores(self, handle: Handle, index: int) -> Float32:
        """What the token at `index` of a step was the largest of, float32 [vocabulary], top-k and the like aside.

        That is its logits after all adjustments, or if it is drawn, these by the temperature, plus the noise. To be
        called before a later step sets the row up anew, on a runner with `keep_scores`.
        """
        drawn = handle.drawn
        assert drawn is not None
        assert drawn.adjusted is not None
        place = int(np.flatnonzero(drawn.indices == index)[0])
        shard, line = int(drawn.places.shards[place]), int(drawn.places.places[place])
        row, end = (int(value) for value in drawn.picks[shard, line, 1:])
        logits = drawn.adjusted[shard, line]
        temperature = float(self._params.floats[shard, row, 0])
        if temperature < sampling.GREEDY_BELOW:
            return np.asarray(logits)
        ints = self._params.ints[shard, row]
        noise = sampling.gumbel(self.vocab_size, ints[2:3], ints[3:4], jnp.array([end], jnp.int32))[0]
        return np.asarray(logits / temperature + noise)

    # Programs

    def _declare(self, model: Model, kernels: bool) -> None:
        """Name all programs that steps can need, in all sizes; with attention in a kernel, or XLA's."""
        add = self._programs.add
        for name, sizes in (("decode", self._decode_sizes), ("mixed", self._mixed_sizes)):
            attention = KernelAttention() if kernels else XlaAttention(self.block_size, one_each=name == "decode")
            for size in sizes:
                add(f"{name} enter", size, partial(model.enter, attention, size))
                layers = partial(model.run_layers, attention, self._placement.rows)
                add(f"{name} layers", size, layers, donate=(1, 2))
        for size in self._decode_sizes:
            add("head", size, model.head)
            add("adjust", size, compute.adjust)
            add("greedy", size, compute.greedy, donate=(1,))
            add("draw", size, compute.draw, donate=(1,))
            add("logprobs", size, compute.logprobs)
        add("set up", SETUP_TOKENS, compute.set_up, donate=(0, 1))

    def _trace(self) -> None:
        """Trace what `_declare` named, with the shapes that steps will give."""
        trace = self._programs.trace
        shards = self._placement.shards
        for name, sizes in (("decode", self._decode_sizes), ("mixed", self._mixed_sizes)):
            for size in sizes:
                sequences = size if name == "decode" else self._placement.rows
                batch = _int32(shards, sequences, FIELDS + self._kv_layout.most_blocks)
                x, shared = trace(f"{name} enter", size, self._outer, self._history, batch)
                ending, *_ = trace(f"{name} layers", size, self._layers[0], self._kv[0], x, shared)
        for size in self._decode_sizes:
            picks = _int32(shards, size, 3)
            logits = trace("head", size, self._outer, ending, picks)
            adjustments = next(compose([[]] * shards, size, self.vocab_size))
            trace("adjust", size, logits, self._history, self._params, picks, adjustments)
            trace("greedy", size, logits, self._history, picks)
            tokens, _ = trace("draw", size, logits, self._history, self._params, picks)
            trace("logprobs", size, logits, tokens)
        trace("set up", SETUP_TOKENS, self._history, self._params, *next(self._placement.setup_pieces([])))

    # A step

    def _set_up(self, setups: list[RowSetup]) -> None:
        for setup in setups:
            asked = setup.sampling
            self._greedy[setup.row] = asked.temperature < sampling.GREEDY_BELOW
            _keep(self._logprobs, setup.row, asked.logprobs)
            _keep(self._constraints, setup.row, Constraints.of(asked, setup.prompt_len, self.vocab_size))
        for piece in self._placement.setup_pieces(setups) if setups else ():
            arguments = (self._history, self._params, *piece)
            self._history, self._params = self._programs.run("set up", SETUP_TOKENS, *arguments)

    def _draw(self, step: MergedStep, places: Places, ending: Array) -> _Drawn:
        """Draw for the sequences of a step that sample, `ending` being their last tokens' output."""
        indices, drawn = self._placement.draws(step, places)
        rows = step.rows[indices]
        size = bucket(self._decode_sizes, drawn.most)
        picks = self._placement.pack_picks(step, places, indices, drawn, size)
        logits = raw = self._programs.run("head", size, self._outer, ending, picks)
        for adjustments in self._adjustments(picks, rows, drawn, size):
            logits = self._programs.run("adjust", size, logits, self._history, self._params, picks, adjustments)
        if self._greedy[rows].all():
            tokens, self._history = self._programs.run("greedy", size, logits, self._history, picks)
        else:
            tokens, self._history = self._programs.run("draw", size, logits, self._history, self._params, picks)
        wanted = (
            {i: self._logprobs[row] for i, row in enumerate(rows.tolist()) if row in self._logprobs}
            if self._logprobs
            else {}
        )
        logprobs = self._programs.run("logprobs", size, raw, tokens) if wanted else None
        kept = raw if any(not 0 <= count <= TOP_LOGPROBS for count in wanted.values()) else None
        adjusted = logits if self._keep_scores else None
        return _Drawn(tokens, indices, drawn, wanted, logprobs, kept, picks, adjusted)

    def _adjustments(self, picks: Int32, rows: Int32, drawn: Places, size: int) -> Iterable[Adjustments]:
        """What the rows that are drawn for ask for, one for each call of the program."""
        if self._constraints.keys().isdisjoint(rows.tolist()):
            return ()
        asking: list[list[Line]] = [[] for _ in range(self._placement.shards)]
        for row, shard, line in zip(rows.tolist(), drawn.shards.tolist(), drawn.places.tolist(), strict=True):
            if row in self._constraints:
                asking[shard].append(Line(line, int(picks[shard, line, 2]), self._constraints[row]))
        return compose(asking, size, self.vocab_size)


def _read_logprobs(drawn: _Drawn) -> Iterator[tuple[int, tuple[Int32, Float32, int]]]:
    """From the device to what `SampledStep.logprobs` holds."""
    if drawn.logprobs is None:
        return
    found = sampling.Logprobs(*map(np.asarray, drawn.logprobs))
    tokens = np.asarray(drawn.tokens)
    for entry, count in drawn.wanted.items():
        at = (int(drawn.places.shards[entry]), int(drawn.places.places[entry]))
        if tokens[at] < 0:
            continue
        ids, values = found.tokens[at], found.values[at]
        if drawn.logits is not None and not 0 <= count <= TOP_LOGPROBS:
            all_values = np.asarray(drawn.logits)[at] - found.norm[at]
            ids = np.argsort(-all_values, kind="stable").astype(np.int32)
            values = all_values[ids]
        kept = ids.size if count < 0 else count
        yield (
            int(drawn.indices[entry]),
            (
                np.concatenate([tokens[at][None], ids[:kept]]),
                np.concatenate([found.sampled[at][None], values[:kept]]),
                int(found.rank[at]),
            ),
        )


def _keep(where: dict[int, Any], row: int, value: Any) -> None:
    """Hold `value` for a row, or nothing if it is None."""
    if value is None:
        where.pop(row, None)
    else:
        where[row] = value


def _max_model_len(config: Config, facts: ModelFacts) -> int:
    wanted = config.max_model_len or facts.max_positions
    if wanted > facts.max_positions:
        raise ConfigError(f"max_model_len: {wanted} is not allowed; the model takes at most {facts.max_positions}")
    return wanted


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if number % size == 0)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
