"""Data shards: what lies on them has a leading axis, on which each device has one entry, its own shard's."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array


def over_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function`, which knows nothing of shards, to the shard's entry of its arguments (pytrees of arrays)."""

    def apply(*arguments: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], arguments)))

    return apply
