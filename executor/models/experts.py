"""A mixture of experts, which are dealt out to all devices of the mesh; each works for the tokens of all ranks."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bus.model_files import ModelFacts
from executor.kernels.products import Int8, activate
from executor.mesh import DATA, MODEL
from executor.models import parts
from executor.models.layers import Build, Linear, Matrix
from executor.shards import Array


class Kernel(Matrix):
    """One matrix of every expert, [experts, inputs, outputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, build: Build) -> None:
        dealt = parts.evenly(experts, build.data * build.model, 0, over=(DATA, MODEL))
        super().__init__((experts, inputs, outputs), build, dealt)

    def __call__(self, x: Array, counts: Array, experts: Array) -> Array:
        """x [rows, inputs], `counts` of them for each expert here, one after the other, times the expert's matrix.

        `experts` [rows] is the expert of each row; what rows after all of these become means nothing.
        """
        weight = self.weight
        if not isinstance(weight, Int8):
            return lax.ragged_dot(x, weight, counts)
        product = lax.ragged_dot(x, weight.values, counts, preferred_element_type=jnp.float32)
        scales = weight.scales[jnp.minimum(experts, counts.shape[0] - 1)]
        return (product * scales).astype(x.dtype)


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
        self.gate = Linear(facts.hidden_size, facts.experts.count, build._replace(int8=False), None)
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
        """What this device's experts add to each token, float32 [tokens, hidden].

        As many rows go through them at once as twice the device's even share: rarely is that not all of its own, and
        what is not its own costs nothing.
        """
        here = self.experts.gate_proj.kernel.shape[0]
        which = (chosen - lax.axis_index((DATA, MODEL)) * here).reshape(-1)
        which = jnp.where((which >= 0) & (which < here), which, here)
        # Sorted by expert, those of other devices last: each expert's tokens are a block.
        order = jnp.argsort(which)
        ends = jnp.cumsum(jnp.bincount(which, length=here + 1)[:here])
        at_once = min(order.size, -(-2 * order.size // lax.axis_size((DATA, MODEL))))
        order = jnp.pad(order, (0, -order.size % at_once))

        def add(turn: Array, out: Array) -> Array:
            first = turn * at_once
            mine = lax.dynamic_slice_in_dim(order, first, at_once)
            counts = jnp.diff(jnp.clip(ends - first, 0, at_once), prepend=0).astype(jnp.int32)
            dealt = (counts, which[mine])
            token = mine // self.per_token
            taken = x[token]
            gate, up = self.experts.gate_proj(taken, *dealt), self.experts.up_proj(taken, *dealt)
            made = self.experts.down_proj(activate(self.activation, gate) * up, *dealt).astype(jnp.float32)
            used = jnp.arange(at_once) < counts.sum()
            return out.at[token].add(jnp.where(used[:, None], made * weights.reshape(-1)[mine][:, None], 0))

        nothing = jnp.zeros(x.shape, jnp.float32)
        if at_once == order.size:
            return add(jnp.int32(0), nothing)
        return lax.fori_loop(0, -(-ends[-1] // at_once), add, nothing)
