"""A mixture of experts, which are dealt out to all devices of the mesh; each works for the tokens of all ranks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bus.model_files import ModelFacts
from executor.kernels.products import activate
from executor.mesh import DATA, MODEL
from executor.models import parts
from executor.models.layers import Build, Linear, parameter
from executor.shards import Array


class Kernel(nnx.Module):
    """One matrix of every expert, [experts, inputs, outputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, build: Build) -> None:
        dealt = parts.evenly(experts, build.data * build.model, 0, over=(DATA, MODEL))
        self.kernel = parameter((experts, inputs, outputs), build.dtype, dealt)


class Experts(nnx.Module):
    """Named as in the files, so that each matrix is found there."""

    def __init__(self, experts: int, hidden: int, inner: int, build: Build) -> None:
        self.gate_proj = Kernel(experts, hidden, inner, build)
        self.up_proj = Kernel(experts, hidden, inner, build)
        self.down_proj = Kernel(experts, inner, hidden, build)


class ExpertsMlp(nnx.Module):
    """Each token goes through the `per_token` experts that its router scores highest, weighted by the scores."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        assert facts.experts is not None
        self.gate = Linear(facts.hidden_size, facts.experts.count, build.dtype, None)
        self.experts = Experts(facts.experts.count, facts.hidden_size, facts.experts.inner_size, build)
        self.per_token, self.normalize = facts.experts.per_token, facts.experts.normalize
        self.activation = facts.activation

    def __call__(self, x: Array) -> Array:
        mine = x[0]
        everyones = lax.all_gather(mine, DATA, axis=0, tiled=True)
        out = self._run(everyones, *self._route(everyones))
        out = lax.psum_scatter(out, DATA, scatter_dimension=0, tiled=True)
        return lax.psum(out, MODEL).astype(x.dtype)[None]

    def _route(self, x: Array) -> tuple[Array, Array]:
        """Which experts each token of `x` [tokens, hidden] goes to, and with what weight, both [tokens, per_token]."""
        scores = jax.nn.softmax(self.gate(x).astype(jnp.float32), axis=-1)
        weights, chosen = lax.top_k(scores, self.per_token)
        return (weights / weights.sum(-1, keepdims=True) if self.normalize else weights), chosen

    def _run(self, x: Array, weights: Array, chosen: Array) -> Array:
        """What this device's experts add to each token, float32 [tokens, hidden]."""
        kernels: list[Any] = [
            matrix.kernel[...] for matrix in (self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj)
        ]
        here = kernels[0].shape[0]
        which = (chosen - lax.axis_index((DATA, MODEL)) * here).reshape(-1)
        which = jnp.where((which >= 0) & (which < here), which, here)
        # Sorted by expert, those of other devices last: each expert's tokens are a block.
        order = jnp.argsort(which)
        counts = jnp.bincount(which, length=here + 1)[:here].astype(jnp.int32)
        token = order // self.per_token
        taken = x[token]
        inner = activate(self.activation, lax.ragged_dot(taken, kernels[0], counts)) * lax.ragged_dot(
            taken, kernels[1], counts
        )
        out = lax.ragged_dot(inner, kernels[2], counts).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        used = jnp.arange(order.size) < counts.sum()
        return jnp.zeros(x.shape, jnp.float32).at[token].add(jnp.where(used[:, None], out, 0))
