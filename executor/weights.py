"""From safetensors files into a model's parameters, each part read straight for the device that holds it."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from bus.model_files import ModelError, ModelFacts
from executor.attention_tpu import LANES
from executor.mesh import DATA, MODEL
from executor.models import MODELS
from executor.models.decoder import tensor_of
from executor.models.layers import Build
from executor.models.parts import Parting
from executor.progress import Progress
from executor.tensors import Tensors

Finish: TypeAlias = Callable[[tuple[str | int, ...], nnx.Variable], None]

_ALIGNED = 64

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = "rotary_emb.inv_freq"
"""Ends the names of tensors that some old files hold and nobody needs: they follow from config.json."""


def outline(facts: ModelFacts, dtype: Any, mesh: Mesh, int8: bool = False) -> nnx.Module:
    """The model with shapes in place of its parameters; each shape says how it is sharded.

    `int8` says that matrices are of 8 bits, see `products.Int8`; all else is of type `dtype`.

    Raises:
        ModelError: config.json asks for what the model cannot do.
    """
    lanes = LANES if mesh.devices.flat[0].platform == "tpu" else 1
    build = Build(dtype, mesh.shape[DATA], mesh.shape[MODEL], int8, lanes)
    graph, state = nnx.split(nnx.eval_shape(lambda: MODELS[facts.architecture](facts, build)))
    outlined = []
    for path, variable in nnx.to_flat_state(state):
        parting: Parting | None = variable.get_metadata()["parting"]
        axes = [None] * parting.axis + [parting.over] if parting else []
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        shape = jax.ShapeDtypeStruct(variable.shape, variable.get_value().dtype, sharding=sharding)
        outlined.append((path, variable.replace(shape)))
    return nnx.merge(graph, nnx.from_flat_state(outlined))


def load(facts: ModelFacts, model: nnx.Module, progress: Progress, finish: Finish | None = None) -> nnx.Module:
    """The model that `model` is the outline of, with its weights from the folder's files.

    `finish` is called for each parameter as soon as it is loaded, with its path, and may change its value. Tensors are
    read in pieces, and no more than one parameter is held twice at any time: the largest while there are few others.

    Raises:
        ModelError: a tensor is missing, is not the model's, or has another shape than the model's.
    """
    graph, state = nnx.split(model)
    parameters = list(nnx.to_flat_state(state))
    with ExitStack() as stack:
        opened = [stack.enter_context(_open(path)) for path in facts.weight_files]
        files = Tensors({name: file for file in opened for name in file.keys()})  # noqa: SIM118 (it is no dict)
        wanted = [_Wanted(path, variable) for path, variable in parameters]
        _check_names(facts, files.names, {name for tensor in wanted for name in tensor.names})
        _check_tied_head(facts, files)
        for tensor in wanted:
            tensor.check(facts, files)
        sizes = [math.prod(variable.shape) for _, variable in parameters]
        total, done = sum(sizes), 0
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            path, variable = parameters[place]
            parameters[place] = (path, variable.replace(wanted[place].read(files)))
            if finish is not None:
                finish(*parameters[place])
            done += sizes[place]
            progress("loading weights", done, total)
    return nnx.merge(graph, nnx.from_flat_state(parameters))


class _Wanted:
    """A parameter, and the tensors that it is read from: one, or one for each expert."""

    def __init__(self, path: tuple[str | int, ...], variable: Any) -> None:
        self._outline: jax.ShapeDtypeStruct = variable.get_value()
        self._parting: Parting | None = variable.get_metadata()["parting"]
        self._extra: int = variable.get_metadata()["extra"]
        name, self._transposed = tensor_of(path)
        self._scales = path[-1] == "scales"
        self._stacked = "{}" in name
        assert not self._stacked or self._parting, "experts are dealt out to devices"
        count = self._parting.tensor_size if self._parting and self._stacked else 1
        self.names = [name.format(expert) for expert in range(count)]

    def check(self, facts: ModelFacts, files: Tensors) -> None:
        """Raise ModelError if a tensor has another shape than it must have."""
        shape = list(self._outline.shape)
        shape[-1] -= self._extra
        if self._stacked:
            del shape[0]
        elif self._parting:
            shape[self._parting.axis] = self._parting.tensor_size
        stored = tuple(shape[::-1] if self._transposed else shape)
        for name in self.names:
            found = files.shape(name)
            if self._scales:
                found = found[:1]  # the rest is checked with the weight that they belong to
            if found != stored:
                raise ModelError(
                    f"the weights in {facts.folder}: {name} has shape {found}; config.json makes it {stored}"
                )

    def read(self, files: Tensors) -> jax.Array:
        """The parameter on its devices. Parts that several devices hold alike are read once for each."""
        shape, sharding = self._outline.shape, self._outline.sharding
        parts = [
            jax.device_put(self._part(index, files), device, may_alias=True).block_until_ready()
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _part(self, index: tuple[slice, ...], files: Tensors) -> np.ndarray:
        shape = self._outline.shape
        whole = _zeros([len(range(size)[by]) for by, size in zip(index, shape, strict=True)], self._outline.dtype)
        part = whole[..., : whole.shape[-1] - self._extra]
        if self._parting is None:
            self._fill(part, files, self.names[0])
            return whole
        axis, place = self._parting.axis, 0
        start, stop, _ = index[axis].indices(self._parting.size)
        for first, count in self._parting.segments(start, stop):
            if first >= 0 and self._stacked:
                for expert in range(count):
                    self._fill(part[place + expert], files, self.names[first + expert])
            elif first >= 0:
                stored = 1 - axis if self._transposed else axis
                taken = (slice(None),) * stored + (slice(first, first + count),)
                self._fill(part[(slice(None),) * axis + (slice(place, place + count),)], files, self.names[0], taken)
            place += count
        return whole

    def _fill(self, part: np.ndarray, files: Tensors, name: str, taken: tuple[slice, ...] = ()) -> None:
        if self._scales:
            part[...] = files.scales(name)[taken]
        else:
            files.read(name, taken, part.T if self._transposed else part)


def _zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Aligned so that on a CPU JAX takes the memory as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def _open(path: Any) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _check_names(facts: ModelFacts, found: Any, wanted: set[str]) -> None:
    for name in sorted(wanted - set(found)):
        raise ModelError(f"the weights in {facts.folder} lack {name}; the folder is not complete")
    for name in sorted(set(found) - wanted):
        if not (name == _HEAD and facts.tie_word_embeddings) and not name.endswith(_DERIVED):
            raise ModelError(f"the weights in {facts.folder} hold {name}, which {facts.architecture} does not have")


def _check_tied_head(facts: ModelFacts, files: Tensors) -> None:
    """A tied head may be stored all the same, as long as it is the embedding."""
    if facts.tie_word_embeddings and _HEAD in files.names:
        pieces = zip(files.pieces(_HEAD), files.pieces(_EMBEDDING), strict=False)
        alike = all(np.array_equal(head, embedding) for (_, head), (_, embedding) in pieces)
        if files.shape(_HEAD) != files.shape(_EMBEDDING) or not alike:
            raise ModelError(f"the weights in {facts.folder}: {_HEAD} is not {_EMBEDDING}, but config.json ties them")
