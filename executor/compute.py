"""What the device computes in a step, as functions over all data shards; the runner's programs are made of them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from executor import sampling
from executor.attention import Attention, Batch, Plan, Tokens
from executor.sampling import RowParams
from executor.shards import Array, over_shards

FIELDS = 3
"""Columns of a packed batch before the block table: row, position, number of tokens."""


class Shared(NamedTuple):
    """What all layers of a step take."""

    rotation: tuple[Array, Array]
    plan: Plan
    last: Array
    """int32 [shards, sequences]: which token is the last of each sequence."""


class Model(NamedTuple):
    """A model as functions of its parameters, which are lists: one of each layer's, one of all others (`outer`)."""

    outer_graph: Any
    outer_tree: Any
    layer_graph: Any
    layer_tree: Any

    @classmethod
    def take_apart(cls, model: Any) -> tuple["Model", list[Array], list[list[Array]]]:
        """The functions of `model` (an `nnx.Module`), its outer parameters, and each layer's. `model` is used up."""
        layers = [nnx.split(layer) for layer in model.layers]
        model.layers = nnx.List([])
        outer_graph, outer = nnx.split(model)
        outer_leaves, outer_tree = jax.tree.flatten(outer)
        layer_graph, layer_tree = layers[0][0], jax.tree.structure(layers[0][1])
        made = cls(outer_graph, outer_tree, layer_graph, layer_tree)
        return made, outer_leaves, [jax.tree.leaves(state) for _, state in layers]

    def enter(
        self, attention: Attention, num_tokens: int, outer: list[Array], history: Array, packed: Array
    ) -> tuple[Array, Shared]:
        """What the first layer takes, for a batch with up to `num_tokens` tokens per shard, and what all layers take.

        `packed` int32 [shards, sequences, 3 + blocks] is a `Batch` in one array.
        """
        batch = Batch(packed[..., 0], packed[..., 1], packed[..., 2], packed[..., FIELDS:])
        tokens, last = over_shards(lambda batch: _spread(batch, num_tokens))(batch)
        ids = over_shards(lambda history, batch, tokens: history[batch.rows[tokens.sequences], tokens.positions])(
            history, batch, tokens
        )
        x, rotation = self._outer(outer).embed(ids, tokens.positions)
        return x, Shared(rotation, attention.plan(batch, tokens), last)

    def run_layers(
        self,
        attention: Attention,
        rows: int,
        layers: list[list[Array]],
        kv: list[Array],
        x: Array,
        shared: Shared,
    ) -> tuple[Array, Array, list[Array]]:
        """Run some layers.

        Returns:
            Their output for the last token of each sequence [shards, rows, hidden], their output, and their KV cache.
        """
        # They look alike, so one is traced and lowered for all: a start with compiled programs is mostly tracing.
        run = jax.jit(partial(self._run_layer, attention))
        new_kv = []
        for layer, layer_kv in zip(layers, kv, strict=True):
            x, layer_kv = run(layer, layer_kv, x, shared)
            new_kv.append(layer_kv)
        ending = over_shards(lambda x, last: x[last])(x, shared.last)
        return jnp.pad(ending, ((0, 0), (0, rows - ending.shape[1]), (0, 0))), x, new_kv

    def head(self, outer: list[Array], ending: Array, picks: Array) -> Array:
        """Logits, float32 [shards, n, vocabulary], of the sequences that `picks` [shards, n, 3] names first."""
        return self._outer(outer).logits(over_shards(lambda x, picks: x[picks[:, 0]])(ending, picks))

    def _outer(self, outer: list[Array]) -> Any:
        return nnx.merge(self.outer_graph, jax.tree.unflatten(self.outer_tree, outer))

    def _run_layer(
        self, attention: Attention, layer: list[Array], kv: Array, x: Array, shared: Shared
    ) -> tuple[Array, Array]:
        merged = nnx.merge(self.layer_graph, jax.tree.unflatten(self.layer_tree, layer))
        return merged(x, shared.rotation, kv, attention, shared.plan)


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


def _commit(tokens: Array, history: Array, picks: Array) -> tuple[Array, Array]:
    """Put what was drawn into the history; what could not be drawn stands there as token 0."""
    return tokens, history.at[picks[:, 1], picks[:, 2]].set(jnp.maximum(tokens, 0))


def greedy(logits: Array, history: Array, picks: Array) -> tuple[Array, Array]:
    return over_shards(lambda logits, history, picks: _commit(sampling.greedy(logits), history, picks))(
        logits, history, picks
    )


def draw(logits: Array, history: Array, params: RowParams, picks: Array) -> tuple[Array, Array]:
    return over_shards(
        lambda logits, history, params, picks: _commit(
            sampling.draw(logits, params, picks[:, 1], picks[:, 2]), history, picks
        )
    )(logits, history, params, picks)


def adjust(logits: Array, history: Array, params: RowParams, picks: Array, adjustments: sampling.Adjustments) -> Array:
    return over_shards(
        lambda logits, history, params, picks, adjustments: sampling.adjust(
            logits, history, params, picks[:, 1], picks[:, 2], adjustments
        )
    )(logits, history, params, picks, adjustments)


def logprobs(logits: Array, tokens: Array) -> sampling.Logprobs:
    return over_shards(sampling.logprobs)(logits, tokens)
