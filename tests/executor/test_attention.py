"""The TPU's attention, with the kernel module's own reference in the kernel's place, against dense attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from executor import attention_tpu, compute
from executor.attention import Attention, Batch, View
from executor.attention_tpu import TpuAttention
from tests.executor.test_kernels import EVERY_BORDER, check_attention


def reference(q: jax.Array, *arguments: jax.Array, sm_scale: float, **options: Any) -> jax.Array:
    """The reference under the kernel's signature: it takes no sizes, and gives nothing at padding."""
    num_queries, num_blocks = options.pop("num_queries_per_block"), options.pop("num_kv_pages_per_block")
    assert 0 < num_queries <= q.shape[0]
    assert 0 < num_blocks <= arguments[2].shape[1]
    assert options.pop("vmem_limit_bytes") > 0
    out = ref_ragged_paged_attention(q, *arguments, sm_scale=sm_scale, **options)
    return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)), constant_values=jnp.nan)


def attend_with(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    positions: jax.Array,
    num_tokens: jax.Array,
    block_tables: jax.Array,
    **view: float,
) -> tuple[np.ndarray, np.ndarray]:
    """As `attention_cpu.attend`; what is written to the spare block, and to heads of zeros, is left out."""
    outs, caches = [], []
    pages, pairs, width = attention.cache_shape(k.shape[2], k.shape[3])
    for shard in range(q.shape[0]):
        mine = slice(shard, shard + 1)
        batch = Batch(jnp.zeros_like(positions[mine]), positions[mine], num_tokens[mine], block_tables[mine])
        tokens, _ = compute.over_shards(partial(compute._spread, num_tokens=q.shape[1]))(batch)
        extra = ((0, 0), (0, 0), (0, 0), (0, pages * pairs - kv.shape[3]), (0, width - kv.shape[4]))
        padded = jnp.pad(kv[mine], extra)
        cache = (
            padded.reshape(*padded.shape[:3], pages, pairs, width)
            .swapaxes(2, 3)
            .reshape(1, -1, *padded.shape[2:3], pairs, width)
        )
        out, cache = partial(attention, view=View(**view))(
            q[mine], k[mine], v[mine], cache, attention.plan(batch, tokens)
        )
        outs.append(out)
        blocks = cache.reshape(1, -1, pages, *cache.shape[2:])
        cache = blocks.swapaxes(2, 3).reshape(padded.shape)
        caches.append(cache[..., : kv.shape[3], : kv.shape[4]].at[:, 0].set(jnp.nan))
    return np.concatenate(outs), np.concatenate(caches)


def check(attention: Attention, *arguments: Any, **settings: Any) -> None:
    check_attention(*arguments, run=partial(attend_with, attention), **settings)


def make(block_size: int = 8, one_each: bool = False) -> TpuAttention:
    return TpuAttention(block_size, one_each, reference)


def test_borders_in_one_mixed_step() -> None:
    # Not all of them: the reference is not compiled, but each operation of each sequence for its shape.
    check(make(), [EVERY_BORDER[::14]])


def test_decode() -> None:
    check(make(one_each=True), [[(0, 1), (7, 1), (8, 1), (300, 1), (31, 1)], [(9, 1)]], window=16)


def test_shards_some_without_sequences() -> None:
    check(make(), [[(30, 1), (0, 20), (5, 1)], [], [(0, 1)]])


@pytest.mark.parametrize(("window", "soft_cap"), [(8, 0.0), (16, 2.0)])
def test_windows_and_soft_caps(window: int, soft_cap: float) -> None:
    check(make(), [[(0, 150), (149, 1), (70, 9), (300, 2)]], window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("heads", [(9, 3, 64), (10, 5, 128), (6, 3, 136)])
def test_heads_of_all_kinds(heads: tuple[int, int, int]) -> None:
    check(make(16), [[(100, 1), (0, 20), (60, 5)]], heads=heads, block_size=16)


def test_heads_are_padded_to_what_the_kernel_takes() -> None:
    assert [attention_tpu.padded_heads(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        16,
        24,
    ]
    assert TpuAttention(16, False).cache_shape(3, 64) == (1, 8, 128)
    assert TpuAttention(16, False).cache_shape(4, 256) == (4, 2, 256)


def test_the_blocks_that_the_kernel_reads_are_counted() -> None:
    """Tiles of 4 queries; pieces of 2 blocks of 8 positions: 16 positions at once."""

    def read(*sequences: tuple[int, int]) -> int:
        counts, lengths = zip(*sequences, strict=True)
        return attention_tpu.blocks_read(counts, lengths, block_size=8, queries=4, blocks_at_once=2)

    assert read((1, 1)) == read((1, 16)) == 2
    assert read((1, 17)) == 4
    assert read((4, 16)) == 2
    assert read((5, 16)) == 4  # two tiles, each through all of it
    assert read((3, 16), (2, 40)) == 2 + 2 * 6  # the second one's tokens lie in two tiles
