"""Data shards: what lies on them has a leading axis with one entry for each."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array


def over_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function`, which knows nothing of shards, to each shard's part of its arguments (pytrees of arrays)."""

    def apply(*arguments: Any) -> Any:
        count = jax.tree.leaves(arguments)[0].shape[0]
        parts = [function(*jax.tree.map(lambda x, shard=shard: x[shard], arguments)) for shard in range(count)]
        return jax.tree.map(lambda *values: jnp.stack(values), *parts)

    return apply
