"""Layers that the models are made of.

They run within `shard_map`, each device on its part: activations are [1, tokens, …], the tokens of the device's data
shard, the same on all devices of the shard. Parameters are declared whole, each with how it is parted, and are the
device's part when a layer runs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bus.model_files import ModelError, ModelFacts, Rope
from executor.attention import Attention, Plan, View
from executor.kernels import products
from executor.mesh import MODEL
from executor.models import parts
from executor.models.lora import Added
from executor.models.parts import Parting
from executor.shards import Array

Rotation = tuple[Array, Array]
"""Cosine and sine; see `rotation_of`."""


class Build(NamedTuple):
    """What models are made for: the type of their weights, and the sizes of the mesh.

    `int8` says that matrices are of 8 bits, see `products.Int8`; norms, biases and routers never are. Vectors of
    embeddings are padded to a multiple of `lanes`: a TPU lays a table of others out by columns, and would turn it
    around for each look-up.
    """

    dtype: Any
    data: int
    model: int
    int8: bool = False
    lanes: int = 1


def parameter(shape: tuple[int, ...], dtype: Any, parting: Parting | None = None, extra: int = 0) -> nnx.Param:
    """A parameter that has `shape` in the file (transposed, if it is a kernel), and its parts' sizes on the mesh.

    Its last axis has `extra` zeros more.
    """
    if parting is not None:
        shape = (*shape[: parting.axis], parting.size, *shape[parting.axis + 1 :])
    return nnx.Param(jnp.zeros((*shape[:-1], shape[-1] + extra), dtype), parting=parting, extra=extra)


class Matrix(nnx.Module):
    """A matrix, or one for every expert, as one parameter; of 8 bits with another, the `scales` of its outputs."""

    name = "kernel"
    """Of the parameter."""

    def __init__(
        self, shape: tuple[int, ...], build: Build, parting: Parting | None, inputs: int = -2, extra: int = 0
    ) -> None:
        """`inputs` is the axis over which products add up; for `extra` see `parameter`."""
        setattr(self, self.name, parameter(shape, jnp.int8 if build.int8 else build.dtype, parting, extra))
        summed = inputs % len(shape)
        outputs = tuple(size for axis, size in enumerate(shape) if axis != summed)
        if parting is not None:
            parting = None if parting.axis == summed else parting.along(parting.axis - (parting.axis > summed))
        self.scales = parameter(outputs, jnp.float32, parting) if build.int8 else None

    @property
    def weight(self) -> products.Weight:
        """What products take."""
        values = getattr(self, self.name)[...]
        return values if self.scales is None else products.Int8(values, self.scales[...])


class RMSNorm(nnx.Module):
    """Scales the last axis by its root mean square, computed in float32, and by a learned vector.

    With `offset` the vector is what is learned plus that, and is applied in float32, too.
    """

    def __init__(self, size: int, epsilon: float, dtype: Any, offset: float = 0.0) -> None:
        self.scale = parameter((size,), dtype)
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        if self.offset:
            return (normed * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.scale[...]


class Linear(Matrix):
    """x W, or x W + b, with W [inputs, outputs].

    Parted by its outputs (axis 1), each device has some of them; parted by its inputs (axis 0), each has some of those,
    and all get the sum.
    """

    added: Added | None = None
    """What adapters add in the step that is being computed."""

    def __init__(self, inputs: int, outputs: int, build: Build, parting: Parting | None, bias: bool = False) -> None:
        super().__init__((inputs, outputs), build, parting)
        self.inputs, self.outputs, self.parting = inputs, outputs, parting
        self.sums = parting is not None and parting.axis == 0
        assert not (bias and self.sums), "every device would add it"
        self.bias = parameter((outputs,), build.dtype, parting and parting.along(0)) if bias else None

    def __call__(self, x: Array) -> Array:
        return together(x, self)[0]


def together(x: Array, *linears: Linear) -> list[Array]:
    """What each of `linears` makes of x."""
    results = []
    for linear, product in zip(linears, products.matmuls(x, [linear.weight for linear in linears]), strict=True):
        result = product if linear.added is None else linear.added.to(product, x)
        whole = lax.psum(result, MODEL) if linear.sums else result
        results.append(whole if linear.bias is None else whole + linear.bias[...])
    return results


class Embedding(Matrix):
    """A vector per token; each device has those of a part of the vocabulary."""

    name = "embedding"

    def __init__(self, vocabulary: int, hidden: int, build: Build) -> None:
        self.hidden, self.extra = hidden, -hidden % build.lanes
        parting = parts.evenly(vocabulary, build.model, 0)
        super().__init__((vocabulary, hidden), build, parting, inputs=1, extra=self.extra)
        self.dtype = build.dtype

    def __call__(self, tokens: Array) -> Array:
        if lax.axis_size(MODEL) == 1:
            return self._look_up(tokens)
        count = self.embedding.shape[0]
        mine = tokens - lax.axis_index(MODEL) * count
        here = (mine >= 0) & (mine < count)
        return lax.psum(jnp.where(here[..., None], self._look_up(jnp.clip(mine, 0, count - 1)), 0), MODEL)

    def _look_up(self, tokens: Array) -> Array:
        return products.look_up(self.weight, tokens)[..., : self.hidden].astype(self.dtype)

    def scores(self, x: Array) -> Array:
        """The products of `x` with the device's part of the vectors: what a tied head does."""
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, self.extra))) if self.extra else x
        return products.scores(padded, self.weight)


