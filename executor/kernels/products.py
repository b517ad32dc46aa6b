"""Products with weights as they are, packed, or of 8 bits: the functions that models call take all three.

A packed weight has 3 axes where others have 2.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from executor.shards import Array

PANEL = 16
"""Columns of a packed weight that lie together; `kPanel` in cpu.cc."""


class Int8(NamedTuple):
    """A weight of 8 bits: `values` times `scales`, of which each output has one.

    It is read as it is and scaled when all is added up: a step reads half of what it reads of bfloat16.
    """

    values: Array
    """int8, shaped as the weight."""
    scales: Array
    """float32, shaped as the weight without its inputs."""


Weight: TypeAlias = Array | Int8


def matmul(x: Array, weight: Weight) -> Array:
    """x [..., depth] times a weight [depth, width]: [..., width]."""
    return matmuls(x, [weight])[0]


def matmuls(x: Array, weights: Sequence[Weight]) -> list[Array]:
    """`matmul` of x with each of `weights`: packed ones in one call, which costs less than several.

    Rows at the end of x that begin with NaN take no time; see `mark_unused`.
    """
    packed = [weight for weight in weights if _is_packed(weight)]
    if len(packed) < len(weights):
        return [matmul(x, weight) if _is_packed(weight) else _product(x, weight) for weight in weights]
    shapes = [jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0] * PANEL), jnp.float32) for weight in packed]
    return list(jax.ffi.ffi_call("rankbus_products", shapes)(x, *packed))


def _is_packed(weight: Weight) -> TypeGuard[Array]:
    return not isinstance(weight, Int8) and weight.ndim == 3


def _product(x: Array, weight: Weight) -> Array:
    if not isinstance(weight, Int8):
        return x @ weight
    product = jnp.matmul(x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (product * weight.scales).astype(x.dtype)


def gated(activation: str, x: Array, gate: Weight, up: Weight) -> Array:
    """activation(x gate) × (x up); see `activate`. Weights as in `matmul`."""
    if not (_is_packed(gate) and _is_packed(up)):
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


def scores(x: Array, table: Weight) -> Array:
    """x [..., depth] times each row of a table [rows, depth], or of one whose transpose was packed: [..., rows]."""
    if isinstance(table, Int8):
        return _product(x, Int8(table.values.T, table.scales))
    return x @ table.T if table.ndim == 2 else matmul(x, table)


def look_up(table: Weight, rows: Array) -> Array:
    """Rows [...] of a table [·, depth], or of one whose transpose was packed: [..., depth]; float32 of 8 bits."""
    if isinstance(table, Int8):
        return table.values[rows] * table.scales[rows][..., None]
    if table.ndim == 2:
        return table[rows]
    panel, place = jnp.divmod(rows, PANEL)
    return jnp.take_along_axis(table[panel], place[..., None, None], axis=-1)[..., 0]


def pack_model(model: nnx.Module) -> None:
    """Pack, in place, the parameters that are used by the functions above; see `Packer`. The model is on one device."""
    packer = Packer()
    for path, variable in list(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param):
            packer.pack(path, variable)


def _whole(sharding: Sharding) -> Sharding:
    """On the same device, for an array of other axes."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


class Packer:
    """Packs parameters that are named `kernel` or `embedding`, one after the other into memory of large pages.

    Small pages cost time to find. Parameters of other types than float32, and those that do not fill whole panels, stay
    as they are.
    """

    _SLAB = 64 << 20

    def __init__(self) -> None:
        self._slab: Any = None
        self._used = 0

    def pack(self, path: Sequence[Any], variable: nnx.Variable) -> None:
        """Pack the parameter at `path` of its model, in place."""
        if path[-1] not in ("kernel", "embedding"):
            return
        where = variable[...].sharding
        weight = np.asarray(variable[...])
        if path[-1] == "embedding":
            weight = weight.T
        if weight.ndim == 2 and weight.dtype == np.float32 and weight.shape[1] % PANEL == 0:
            variable.set_value(self._packed(weight, _whole(where)))
        del weight
        _give_memory_back()

    def _packed(self, weight: np.ndarray, sharding: Sharding) -> Array:
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
