"""Layers that the models are made of. Activations are [shards, tokens, …] throughout."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bus.model_files import ModelError, Rope
from executor.attention import Attention, Plan
from executor.kernels import products
from executor.shards import Array


class RMSNorm(nnx.Module):
    """Scales the last axis by its root mean square, computed in float32, and by a learned vector."""

    def __init__(self, size: int, epsilon: float, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * self.scale[...]


class GatedMlp(nnx.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, hidden: int, inner: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.gate_proj = linear(hidden, inner, dtype, rngs)
        self.up_proj = linear(hidden, inner, dtype, rngs)
        self.down_proj = linear(inner, hidden, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions over the paged KV cache."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.q_proj = linear(hidden, heads * head_dim, dtype, rngs)
        self.k_proj = linear(hidden, kv_heads * head_dim, dtype, rngs)
        self.v_proj = linear(hidden, kv_heads * head_dim, dtype, rngs)
        self.o_proj = linear(heads * head_dim, hidden, dtype, rngs)
        self.head_dim = head_dim

    def __call__(
        self, x: Array, rotation: tuple[Array, Array], kv: Array, attention: Attention, plan: Plan
    ) -> tuple[Array, Array]:
        """Returns the output and the layer's KV cache with this step's tokens in it."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        out, kv = attention(rotate(q, rotation), rotate(k, rotation), v, kv, plan)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), kv

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def linear(inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs) -> nnx.Linear:
    """x W with W [inputs, outputs], no bias."""
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs, dot_general=_product)


def _product(x: Array, weight: Array, *_: Any, **__: Any) -> Array:
    return products.matmul(x, weight)


def rotation_of(positions: Array, frequencies: Array) -> tuple[Array, Array]:
    """Cosine and sine, float32 [shards, tokens, 1, head_dim / 2], by which heads at `positions` are rotated."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + head_dim / 2) of every head in `x` [shards, tokens, heads, head_dim]."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> Array:
    """Angle per position of each of a head's `head_dim` / 2 pairs, float32.

    Raises:
        ModelError: a rope type that is not supported, or one that lacks a number it needs.
    """
    frequencies = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    try:
        match rope.type:
            case "default":
                return frequencies
            case "linear":
                return frequencies / rope.extra["factor"]
            case "llama3":
                return _llama3(frequencies, rope)
    except KeyError as missing:
        raise ModelError(f"config.json: rope type {rope.type} needs the number {missing.args[0]}") from None
    raise ModelError(f"config.json: rope type {rope.type} is not supported; it must be default, linear or llama3")


def _llama3(frequencies: Array, rope: Rope) -> Array:
    """Llama 3.1's extension: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, context = rope.extra["factor"], rope.extra["original_max_position_embeddings"]
    low, high = rope.extra["low_freq_factor"], rope.extra["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)
