"""Attention over the paged KV cache: one interface, and its implementation in plain XLA for a CPU.

It runs within `shard_map`, on what one device has of the heads and the blocks: arrays with a leading axis of shards
have one entry there. A layer's KV cache is one array [shards, pages, block_size, 2 × kv_heads, head_dim], a head's key
and value side by side; a page is a block, or the part of one that some of the heads have (`Attention.cache_shape`);
block 0 of each shard belongs to nobody and takes what padding writes. `plan` is made once per step, by the program of
the step itself, and holds all that follows from the batch and not from the layer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from executor.shards import Array, over_shards

Plan: TypeAlias = Any
"""What an implementation's `plan` returns: a pytree of arrays."""

_MASKED = -1e30
"""Score of a position that is not to be seen; finite, so that a row without any visible position gives no NaN."""


class Batch(NamedTuple):
    """A step's sequences as they lie on the device, all int32, padded; an unused place has `num_tokens` 0.

    The tokens of a shard's step lie one sequence after the other, without gaps.
    """

    rows: Array
    """[shards, sequences]: row in the shard's history; padding names the spare row."""
    positions: Array
    """[shards, sequences]: where the first token of the step stands in its sequence."""
    num_tokens: Array
    """[shards, sequences]"""
    block_tables: Array
    """[shards, sequences, blocks]: blocks in the shard's numbering, 0 after the last."""


class Tokens(NamedTuple):
    """A step's tokens, one by one; all [shards, tokens]. Padding belongs to the last sequence and is not `valid`."""

    sequences: Array
    positions: Array
    valid: Array


class View(NamedTuple):
    """How a layer's tokens see others."""

    scale: float
    """What the products of queries and keys are multiplied by."""
    window: int = 0
    """How many tokens a token sees, itself the last; 0 is all before it."""
    soft_cap: float = 0.0
    """c: scores s become c tanh(s / c); 0 leaves them as they are."""


class Attention(Protocol):
    """How a step's tokens see the KV cache. Implementations are hashable: programs are compiled for each.

    `marks_padding` says that padding may be NaN, see `products.mark_unused`.
    """

    marks_padding: ClassVar[bool]

    def cache_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """For a device that has `kv_heads`: the pages of a block, and the last two axes of the cache."""
        ...

    def plan(self, batch: Batch, tokens: Tokens) -> Plan: ...

    def __call__(self, q: Array, k: Array, v: Array, kv: Array, plan: Plan, view: View) -> tuple[Array, Array]:
        """Put `k` and `v` into the cache, then let every token see its sequence up to itself.

        Args:
            q: [shards, tokens, heads, head_dim].
            k: [shards, tokens, kv_heads, head_dim]; `v` likewise.
            kv: the layer's KV cache.

        Returns:
            The output, shaped as `q` (what stands at padding means nothing), and the KV cache.
        """
        ...


class _Tiles(NamedTuple):
    """Queries cut into tiles of one sequence each, those that see most first; all with leading [shards, tiles]."""

    tokens: Array
    """[shards, tiles, width]: index of each query's token; past the last token where the tile has no query."""
    positions: Array
    """[shards, tiles, width]"""
    sequences: Array
    lengths: Array
    """Positions of the sequence that may be read: what lies behind is not written yet, or someone else's."""
    chunks: Array
    """Chunks of the KV cache to go through; 0 for tiles that are not used."""


class _XlaPlan(NamedTuple):
    block_tables: Array
    blocks: Array
    """[shards, tokens]: where each token's key and value go, with `offsets`."""
    offsets: Array
    passes: tuple[_Tiles, ...]


