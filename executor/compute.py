"""What a device computes in a step, within `shard_map`; the programs of a step are made of it.

Arrays with a leading axis of shards have one entry there, the device's own. Of logits a device has some of the lines of
its shard; everything else of a shard is the same on all its devices.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from executor import sampling
from executor.attention import Attention, Batch, Plan, Tokens
from executor.kernels.products import mark_unused
from executor.mesh import DATA, MODEL
from executor.models.layers import Linear
from executor.models.lora import Added, Chosen, Factors
from executor.sampling import RowParams
from executor.shards import Array, over_shards

FIELDS = 3
"""Columns of a packed batch before the block table: row, position, number of tokens. Where there may be adapters, a
last column has the sequences' slots."""

Adapters: TypeAlias = list[dict[str, Factors]]
"""The factors of all slots, of each of some layers, by the matrix's name in the layer; nothing without adapters."""


class Shared(NamedTuple):
    """What all layers of a step take."""

    rotation: tuple[Array, Array]
    plan: Plan
    last: Array
    """int32 [shards, sequences]: which token is the last of each sequence."""
    slots: Array | None
    """int32 [shards, tokens]: each token's adapter, see `lora.Chosen`; None without adapters."""


class PoolingPiece(NamedTuple):
    """What one call of the program that pools takes beside hidden states."""

    which: Array
    """int32 [shards, lines]: those that are added up, by their places among the hidden states."""
    rows: Array
    """int32 [shards, lines]: to whose sums."""
    weights: Array
    """float32 [shards, lines]"""
    begun: Array
    """bool [shards, rows + 1]: whose sums begin at 0."""
    told: Array
    """int32 [shards, lines]: whose sums are told."""


class Layer(NamedTuple):
    """A kind of layer: layers of a kind differ in nothing but the values of their parameters."""

    graph: Any
    tree: Any


class Model(NamedTuple):
    """A model as functions of its parameters, which are lists: one of each layer's, one of all others (`outer`)."""

    outer_graph: Any
    outer_tree: Any
    layers: tuple[Layer, ...]

    @classmethod
    def take_apart(cls, model: Any) -> tuple["Model", list[Any], list[list[Any]]]:
        """The functions of `model` (an `nnx.Module`), its outer parameters, and each layer's. `model` is used up."""
        parted = [nnx.split(layer) for layer in model.layers]
        model.layers = nnx.List([])
        outer_graph, outer = nnx.split(model)
        outer_leaves, outer_tree = jax.tree.flatten(outer)
        layers = tuple(Layer(graph, jax.tree.structure(state)) for graph, state in parted)
        return cls(outer_graph, outer_tree, layers), outer_leaves, [jax.tree.leaves(state) for _, state in parted]

    def enter(
        self, attention: Attention, num_tokens: int, adapters: bool, outer: list[Array], history: Array, packed: Array
    ) -> tuple[Array, Shared]:
        """What the first layer takes, for a batch with up to `num_tokens` tokens per shard, and what all layers take.

        `packed` int32 [shards, sequences, 3 + blocks] is a `Batch` in one array; with `adapters` it has a column more.
        """
        end = -1 if adapters else None
        batch = Batch(packed[..., 0], packed[..., 1], packed[..., 2], packed[..., FIELDS:end])
        tokens, last = over_shards(lambda batch: _spread(batch, num_tokens))(batch)
        ids = over_shards(lambda history, batch, tokens: history[batch.rows[tokens.sequences], tokens.positions])(
            history, batch, tokens
        )
        x, rotation = self._outer(outer).embed(ids, tokens.positions)
        if attention.marks_padding:
            x = mark_unused(x, tokens.valid)
        plan = attention.plan(batch, tokens)
        if not adapters:
            return x, Shared(rotation, plan, last, None)
        slots = over_shards(lambda slots, tokens: jnp.where(tokens.valid, slots[tokens.sequences], 0))
        return x, Shared(rotation, plan, last, slots(packed[..., -1], tokens))

    def run_layers(
        self,
        attention: Attention,
        lines: int,
        rank: int,
        kinds: tuple[Layer, ...],
        layers: list[list[Array]],
        kv: list[Array],
        x: Array,
        shared: Shared,
        adapters: Adapters,
    ) -> tuple[Array, Array, list[Array]]:
        """Run some layers, which are of these `kinds`. `rank` is that of each slot of `adapters`.

        Returns:
            Their output for the last token of each sequence [shards, lines, hidden], which there are at most `lines`
            of, their output, and their KV cache.
        """
        # One of each kind is traced and lowered for all: a start with compiled programs is mostly tracing.
        run = {kind: jax.jit(partial(_run_layer, kind, attention, rank)) for kind in kinds}
        new_kv = []
        for kind, layer, layer_kv, factors in zip(kinds, layers, kv, adapters, strict=True):
            x, layer_kv = run[kind](layer, layer_kv, x, shared, factors)
            new_kv.append(layer_kv)
        ending = over_shards(lambda x, last: x[last])(x, shared.last)
        return jnp.pad(ending, ((0, 0), (0, lines - ending.shape[1]), (0, 0))), x, new_kv

    def head(self, spare: int, outer: list[Array], ending: Array, picks: Array) -> Array:
        """Logits, float32 [shards, n, vocabulary], of the lines of `ending` that `picks` [shards, n, 3] names first.

        A device gets those of its lines. Padding names the row `spare`.
        """
        taken = over_shards(lambda x, picks: mark_unused(x[picks[:, 0]], picks[:, 1] != spare))(ending, picks)
        return self._outer(outer).logits(taken)

    def pool(self, outer: list[Array], ending: Array, sums: Array, piece: PoolingPiece) -> tuple[Array, Array]:
        """Add hidden states of `ending` [shards, n, hidden] to `sums`, float32 [shards, rows + 1, hidden].

        Returns:
            The sums, and those that are told, [shards, lines, hidden].
        """
        taken = over_shards(lambda x, which: x[which])(ending, piece.which)
        states = self._outer(outer).states(taken).astype(jnp.float32)
        return over_shards(_add_up)(sums, states, piece)

    def _outer(self, outer: list[Array]) -> Any:
        return nnx.merge(self.outer_graph, jax.tree.unflatten(self.outer_tree, outer))


