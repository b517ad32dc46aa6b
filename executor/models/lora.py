"""What adapters add to the products of a layer's matrices, for steps whose tokens have different ones.

Each matrix [inputs, outputs] has the factors of all slots side by side: `a` [inputs, slots × rank] and
`b` [slots × rank, outputs]. A token's x goes through all of `a` at once, what is not of its own slot becomes zero, and
the rest goes through `b`: two products for all adapters, whichever are in a step, and no shape that depends on them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from executor.shards import Array


class Factors(NamedTuple):
    """Of a matrix, all slots, or one. On the mesh `a` is parted as the matrix's inputs are, `b` as its outputs."""

    a: Array
    b: Array


class Chosen(NamedTuple):
    """Which adapter each token has: `slots` int32 [1, tokens], from 1; 0 is none. `some` says whether any has one."""

    slots: Array
    some: Array


class Added:
    """What adapters add to one matrix's products in one step."""

    def __init__(self, factors: Factors, rank: int, chosen: Chosen) -> None:
        """`rank` is how many columns of `a` each slot has."""
        self._factors, self._rank, self._chosen = factors, rank, chosen

    def to(self, product: Array, x: Array) -> Array:
        """x [1, tokens, inputs] times the matrix is `product` [1, tokens, outputs]: that, with what is added to it.

        Where the inputs are parted, both are the device's part of a sum.
        """
        a, b = self._factors

        def add() -> Array:
            narrow = jnp.matmul(x, a, preferred_element_type=jnp.float32)
            slot_of = jnp.arange(a.shape[1], dtype=jnp.int32) // self._rank + 1
            own = jnp.where(slot_of == self._chosen.slots[..., None], narrow, 0).astype(b.dtype)
            return product + jnp.matmul(own, b, preferred_element_type=jnp.float32).astype(product.dtype)

        return lax.cond(self._chosen.some, add, lambda: product)
