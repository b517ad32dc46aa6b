"""Where the factors of adapters lie on the mesh, and in which form they come there."""

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from executor import mesh as meshes
from executor.adapter_files import AdapterWeights
from executor.compute import Adapters, adaptable
from executor.models.lora import Factors
from executor.models.parts import Parting
from executor.step import Float32


class _Sides(NamedTuple):
    """Of a matrix: its sizes in the file, and how it is parted, on axis 0 (inputs) or 1 (outputs)."""

    inputs: int
    outputs: int
    parting: Parting | None

    def along(self, axis: int) -> Parting | None:
        """How the inputs (0) or outputs (1) are parted, if they are."""
        return self.parting if self.parting is not None and self.parting.axis == axis else None

    def size(self, axis: int) -> int:
        """Inputs (0) or outputs (1) on all devices together."""
        parting = self.along(axis)
        return (self.inputs, self.outputs)[axis] if parting is None else parting.size


class AdapterLayout:
    """The matrices of a model that may have adapters, and the factors of `slots` adapters of up to `rank`."""

    def __init__(self, model: Any, mesh: Mesh, slots: int, rank: int, dtype: Any) -> None:
        """`model` is an `nnx.Module`, with its parameters or in outline. Without slots no matrix has factors."""
        layers = model.layers if slots else [nnx.Module()] * len(model.layers)
        self._layers = [
            {name: _Sides(one.inputs, one.outputs, one.parting) for name, one in adaptable(layer).items()}
            for layer in layers
        ]
        self._mesh, self.slots, self.rank, self._dtype = mesh, slots, rank, dtype

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the matrices, by their names in the model's files; see `adapter_files.read`."""
        return {
            f"model.layers.{index}.{name}": (sides.inputs, sides.outputs)
            for index, layer in enumerate(self._layers)
            for name, sides in layer.items()
        }

    def outline(self) -> Adapters:
        """The factors of all slots, of each layer: shapes in place of arrays."""
        return [
            {
                name: Factors(*(self._shape(sides, axis, self.slots * self.rank) for axis in (0, 1)))
                for name, sides in layer.items()
            }
            for layer in self._layers
        ]

    def one_like(self, factors: Adapters) -> Adapters:
        """Shapes of one adapter's part of the `factors` of some layers, as `bring` makes them."""

        def narrowed(outline: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
            shape = (outline.shape[0], self.rank) if axis == 0 else (self.rank, outline.shape[1])
            return jax.ShapeDtypeStruct(shape, outline.dtype, sharding=outline.sharding)

        return [
            {name: Factors(narrowed(of.a, 0), narrowed(of.b, 1)) for name, of in layer.items()} for layer in factors
        ]

    @property
    def num_bytes(self) -> int:
        """Of all factors, on all devices together."""
        shards = self._mesh.size
        leaves = jax.tree.leaves(self.outline())
        return sum(
            shards * int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves
        )

    def bring(self, weights: AdapterWeights) -> Adapters:
        """One adapter's factors on the devices, as `compute.place_adapter` takes them; zeros where it has none."""
        return [
            {
                name: Factors(*(self._brought(sides, axis, weights, index, name) for axis in (0, 1)))
                for name, sides in layer.items()
            }
            for index, layer in enumerate(self._layers)
        ]

    def _shape(self, sides: _Sides, axis: int, columns: int) -> jax.ShapeDtypeStruct:
        size = sides.size(axis)
        parting = sides.along(axis)
        over = parting.over if parting is not None else None
        spec = PartitionSpec(over) if axis == 0 else PartitionSpec(None, over)
        shape = (size, columns) if axis == 0 else (columns, size)
        return jax.ShapeDtypeStruct(shape, self._dtype, sharding=NamedSharding(self._mesh, spec))

    def _brought(self, sides: _Sides, axis: int, weights: AdapterWeights, layer: int, name: str) -> jax.Array:
        outline = self._shape(sides, axis, self.rank)
        whole = np.zeros(outline.shape, self._dtype)
        factors = weights.factors.get(f"model.layers.{layer}.{name}")
        if factors is not None:
            rank = factors.a.shape[1]
            into, values = (whole[:, :rank], factors.a) if axis == 0 else (whole[:rank], factors.b)
            _lay_out(into, values, axis, sides.along(axis))
        return meshes.put(whole, outline.sharding)


def _lay_out(into: np.ndarray, values: Float32, axis: int, parting: Parting | None) -> None:
    """Write `values` as a matrix is parted along the axis."""
    if parting is None:
        into[...] = values
        return
    place = 0
    for first, count in parting.segments(0, parting.size):
        if first >= 0:
            there, here = ((slice(None),) * axis + (slice(start, start + count),) for start in (place, first))
            into[there] = values[here]
        place += count