def _add_up(sums: Array, states: Array, piece: PoolingPiece) -> tuple[Array, Array]:
    sums = jnp.where(piece.begun[:, None], 0, sums)
    sums = sums.at[piece.rows].add(states * piece.weights[:, None])
    return sums, sums[piece.told]


def _run_layer(
    kind: Layer,
    attention: Attention,
    rank: int,
    layer: list[Array],
    kv: Array,
    x: Array,
    shared: Shared,
    factors: dict[str, Factors],
) -> tuple[Array, Array]:
    merged = nnx.merge(kind.graph, jax.tree.unflatten(kind.tree, layer))
    if shared.slots is not None:
        chosen = Chosen(shared.slots, jnp.any(shared.slots > 0))
        for name, linear in adaptable(merged).items():
            linear.added = Added(factors[name], rank, chosen)
    return merged(x, shared.rotation, kv, attention, shared.plan)


def adaptable(layer: nnx.Module) -> dict[str, Linear]:
    """The matrices of a layer that adapters may add to, by their names in the layer: its projections, experts aside."""
    found = {".".join(map(str, path)): node for path, node in nnx.iter_graph(layer) if isinstance(node, Linear)}
    return {name: linear for name, linear in sorted(found.items()) if name.endswith("_proj")}


def place_adapter(rank: int, held: Adapters, one: Adapters, slot: Array) -> Adapters:
    """Put the factors of `one` adapter into the `slot` [1] of those that are `held`."""
    begin = (slot[0] - 1) * rank

    def put(held: Factors, one: Factors) -> Factors:
        return Factors(
            lax.dynamic_update_slice_in_dim(held.a, one.a, begin, axis=1),
            lax.dynamic_update_slice_in_dim(held.b, one.b, begin, axis=0),
        )

    return jax.tree.map(put, held, one, is_leaf=lambda node: isinstance(node, Factors))