@dataclass(frozen=True)
class XlaAttention:
    """For a CPU: loops over just the part of the KV cache that the step's sequences really have.

    Sequences with one token take tiles of one query, longer ones tiles of `tile` queries. A group of tiles goes
    through its sequences' KV together, chunk by chunk, with a running softmax; both loops end where the data does, so
    neither the longest context nor the number of padded places costs time. (Gathering every sequence padded to the
    longest takes 4 to 6 times as long at 64 sequences.)

    `one_each` says that every sequence has one token: the batch of a pure decode step.
    """

    marks_padding: ClassVar[bool] = False

    block_size: int
    one_each: bool
    tile: int = 32
    group: int = 8
    chunk_tokens: int = 128

    def cache_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        return 1, 2 * kv_heads, head_dim

    def plan(self, batch: Batch, tokens: Tokens) -> _XlaPlan:
        shards, sequences = batch.num_tokens.shape
        block = jnp.take_along_axis(
            batch.block_tables.reshape(shards, -1),
            tokens.sequences * batch.block_tables.shape[2] + tokens.positions // self.block_size,
            axis=1,
        )
        single = jnp.where(batch.num_tokens == 1, 1, 0)
        passes = [self._tiles(batch, single, 1, sequences)]
        if not self.one_each:
            count = tokens.valid.shape[1]
            longer = jnp.where(batch.num_tokens > 1, -(-batch.num_tokens // self.tile), 0)
            passes.append(self._tiles(batch, longer, self.tile, count // self.tile + min(sequences, count // 2)))
        # A chunk may reach past the table's end; what it finds there is masked.
        tables = jnp.pad(batch.block_tables, ((0, 0), (0, 0), (0, self._chunk_blocks - 1)))
        return _XlaPlan(tables, jnp.where(tokens.valid, block, 0), tokens.positions % self.block_size, tuple(passes))

    def __call__(self, q: Array, k: Array, v: Array, kv: Array, plan: Plan, view: View) -> tuple[Array, Array]:
        out, kv = over_shards(partial(self._shard, view))(q, k, v, kv, plan)
        return out, kv

    @property
    def _chunk_blocks(self) -> int:
        return -(-self.chunk_tokens // self.block_size)

    @property
    def _chunk(self) -> int:
        return self._chunk_blocks * self.block_size

    def _tiles(self, batch: Batch, tiles_of: Array, width: int, most: int) -> _Tiles:
        """Cut the sequences into `tiles_of` [shards, sequences] tiles of `width` queries, `most` in a shard at most."""
        first_token = jnp.cumsum(batch.num_tokens, axis=1) - batch.num_tokens
        ends = jnp.cumsum(tiles_of, axis=1)
        places = jnp.arange(most, dtype=jnp.int32)
        sequences = jax.vmap(lambda end: jnp.searchsorted(end, places, side="right"))(ends).astype(jnp.int32)
        sequences = jnp.minimum(sequences, tiles_of.shape[1] - 1)

        def of(values: Array) -> Array:
            return jnp.take_along_axis(values, sequences, axis=1)

        start = (places - of(ends - tiles_of)) * width
        used = places < ends[:, -1:]
        count = jnp.where(used, jnp.clip(of(batch.num_tokens) - start, 0, width), 0)
        position = of(batch.positions) + start
        chunks = jnp.where(used, -(-(position + count) // self._chunk), 0)
        each = jnp.arange(width, dtype=jnp.int32)
        token = jnp.where(each < count[..., None], (of(first_token) + start)[..., None] + each, jnp.int32(2**30))
        tiles = _Tiles(token, position[..., None] + each, sequences, of(batch.positions + batch.num_tokens), chunks)
        order = jnp.argsort(-chunks, axis=1)
        return jax.tree.map(lambda x: jax.vmap(lambda values, by: values[by])(x, order), tiles)

    def _shard(self, view: View, q: Array, k: Array, v: Array, kv: Array, plan: _XlaPlan) -> tuple[Array, Array]:
        """As `__call__`, without the shards' axis."""
        kv_heads, head_dim = k.shape[1:]
        pairs = jnp.stack([k, v], axis=2).reshape(-1, 2 * kv_heads, head_dim).astype(kv.dtype)
        blocks, offsets = plan.blocks, plan.offsets
        if blocks.shape[0] == 1:
            # XLA turns a scatter of one update into something for which it copies the whole cache, five times.
            pairs = jnp.concatenate([pairs, pairs])
            blocks, offsets = jnp.append(blocks, 0), jnp.append(offsets, 0)
        kv = kv.at[blocks, offsets].set(pairs)
        grouped = (q * view.scale).reshape(q.shape[0], kv_heads, -1, head_dim)
        out = jnp.zeros_like(grouped)
        for tiles in plan.passes:
            out = self._attend(view, grouped, kv, plan.block_tables, tiles, out)
        return out.reshape(q.shape), kv

    def _attend(self, view: View, q: Array, kv: Array, tables: Array, tiles: _Tiles, out: Array) -> Array:
        """Fill `out` [tokens, kv_heads, queries per kv head, head_dim] at the tokens of `tiles`."""
        most, width = tiles.tokens.shape
        size = min(self.group, most)
        tiles = jax.tree.map(lambda x: jnp.pad(x, [(0, -most % size)] + [(0, 0)] * (x.ndim - 1)), tiles)
        if most % size:  # padded tiles must not name a token
            tiles = tiles._replace(tokens=tiles.tokens.at[most:].set(2**30))
        _, kv_heads, shared, head_dim = q.shape

        def one_group(group: Array, out: Array) -> Array:
            mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, group * size, size), tiles)
            queries = q[jnp.minimum(mine.tokens, q.shape[0] - 1)]  # [size, width, kv_heads, shared, head_dim]
            queries = queries.transpose(0, 2, 1, 3, 4).reshape(size, kv_heads, width * shared, head_dim)

            def one_chunk(chunk: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, mixed = state
                blocks = tables[mine.sequences[:, None], chunk * self._chunk_blocks + jnp.arange(self._chunk_blocks)]
                pairs = kv[blocks].reshape(size, self._chunk, kv_heads, 2, head_dim)
                at = chunk * self._chunk + jnp.arange(self._chunk)
                written = at < mine.lengths[:, None]
                keys = pairs[:, :, :, 0].transpose(0, 2, 1, 3)
                # Memory that is not this sequence's may hold NaN, which a weight of 0 would not keep out.
                values = jnp.where(written[:, :, None, None], pairs[:, :, :, 1], 0).transpose(0, 2, 1, 3)
                scores = jnp.einsum("phqd,phcd->phqc", queries, keys, preferred_element_type=jnp.float32)
                if view.soft_cap:
                    scores = view.soft_cap * jnp.tanh(scores / view.soft_cap)
                seen = at <= mine.positions[:, :, None]  # [size, width, chunk]
                if view.window:
                    seen &= at > mine.positions[:, :, None] - view.window
                seen = jnp.broadcast_to(seen[:, :, None], (size, width, shared, self._chunk))
                scores = jnp.where(seen.reshape(size, 1, width * shared, self._chunk), scores, _MASKED)
                new_top = jnp.maximum(top, scores.max(-1))
                weights = jnp.exp(scores - new_top[..., None])
                keep = jnp.exp(top - new_top)
                product = jnp.einsum(
                    "phqc,phcd->phqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
                )
                return new_top, total * keep + weights.sum(-1), mixed * keep[..., None] + product

            shape = (size, kv_heads, width * shared)
            start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
            first = jnp.int32(0)
            if view.window:  # what lies before all windows is not read
                earliest = jnp.where(mine.chunks > 0, mine.positions[:, 0], 2**30).min() - view.window + 1
                first = jnp.maximum(earliest, 0) // self._chunk
            _, total, mixed = lax.fori_loop(first, mine.chunks.max(), one_chunk, start)
            result = (mixed / total[..., None]).astype(out.dtype)
            result = result.reshape(size, kv_heads, width, shared, head_dim).transpose(0, 2, 1, 3, 4)
            return out.at[mine.tokens].set(result, mode="drop")

        groups = -(-jnp.count_nonzero(tiles.chunks) // size)
        return lax.fori_loop(0, groups, one_group, out)
