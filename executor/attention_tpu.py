"""Attention for a TPU: JAX's Pallas kernel for ragged batches over a paged cache, given the shapes that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from executor.attention import Batch, Tokens, View
from executor.shards import Array, over_shards

LANES = 128
"""The kernel takes heads whose size is a multiple of this."""

KV_TOKENS = 512
"""Positions of the cache that the kernel brings in at once: enough that a copy takes longer than to ask for it."""

QUERIES_OF_DECODE, QUERIES_OF_MIXED = 16, 64
"""Queries that the kernel works on at once. It computes them all for each sequence that has one among them, so steps in
which each sequence has one take few."""

VMEM_BYTES = 64 * 2**20
"""Fast memory that the kernel may take; the TPUs that it is for have 128 MiB."""


class _Plan(NamedTuple):
    lengths: Array
    """[shards, sequences]: positions of each sequence, this step's tokens among them."""
    block_tables: Array
    first_queries: Array
    """[shards, sequences + 1]: where each sequence's tokens begin, and where the last one's end."""
    count: Array
    """[shards, 1]: sequences that there are."""
    blocks: Array
    """[shards, tokens]: where each token's key and value go, with `offsets`."""
    offsets: Array


@dataclass(frozen=True)
class TpuAttention:
    """Pads heads and their size with zeros to what the kernel takes, in the cache too.

    Of heads wider than `LANES` it takes one at a time: each KV head then has pages of its own, and the kernel is called
    for each.

    `one_each` says that every sequence has one token: the batch of a pure decode step. A shard without sequences gets
    one of one token, in the spare block: the kernel begins to copy the first sequence's blocks whatever there is.
    """

    block_size: int
    one_each: bool
    kernel: Callable[..., Array] = ragged_paged_attention

    marks_padding: ClassVar[bool] = False

    def cache_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        width = -(-head_dim // LANES) * LANES
        return (1, 2 * padded_heads(kv_heads), width) if width == LANES else (kv_heads, 2, width)

    def plan(self, batch: Batch, tokens: Tokens) -> _Plan:
        return over_shards(self._plan)(batch, tokens)

    def __call__(self, q: Array, k: Array, v: Array, kv: Array, plan: Any, view: View) -> tuple[Array, Array]:
        out, kv = over_shards(partial(self._shard, view))(q, k, v, kv, plan)
        return out, kv

    def sizes(self, tokens: int, most_blocks: int) -> dict[str, int]:
        """The kernel's sizes for a batch; its own table of them cannot be asked where there is no TPU."""
        queries = QUERIES_OF_DECODE if self.one_each else QUERIES_OF_MIXED
        return {
            "num_kv_pages_per_block": min(max(1, KV_TOKENS // self.block_size), most_blocks),
            "num_queries_per_block": min(queries, tokens),
            "vmem_limit_bytes": VMEM_BYTES,
        }

    def _plan(self, batch: Batch, tokens: Tokens) -> _Plan:
        block = batch.block_tables[tokens.sequences, tokens.positions // self.block_size]
        count = jnp.maximum(jnp.count_nonzero(batch.num_tokens), 1).astype(jnp.int32)
        ends = jnp.maximum(jnp.cumsum(batch.num_tokens), 1)
        return _Plan(
            lengths=jnp.maximum(batch.positions + batch.num_tokens, 1),
            block_tables=batch.block_tables,
            first_queries=jnp.pad(ends, (1, 0)),
            count=count[None],
            blocks=jnp.where(tokens.valid, block, 0),
            offsets=tokens.positions % self.block_size,
        )

    def _shard(self, view: View, q: Array, k: Array, v: Array, kv: Array, plan: _Plan) -> tuple[Array, Array]:
        """As `__call__`, without the shards' axis."""
        count, kv_heads, head_dim = k.shape
        pages, pairs, width = self.cache_shape(kv_heads, head_dim)
        heads = pages * pairs // 2
        extra = ((0, 0), (0, heads - kv_heads), (0, 0), (0, width - head_dim))
        written = jnp.pad(jnp.stack([k, v], axis=2), extra).reshape(count, pages, pairs, width)
        blocks, offsets = plan.blocks, plan.offsets
        if count == 1:
            # XLA turns a scatter of one update into something for which it copies the whole cache.
            written = jnp.concatenate([written, written])
            blocks, offsets = jnp.append(blocks, 0), jnp.append(offsets, 0)
        page = blocks[:, None] * pages + jnp.arange(pages)
        kv = kv.at[page, offsets[:, None]].set(written.astype(kv.dtype))
        queries = jnp.pad(q.reshape(count, kv_heads, -1, head_dim), extra)

        def attend(page: int) -> Array:
            mine = queries[:, page * heads // pages : (page + 1) * heads // pages]
            out = self.kernel(
                mine.reshape(count, -1, width),
                kv,
                plan.lengths,
                plan.block_tables * pages + page,
                plan.first_queries,
                plan.count,
                sm_scale=view.scale,
                sliding_window=view.window or None,
                soft_cap=view.soft_cap or None,
                **self.sizes(count, plan.block_tables.shape[1]),
            )
            return out.reshape(mine.shape)

        out = jnp.concatenate([attend(page) for page in range(pages)], axis=1)
        return out[:, :kv_heads, :, :head_dim].reshape(q.shape), kv


def padded_heads(kv_heads: int) -> int:
    """The smallest number of KV heads, at least `kv_heads`, of which the kernel can make whole tiles."""
    return next(count for count in (1, 2, 4, -(-kv_heads // 8) * 8) if count >= kv_heads)


def blocks_read(
    num_tokens: Sequence[int], lengths: Sequence[int], block_size: int, queries: int, blocks_at_once: int
) -> int:
    """Blocks, all of a device's heads, that the kernel copies for a layer of a step.

    For every tile of queries it goes through each sequence that has a token among them, from its start (also where a
    window hides that), in pieces of `blocks_at_once`, of which the last is copied whole.
    """
    read, first = 0, 0
    for count, length in zip(num_tokens, lengths, strict=True):
        tiles = (first + count - 1) // queries - first // queries + 1
        read += tiles * -(-length // (blocks_at_once * block_size)) * blocks_at_once
        first += count
    return read