def _spread(batch: Batch, num_tokens: int) -> tuple[Tokens, Array]:
    """From one shard's sequences to its tokens, and which token is the last of each sequence."""
    ends = jnp.cumsum(batch.num_tokens)
    at = jnp.arange(num_tokens, dtype=jnp.int32)
    sequences = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
    sequences = jnp.minimum(sequences, batch.rows.shape[0] - 1)
    within = at - (ends - batch.num_tokens)[sequences]
    valid = at < ends[-1]
    positions = jnp.where(valid, batch.positions[sequences] + within, 0)
    return Tokens(sequences, positions, valid), jnp.maximum(ends - 1, 0)


def lines(x: Array, tokens: Array) -> Array:
    """The output for certain `tokens` [shards, lines] of a step, [shards, lines, hidden]: `x` has that of all."""
    return over_shards(lambda x, tokens: x[tokens])(x, tokens)


def set_up(
    history: Array, params: RowParams, tokens: Array, rows: Array, floats: Array, ints: Array
) -> tuple[Array, RowParams]:
    """Write tokens and parameters of rows that begin or continue; see `placement.SetupPiece`."""
    return over_shards(
        lambda history, params, tokens, rows, floats, ints: (
            history.at[tokens[:, 0], tokens[:, 1]].set(tokens[:, 2]),
            RowParams(params.floats.at[rows].set(floats), params.ints.at[rows].set(ints)),
        )
    )(history, params, tokens, rows, floats, ints)


def _my_lines(logits: Array, x: Array) -> Array:
    """Of `x` [n, …], an entry for each line of a shard, those of the lines [m, vocabulary] that this device has."""
    if lax.axis_size(MODEL) == 1:
        return x
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * logits.shape[0], logits.shape[0])


def _commit(tokens: Array, history: Array, picks: Array) -> tuple[Array, Array]:
    """All lines' `tokens`, and the history with them; what could not be drawn stands there as token 0."""
    tokens = lax.all_gather(tokens, MODEL, tiled=True)
    return tokens, history.at[picks[:, 1], picks[:, 2]].set(jnp.maximum(tokens, 0))


def greedy(logits: Array, history: Array, picks: Array) -> tuple[Array, Array]:
    return over_shards(lambda logits, history, picks: _commit(sampling.greedy(logits), history, picks))(
        logits, history, picks
    )


def draw(logits: Array, history: Array, params: RowParams, picks: Array) -> tuple[Array, Array]:
    def of_shard(logits: Array, history: Array, params: RowParams, picks: Array) -> tuple[Array, Array]:
        mine = _my_lines(logits, picks)
        return _commit(sampling.draw(logits, params, mine[:, 1], mine[:, 2]), history, picks)

    return over_shards(of_shard)(logits, history, params, picks)


def adjust(logits: Array, history: Array, params: RowParams, picks: Array, adjustments: sampling.Adjustments) -> Array:
    def of_shard(
        logits: Array, history: Array, params: RowParams, picks: Array, adjustments: sampling.Adjustments
    ) -> Array:
        mine = _my_lines(logits, picks)
        return sampling.adjust(logits, history, params, mine[:, 1], mine[:, 2], _mine(adjustments, logits))

    return over_shards(of_shard)(logits, history, params, picks, adjustments)


def _mine(adjustments: sampling.Adjustments, logits: Array) -> sampling.Adjustments:
    """What there is for the lines that this device has: others become padding."""
    if lax.axis_size(MODEL) == 1:
        return adjustments
    count = logits.shape[0]

    def local(lines: Array) -> Array:
        lines = lines - lax.axis_index(MODEL) * count
        return jnp.where((lines >= 0) & (lines < count), lines, count)

    return adjustments._replace(
        allowed=_my_lines(logits, adjustments.allowed),
        bias_line=local(adjustments.bias_line),
        ban_line=local(adjustments.ban_line),
    )


def logprobs(logits: Array, tokens: Array) -> sampling.Logprobs:
    return over_shards(lambda logits, tokens: sampling.logprobs(logits, _my_lines(logits, tokens)))(logits, tokens)


def gather_shards(x: Array) -> Array:
    """All shards' entries of `x` [shards, …], for every device to have."""
    return lax.all_gather(x, DATA, tiled=True)


def gather_lines(x: Any) -> Any:
    """All lines, of all shards, of arrays [shards, lines, …], for every device to have."""
    return jax.tree.map(lambda x: gather_shards(lax.all_gather(x, MODEL, axis=1, tiled=True)), x)
