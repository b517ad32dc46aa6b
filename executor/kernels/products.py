"""Products with packed weights. The functions that models call take weights packed or not: a packed one has 3 axes."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from executor.shards import Array

PANEL = 16
"""Columns of a packed weight that lie together; `kPanel` in cpu.cc."""


def matmul(x: Array, weight: Array) -> Array:
    """x [..., depth] times a weight [depth, width], or the same weight packed: [..., width]."""
    return matmuls(x, [weight])[0]


def matmuls(x: Array, weights: Sequence[Array]) -> list[Array]:
    """`matmul` of x with each of `weights`: packed ones in one call, which costs less than several.

    Rows at the end of x that begin with NaN take no time; see `mark_unused`.
    """
    if any(weight.ndim == 2 for weight in weights):
        return [x @ weight if weight.ndim == 2 else matmul(x, weight) for weight in weights]
    shapes = [jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0] * PANEL), jnp.float32) for weight in weights]
    return list(jax.ffi.ffi_call("rankbus_products", shapes)(x, *weights))


def gated(activation: str, x: Array, gate: Array, up: Array) -> Array:
    """activation(x gate) × (x up); see `activate`. Weights as in `matmul`."""
    if gate.ndim == 2 or up.ndim == 2:
        return activate(activation, matmul(x, gate)) * matmul(x, up)
    shape = jax.ShapeDtypeStruct((*x.shape[:-1], gate.shape[0] * PANEL), jnp.float32)
    return jax.ffi.ffi_call("rankbus_gated", shape)(x, gate, up, gelu=np.bool_(activation != "silu"))


def activate(name: str, x: Array) -> Array:
    """The activation that config.json calls `name`."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)


def mark_unused(x: Array, used: Array) -> Array:
    """x [..., depth] with NaN in the rows that are not `used` [...]: what is computed from them means nothing.

    It stays NaN all the way, and so products leave it out: how far a step is padded costs them nothing.
    """
    return jnp.where(used[..., None], x, jnp.nan)


def scores(x: Array, table: Array) -> Array:
    """x [..., depth] times each row of a table [rows, depth], or of one whose transpose was packed: [..., rows]."""
    return x @ table.T if table.ndim == 2 else matmul(x, table)


def look_up(table: Array, rows: Array) -> Array:
    """Rows [...] of a table [·, depth], or of one whose transpose was packed: [..., depth]."""
    if table.ndim == 2:
        return table[rows]
    panel, place = jnp.divmod(rows, PANEL)
    return jnp.take_along_axis(table[panel], place[..., None, None], axis=-1)[..., 0]


def pack_model(model: nnx.Module) -> None:
    """Pack, in place, the parameters that are used by the functions above: those named `kernel` and `embedding`.

    The model is on one device. Those of other types than float32, and those that do not fill whole panels, stay as they
    are.
    """
    packer = _Packer()
    for path, variable in list(nnx.iter_graph(model)):
        if not isinstance(variable, nnx.Param) or path[-1] not in ("kernel", "embedding"):
            continue
        where = variable[...].sharding
        weight = np.asarray(variable[...])
        if path[-1] == "embedding":
            weight = weight.T
        if weight.ndim == 2 and weight.dtype == np.float32 and weight.shape[1] % PANEL == 0:
            variable.set_value(packer.pack(weight, _whole(where)))
        del weight
        _give_memory_back()


def _whole(sharding: Sharding) -> Sharding:
    """On the same device, for an array of other axes."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


class _Packer:
    """Puts packed weights one after the other into memory of large pages: small ones cost time to find."""

    _SLAB = 64 << 20

    def __init__(self) -> None:
        self._slab: Any = None
        self._used = 0

    def pack(self, weight: np.ndarray, sharding: Sharding) -> Array:
        """From [depth, width] to [width / PANEL, depth, PANEL], as `rankbus_products` takes it."""
        depth, width = weight.shape
        packed = self._room(weight.size * 4).reshape(width // PANEL, depth, PANEL)
        packed[...] = weight.reshape(depth, -1, PANEL).transpose(1, 0, 2)
        return jax.device_put(packed, sharding, may_alias=True)

    def _room(self, size: int) -> np.ndarray:
        if self._slab is None or self._used + size > len(self._slab):
            self._slab = mmap.mmap(-1, max(size, self._SLAB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._slab.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        room = np.frombuffer(self._slab, np.float32, size // 4, self._used)
        self._used += -(-size // 64) * 64  # XLA takes memory as it is only if it is aligned like that
        return room


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library can be told to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