class GatedMlp(nnx.Module):
    """down(act(gate(x)) × up(x))."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        hidden, inner = facts.hidden_size, facts.intermediate_size
        columns = parts.evenly(inner, build.model, 1)
        self.gate_proj = Linear(hidden, inner, build, columns)
        self.up_proj = Linear(hidden, inner, build, columns)
        self.down_proj = Linear(inner, hidden, build, columns.along(0))
        self.activation = facts.activation

    def __call__(self, x: Array) -> Array:
        if self.gate_proj.added is None:
            return self.down_proj(products.gated(self.activation, x, self.gate_proj.weight, self.up_proj.weight))
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(products.activate(self.activation, gate) * up)


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions over the paged KV cache, in the layer numbered `index`.

    With biases on query, key and value, with norms on each head's query and key, with a sliding window and with a soft
    cap, if the model has them.
    """

    def __init__(self, facts: ModelFacts, index: int, build: Build) -> None:
        hidden, head_dim, dtype = facts.hidden_size, facts.head_dim, build.dtype
        heads = parts.heads(facts.num_heads, facts.num_kv_heads, head_dim, build.model)
        queries, keys = facts.num_heads * head_dim, facts.num_kv_heads * head_dim
        self.q_proj = Linear(hidden, queries, build, heads.queries, facts.attention_bias)
        self.k_proj = Linear(hidden, keys, build, heads.keys, facts.attention_bias)
        self.v_proj = Linear(hidden, keys, build, heads.keys, facts.attention_bias)
        self.o_proj = Linear(queries, hidden, build, heads.queries.along(0))
        self.q_norm = RMSNorm(head_dim, facts.rms_norm_eps, dtype) if facts.head_norms else None
        self.k_norm = RMSNorm(head_dim, facts.rms_norm_eps, dtype) if facts.head_norms else None
        self.head_dim = head_dim
        self.view = View(facts.query_scale, facts.window_of(index), facts.attention_soft_cap)

    def __call__(
        self, x: Array, rotation: Rotation, kv: Array, attention: Attention, plan: Plan
    ) -> tuple[Array, Array]:
        """Returns the output and the layer's KV cache with this step's tokens in it."""
        q, k, v = map(self._heads, _apart(together(x, self.q_proj, self.k_proj, self.v_proj)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, kv = attention(rotate(q, rotation), rotate(k, rotation), v, kv, plan, self.view)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), kv

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def _apart(products: list[Array]) -> list[Array]:
    """`products`, whatever is done with them: to have them head by head, a TPU's compiler turns their weights around.

    It did so at each step, for all three weights of each layer.
    """
    return lax.platform_dependent(products, cpu=lambda products: products, default=lax.optimization_barrier)


def rotation_of(positions: Array, frequencies: Array) -> Rotation:
    """Cosine and sine, float32 [shards, tokens, 1, head_dim / 2], by which heads at `positions` are rotated."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotation: Rotation) -> Array:
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
