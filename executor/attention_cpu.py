"""Attention for a CPU as a kernel of its own (executor/kernels), which reads each block once, where it lies."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from executor.attention import Batch, Plan, Tokens, View
from executor.shards import Array

_MOST_SHARED = 64
"""Query heads per KV head that the kernel takes."""


@dataclass(frozen=True)
class KernelAttention:
    """Needs `kernels.library.load`, and `takes` to say yes.

    Sequences are cut into tiles of a few tokens, which go through what they see in pieces that the first-level cache
    holds, with a running softmax. How many places a step is padded to makes no difference.
    """

    marks_padding: ClassVar[bool] = True

    @staticmethod
    def takes(heads: int, kv_heads: int, head_dim: int, dtype: Any) -> bool:
        return head_dim % 8 == 0 and heads // kv_heads <= _MOST_SHARED and dtype == jnp.float32

    def cache_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        return 1, 2 * kv_heads, head_dim

    def plan(self, batch: Batch, tokens: Tokens) -> Plan:
        return batch.positions, batch.num_tokens, batch.block_tables

    def __call__(self, q: Array, k: Array, v: Array, kv: Array, plan: Plan, view: View) -> tuple[Array, Array]:
        return attend(q, k, v, kv, *plan, scale=view.scale, window=view.window, soft_cap=view.soft_cap)


def blank_cache(outline: jax.ShapeDtypeStruct) -> Array:
    """A KV cache of zeros, float32, in large pages where the system has them: it is read a tenth faster."""
    make = jax.jit(jax.ffi.ffi_call("rankbus_zeros", outline), out_shardings=outline.sharding)
    cache: Array = make()
    return cache


def attend(
    q: Array,
    k: Array,
    v: Array,
    kv: Array,
    positions: Array,
    num_tokens: Array,
    block_tables: Array,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Array, Array]:
    """See `Attention.__call__` and `Batch`.

    Args:
        window: how many tokens a token sees, itself the last; 0 is all before it.
        soft_cap: c makes scores s c tanh(s / c); 0 leaves them as they are.
    """
    shapes = [jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(kv.shape, jnp.float32)]
    call = jax.ffi.ffi_call("rankbus_attention", shapes, input_output_aliases={3: 1})
    options = {"scale": np.float32(scale), "soft_cap": np.float32(soft_cap), "window": np.int64(window)}
    out, kv = call(q, k, v, kv, positions, num_tokens, block_tables, **options)
    return out, kv
