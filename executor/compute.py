"""What the device computes in a step, as functions over all data shards; the runner's programs are made of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from executor import sampling
from executor.attention import Batch, Tokens, XlaAttention
from executor.sampling import RowParams
from executor.shards import Array, over_shards

FIELDS = 3
"""Columns of a packed batch before the block table: row, position, number of tokens."""


class Model(NamedTuple):
    """The model as functions of its parameters: `layers` are those of the layers, `outer` all others."""

    graph: Any
    outer_tree: Any
    layers_tree: Any
    layers: Any

    def forward(
        self,
        outer: list[Array],
        layers: list[Array],
        kv: list[Array],
        history: Array,
        packed: Array,
        attention: XlaAttention,
        num_tokens: int,
        rows: int,
    ) -> tuple[Array, list[Array]]:
        """Run a step of up to `num_tokens` tokens per shard.

        Returns:
            The output for the last token of each sequence [shards, rows, hidden], and the KV cache.
        """
        batch = Batch(packed[..., 0], packed[..., 1], packed[..., 2], packed[..., FIELDS:])
        tokens, last = over_shards(lambda b: _spread(b, num_tokens))(batch)
        ids = over_shards(lambda history, batch, tokens: history[batch.rows[tokens.sequences], tokens.positions])(
            history, batch, tokens
        )
        model = nnx.merge(
            self.graph,
            jax.tree.unflatten(self.outer_tree, outer),
            jax.tree.unflatten(self.layers_tree, layers),
        )
        hidden, kv = model.hidden(ids, tokens.positions, kv, attention, attention.plan(batch, tokens))
        ending = over_shards(lambda hidden, last: hidden[last])(hidden, last)
        return jnp.pad(ending, ((0, 0), (0, rows - ending.shape[1]), (0, 0))), kv

    def head(self, outer: list[Array], hidden: Array, picks: Array) -> Array:
        """Logits, float32 [shards, n, vocabulary], of the sequences that `picks` [shards, n, 3] names first."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.outer_tree, outer), self.layers)
        return model.logits(over_shards(lambda hidden, picks: hidden[picks[:, 0]])(hidden, picks))


class Bound(NamedTuple):
    """A jitted function with its last, static arguments."""

    function: Any
    static: tuple[Any, ...]

    def lower(self, *arguments: Any) -> Any:
        return self.function.lower(*arguments, *self.static)


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
    """Write tokens and parameters of rows that begin or continue; see `Runner._setup_pieces`."""
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
