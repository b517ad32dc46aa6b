"""The runner: owner of all that is on the device, and the only one to run programs there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bus import model_files
from bus.config import Config, ConfigError
from bus.log import get_logger
from bus.messages import Sampling
from bus.model_files import ModelFacts
from executor import compute, device, sampling, weights
from executor.attention import XlaAttention
from executor.compute import FIELDS, Bound, Model
from executor.constraints import Constraints, Line, compose
from executor.programs import Programs, bucket, sizes_up_to
from executor.progress import Progress
from executor.sampling import HISTORY_MULTIPLE, RowParams
from executor.shards import Array, over_shards
from executor.step import Float32, Int32, MergedStep, RowSetup, SampledStep

log = get_logger()

SMALLEST_MIXED = 16
"""Tokens of the smallest program for steps in which a sequence has more than one token."""

SETUP_TOKENS = 1024
SETUP_ROWS = 16
"""Tokens and rows that one call of the setup program writes, for each shard."""


class _Drawn(NamedTuple):
    """What the device has been asked to draw for a step. `shards` and `lines` say where the `indices` are found."""

    tokens: Array
    indices: Int32
    shards: Int32
    lines: Int32
    logprobs: sampling.Logprobs | None
    logits: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A step that was dispatched: give it to `Runner.collect`, once, in order."""

    size: int
    done: Array
    drawn: _Drawn | None
    wanted: dict[int, int]
    """Log-probabilities that the step's sequences want: how many besides the drawn token's, -1 for all, by index."""


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
    dispatched before the one before it is done. On a CPU, JAX runs a program in the thread that calls it unless an
    earlier one is still running; then it is queued.
    """

    def __init__(self, config: Config, model_dir: Path, progress: Progress, shards: int = 1) -> None:
        """Load the model and allocate everything. `shards` parts the ranks into data shards, all on one device.

        Raises:
            ModelError: the model cannot be served.
            ConfigError: the KV pool is too small for one sequence of `max_model_len`.
        """
        self._device = device.set_up(config.cache_path)
        facts = model_files.read(model_dir)
        dtype = device.dtype_of(config, self._device)
        self.block_size: int = config.block_size
        self.max_model_len = _max_model_len(config, facts)
        self.vocab_size = facts.vocab_size
        self._ranks = config.ranks
        self._ranks_per_shard = -(-config.ranks // shards)
        self._rows_per_shard = self._ranks_per_shard * config.max_num_seqs
        self._shards = shards
        self._max_blocks = -(-self.max_model_len // self.block_size)

        model = weights.load(facts, dtype, progress)
        self.num_blocks = self._derive_num_blocks(config, facts, dtype.itemsize)
        self._offsets, shard_blocks = self._lay_out_blocks()
        if min(map(self.blocks_of_rank, range(config.ranks))) < self._max_blocks:
            raise ConfigError(
                f"num_blocks: {self.num_blocks} KV blocks of {self.block_size} tokens for {config.ranks} ranks do not "
                f"hold a sequence of max_model_len {self.max_model_len} each; raise num_blocks or kv_memory_fraction, "
                f"or lower max_model_len"
            )
        shape = (shards, shard_blocks, self.block_size, 2 * facts.num_kv_heads, facts.head_dim)
        self._kv = [jnp.zeros(shape, dtype) for _ in range(facts.num_layers)]

        rows = self._rows_per_shard + 1
        width = -(-(self.max_model_len + 1) // HISTORY_MULTIPLE) * HISTORY_MULTIPLE
        floats, ints = sampling.pack(Sampling(seed=0, max_tokens=1, temperature=0.0), 0)
        self._history = jnp.zeros((shards, rows, width), jnp.int32)
        self._params = RowParams(
            jnp.tile(jnp.asarray(floats), (shards, rows, 1)), jnp.tile(jnp.asarray(ints), (shards, rows, 1))
        )
        self._greedy = np.ones(shards * self._rows_per_shard, np.bool_)
        self._logprobs: dict[int, int] = {}
        self._constraints: dict[int, Constraints] = {}

        graph, outer, layers = nnx.split(model, lambda path, _: path[0] != "layers", ...)
        self._outer, outer_tree = jax.tree.flatten(outer)
        self._layers, layers_tree = jax.tree.flatten(layers)
        self._programs = Programs()
        self._decode_sizes = sizes_up_to(self._rows_per_shard)
        most_tokens = self._ranks_per_shard * config.max_num_batched_tokens
        self._mixed_sizes = sizes_up_to(max(most_tokens, SMALLEST_MIXED), SMALLEST_MIXED)
        self._declare(Model(graph, outer_tree, layers_tree, layers), facts.hidden_size, dtype)

    def blocks_of_rank(self, rank: int) -> int:
        """KV blocks of a rank: its equal share of `num_blocks`. A remainder goes to the first ranks, one each."""
        share, remainder = divmod(self.num_blocks, self._ranks)
        return share + (rank < remainder)

    def warm_up(self, progress: Progress) -> None:
        """Compile all programs, or take them from the cache of an earlier start. After this no step compiles any."""
        self._programs.compile_all(progress)

    def dispatch(self, step: MergedStep) -> Handle:
        """Give a step to the device. Steps run in the order of these calls; several may be on their way."""
        self._set_up(step.setups)
        shards = step.ranks // np.int32(self._ranks_per_shard)
        counts = np.bincount(shards, minlength=self._shards)
        places = np.arange(step.rows.size, dtype=np.int32) - (np.cumsum(counts) - counts)[shards].astype(np.int32)
        most_tokens = int(np.bincount(shards, weights=step.num_tokens, minlength=self._shards).max())
        if step.num_tokens.max() == 1:
            name, size = "decode", bucket(self._decode_sizes, int(counts.max()))
            batch = self._pack_batch(step, shards, places, size)
        else:
            name, size = "mixed", bucket(self._mixed_sizes, most_tokens)
            batch = self._pack_batch(step, shards, places, self._rows_per_shard)
        hidden, self._kv = self._programs.run(name, size, self._outer, self._layers, self._kv, self._history, batch)
        drawn = self._draw(step, shards, places, hidden) if step.samples.any() else None
        wanted = {}
        if drawn is not None and drawn.logprobs is not None:
            wanted = {
                i: self._logprobs[row] for i in drawn.indices.tolist() if (row := int(step.rows[i])) in self._logprobs
            }
        return Handle(step.rows.size, hidden, drawn, wanted)

    def collect(self, handle: Handle) -> SampledStep:
        """Wait until a step is done, and fetch what it drew."""
        tokens = np.full(handle.size, -1, np.int32)
        if handle.drawn is None:
            handle.done.block_until_ready()
            return SampledStep(tokens)
        drawn = handle.drawn
        tokens[drawn.indices] = np.asarray(drawn.tokens)[drawn.shards, drawn.lines]
        return SampledStep(tokens, dict(_read_logprobs(drawn, handle.wanted)) if handle.wanted else {})

    # Memory

    def _derive_num_blocks(self, config: Config, facts: ModelFacts, itemsize: int) -> int:
        if config.num_blocks is not None:
            return config.num_blocks
        block = facts.num_layers * self.block_size * 2 * facts.num_kv_heads * facts.head_dim * itemsize
        free = device.free_memory(self._device)
        return min(
            int(free * config.kv_memory_fraction) // block, config.ranks * config.max_num_seqs * self._max_blocks
        )

    def _lay_out_blocks(self) -> tuple[Int32, int]:
        """Where each rank's blocks begin in its shard, int32 [ranks], and the blocks of a shard, the spare one too."""
        offsets = np.zeros(self._ranks, np.int32)
        largest = 1
        for rank in range(self._ranks):
            start = 1 if rank % self._ranks_per_shard == 0 else int(offsets[rank - 1]) + self.blocks_of_rank(rank - 1)
            offsets[rank] = start
            largest = max(largest, start + self.blocks_of_rank(rank))
        return offsets, largest

    # Programs

    def _declare(self, model: Model, hidden_size: int, dtype: Any) -> None:
        shards, rows = self._shards, self._rows_per_shard
        forward = jax.jit(model.forward, static_argnums=(5, 6, 7), donate_argnums=2)
        for name, sizes in (("decode", self._decode_sizes), ("mixed", self._mixed_sizes)):
            one_each = name == "decode"
            attention = XlaAttention(self.block_size, one_each)
            for size in sizes:
                batch = _int32(shards, size if one_each else rows, FIELDS + self._max_blocks)
                program = Bound(forward, (attention, size, rows))
                self._programs.add(name, size, program, self._outer, self._layers, self._kv, self._history, batch)
        head = jax.jit(model.head)
        greedy, draw, adjust, logprobs = (
            jax.jit(function, donate_argnums=donated)
            for function, donated in (
                (compute.greedy, 1),
                (compute.draw, 1),
                (compute.adjust, ()),
                (over_shards(sampling.logprobs), ()),
            )
        )
        hidden = jax.ShapeDtypeStruct((shards, rows, hidden_size), dtype)
        for size in self._decode_sizes:
            picks = _int32(shards, size, 3)
            logits = jax.ShapeDtypeStruct((shards, size, self.vocab_size), jnp.float32)
            adjustments = next(compose([[]] * shards, size, self.vocab_size))
            self._programs.add("head", size, head, self._outer, hidden, picks)
            self._programs.add("greedy", size, greedy, logits, self._history, picks)
            self._programs.add("draw", size, draw, logits, self._history, self._params, picks)
            self._programs.add("adjust", size, adjust, logits, self._history, self._params, picks, adjustments)
            self._programs.add("logprobs", size, logprobs, logits, _int32(shards, size))
        set_up = jax.jit(compute.set_up, donate_argnums=(0, 1))
        pieces = next(self._setup_pieces([]))
        self._programs.add("set_up", 1, set_up, self._history, self._params, *pieces)

    # A step

    def _set_up(self, setups: list[RowSetup]) -> None:
        for setup in setups:
            asked = setup.sampling
            self._greedy[setup.row] = asked.temperature < sampling.GREEDY_BELOW
            _keep(self._logprobs, setup.row, asked.logprobs)
            _keep(self._constraints, setup.row, Constraints.of(asked, setup.prompt_len, self.vocab_size))
        for pieces in self._setup_pieces(setups) if setups else ():
            self._history, self._params = self._programs.run("set_up", 1, self._history, self._params, *pieces)

    def _setup_pieces(self, setups: list[RowSetup]) -> Iterator[tuple[Int32, Int32, Float32, Int32]]:
        """Arguments for the setup program's calls: tokens [shards, n, 3] as (row, position, token), and parameters."""
        spare = self._rows_per_shard
        of_shard: list[list[RowSetup]] = [[] for _ in range(self._shards)]
        for setup in setups:
            of_shard[setup.row // spare].append(setup)
        tokens = [np.concatenate([_EMPTY, *map(self._history_entries, group)]) for group in of_shard]
        calls = max(1, *(-(-len(part) // SETUP_TOKENS) for part in tokens))
        calls = max(calls, *(-(-len(group) // SETUP_ROWS) for group in of_shard))
        for call in range(calls):
            entries = np.full((self._shards, SETUP_TOKENS, 3), (spare, 0, 0), np.int32)
            rows = np.full((self._shards, SETUP_ROWS), spare, np.int32)
            floats = np.tile(_SPARE_FLOATS, (self._shards, SETUP_ROWS, 1))
            ints = np.tile(_SPARE_INTS, (self._shards, SETUP_ROWS, 1))
            for shard, group in enumerate(of_shard):
                part = tokens[shard][call * SETUP_TOKENS : (call + 1) * SETUP_TOKENS]
                entries[shard, : len(part)] = part
                for place, setup in enumerate(group[call * SETUP_ROWS : (call + 1) * SETUP_ROWS]):
                    rows[shard, place] = setup.row % spare
                    floats[shard, place], ints[shard, place] = sampling.pack(setup.sampling, setup.prompt_len)
            yield entries, rows, floats, ints

    def _history_entries(self, setup: RowSetup) -> Int32:
        positions = np.arange(setup.start, setup.start + setup.tokens.size, dtype=np.int32)
        return np.stack([np.full_like(positions, setup.row % self._rows_per_shard), positions, setup.tokens], axis=1)

    def _pack_batch(self, step: MergedStep, shards: Int32, places: Int32, size: int) -> Int32:
        """`Batch`, packed into one array [shards, size, 3 + blocks], so that it travels at once."""
        batch = np.zeros((self._shards, size, FIELDS + self._max_blocks), np.int32)
        batch[:, :, 0] = self._rows_per_shard
        batch[shards, places, 0] = step.rows % self._rows_per_shard
        batch[shards, places, 1] = step.positions
        batch[shards, places, 2] = step.num_tokens
        used = -(-(step.positions + step.num_tokens) // self.block_size)
        widest = step.block_tables.shape[1]
        owned = np.arange(widest) < used[:, None]
        batch[shards, places, FIELDS : FIELDS + widest] = np.where(
            owned, step.block_tables + self._offsets[step.ranks][:, None], 0
        )
        return batch

    def _draw(self, step: MergedStep, shards: Int32, places: Int32, hidden: Array) -> _Drawn:
        indices = np.flatnonzero(step.samples).astype(np.int32)
        mine = shards[indices]
        counts = np.bincount(mine, minlength=self._shards)
        lines = np.arange(indices.size, dtype=np.int32) - (np.cumsum(counts) - counts)[mine].astype(np.int32)
        size = bucket(self._decode_sizes, int(counts.max()))
        rows = step.rows[indices]
        picks = np.zeros((self._shards, size, 3), np.int32)
        picks[:, :, 1] = self._rows_per_shard
        picks[mine, lines, 0] = places[indices]
        picks[mine, lines, 1] = rows % self._rows_per_shard
        picks[mine, lines, 2] = ends = step.positions[indices] + step.num_tokens[indices]

        logits = raw = self._programs.run("head", size, self._outer, hidden, picks)
        if not self._constraints.keys().isdisjoint(rows.tolist()):
            asking: list[list[Line]] = [[] for _ in range(self._shards)]
            for row, shard, line, end in zip(rows.tolist(), mine.tolist(), lines.tolist(), ends.tolist(), strict=True):
                if row in self._constraints:
                    asking[shard].append(Line(line, end, self._constraints[row]))
            for adjustments in compose(asking, size, self.vocab_size):
                logits = self._programs.run("adjust", size, logits, self._history, self._params, picks, adjustments)
        if self._greedy[rows].all():
            tokens, self._history = self._programs.run("greedy", size, logits, self._history, picks)
        else:
            tokens, self._history = self._programs.run("draw", size, logits, self._history, self._params, picks)
        logprobs = kept = None
        wanted = [self._logprobs[row] for row in rows.tolist() if row in self._logprobs] if self._logprobs else []
        if wanted:
            logprobs = self._programs.run("logprobs", size, raw, tokens)
            kept = raw if min(wanted) < 0 or max(wanted) > sampling.TOP_LOGPROBS else None
        return _Drawn(tokens, indices, mine, lines, logprobs, kept)


_SPARE_FLOATS, _SPARE_INTS = sampling.pack(Sampling(seed=0, max_tokens=1, temperature=0.0), 0)
_EMPTY = np.zeros((0, 3), np.int32)


def _read_logprobs(drawn: _Drawn, wanted: dict[int, int]) -> Iterator[tuple[int, tuple[Int32, Float32, int]]]:
    """From the device to what `SampledStep.logprobs` holds."""
    assert drawn.logprobs is not None
    found = sampling.Logprobs(*map(np.asarray, drawn.logprobs))
    tokens = np.asarray(drawn.tokens)
    for index, shard, line in zip(drawn.indices.tolist(), drawn.shards, drawn.lines, strict=True):
        if index not in wanted or tokens[shard, line] < 0:
            continue
        count = wanted[index]
        values, ids = found.values[shard, line], found.tokens[shard, line]
        if drawn.logits is not None and not 0 <= count <= values.size:
            row = np.asarray(drawn.logits[shard, line]) - found.norm[shard, line]
            ids = np.argsort(-row, kind="stable").astype(np.int32)
            values = row[ids]
        kept = ids.size if count < 0 else count
        yield (
            index,
            (
                np.concatenate([tokens[shard, line, None], ids[:kept]]),
                np.concatenate([found.sampled[shard, line, None], values[:kept]]),
                int(found.rank[shard, line]),
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


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
