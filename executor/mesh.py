"""The mesh of devices, ("data", "model"): ranks are spread over its data axis, each weight over its model axis.

Programs run on it under `shard_map`: each device works on its part of every array, and what they exchange is written
down where it happens.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bus.config import Config, ConfigError

DATA, MODEL = "data", "model"

BY_SHARD = PartitionSpec(DATA)
"""Of arrays with a leading axis of data shards: the same on all devices of a shard."""

BY_LINE = PartitionSpec(DATA, MODEL)
"""Of arrays whose second axis is dealt out to the devices of a shard."""

WHOLE = PartitionSpec()
"""Of arrays that every device has."""


def make(config: Config, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh that `config` asks for, of the first of `devices`.

    Raises:
        ConfigError: there are too few devices, or too few ranks, or a process would have no device.
    """
    data, model = shape(config, len(devices))
    mesh = of(devices[: data * model], data, model)
    if (processes := len({device.process_index for device in mesh.devices.flat})) < config.executors:
        raise ConfigError(
            f"executors: {config.executors} is not allowed; the mesh has {data} × {model} devices, all of them with "
            f"{processes} of the processes; raise tensor_parallel or data_shards, or the number of ranks"
        )
    return mesh


def shape(config: Config, devices: int) -> tuple[int, int]:
    """The sizes of the data axis and the model axis, on at most so many devices; see `make`."""
    model = config.tensor_parallel
    if model > devices:
        raise ConfigError(f"tensor_parallel: {model} is not allowed; there are {devices} devices")
    data = config.data_shards or _filled(config.ranks, min(config.ranks, devices // model))
    if data * model > devices:
        raise ConfigError(
            f"data_shards: {data} shards of {model} devices each (tensor_parallel) are not allowed; there are "
            f"{devices} devices"
        )
    if _filled(config.ranks, data) != data:
        raise ConfigError(
            f"data_shards: {data} is not allowed; {config.ranks} ranks, as many on each shard, leave a shard without "
            f"any: it must be at most {_filled(config.ranks, min(data, config.ranks))}"
        )
    return data, model


def of(devices: Sequence[jax.Device], data: int, model: int) -> Mesh:
    """A mesh of exactly these devices, laid out so that neighbours on the model axis are near each other."""
    if _fill_a_box(devices):
        # A shard may be a part of a row of chips: 8 shards of 2 devices each on 4 × 4 chips.
        grid = mesh_utils.create_device_mesh((data, model), devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices).reshape(data, model)
    return Mesh(grid, (DATA, MODEL))


def _fill_a_box(devices: Sequence[jax.Device]) -> bool:
    """Whether these are all chips of a box of chips, for which alone JAX knows a layout; true of what has no place."""
    places = np.array([getattr(device, "coords", (index,)) for index, device in enumerate(devices)])
    return len(devices) == math.prod((places.max(axis=0) + 1).tolist())


def sharded(mesh: Mesh, specs: Any) -> Any:
    """`specs`, a pytree of partition specs, as shardings on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def spec_of(tree: Any) -> Any:
    """The partition specs of arrays, or of shapes with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def jit(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> Any:
    """`function`, which works on a device's parts, as a jitted function of whole arrays."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(
        mapped,
        in_shardings=sharded(mesh, in_specs),
        out_shardings=sharded(mesh, out_specs),
        donate_argnums=tuple(donate),
    )


def outline(argument: Any) -> Any:
    """What to trace a program with: of arrays from the host, which may be in a tuple, their shapes."""
    if isinstance(argument, tuple):
        return jax.tree.map(outline, argument)
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype) if isinstance(argument, np.ndarray) else argument


def place(mesh: Mesh, argument: Any) -> Any:
    """What to call a program with, on a mesh of several processes: of arrays from the host, which are by shard and may
    be in a tuple, each process gives its devices their parts."""
    if isinstance(argument, tuple):
        return jax.tree.map(partial(place, mesh), argument)
    return put(argument, NamedSharding(mesh, BY_SHARD)) if isinstance(argument, np.ndarray) else argument


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array of the host, which all processes have alike, on the devices."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _filled(ranks: int, shards: int) -> int:
    """Of `shards` how many get a rank, when each takes as many as the first."""
    return -(-ranks // -(-ranks // shards))
