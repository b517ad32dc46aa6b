"""From safetensors files into a model's parameters, each part read straight for the device that holds it."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from bus.model_files import ModelError, ModelFacts
from executor.mesh import DATA, MODEL
from executor.models import MODELS
from executor.models.decoder import tensor_of
from executor.models.layers import Build
from executor.models.parts import Parting
from executor.progress import Progress

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = "rotary_emb.inv_freq"
"""Ends the names of tensors that some old files hold and nobody needs: they follow from config.json."""


def outline(facts: ModelFacts, dtype: Any, mesh: Mesh) -> nnx.Module:
    """The model with shapes in place of its parameters; each shape says how it is sharded.

    Raises:
        ModelError: config.json asks for what the model cannot do.
    """
    build = Build(dtype, mesh.shape[DATA], mesh.shape[MODEL])
    graph, state = nnx.split(nnx.eval_shape(lambda: MODELS[facts.architecture](facts, build)))
    outlined = []
    for path, variable in nnx.to_flat_state(state):
        parting: Parting | None = variable.get_metadata()["parting"]
        axes = [None] * parting.axis + [parting.over] if parting else []
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        outlined.append((path, variable.replace(jax.ShapeDtypeStruct(variable.shape, dtype, sharding=sharding))))
    return nnx.merge(graph, nnx.from_flat_state(outlined))


def load(facts: ModelFacts, model: nnx.Module, progress: Progress) -> nnx.Module:
    """The model that `model` is the outline of, with its weights from the folder's files.

    No more than one tensor is held twice at any time.

    Raises:
        ModelError: a tensor is missing, is not the model's, or has another shape than the model's.
    """
    graph, state = nnx.split(model)
    parameters = nnx.to_flat_state(state)
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in facts.weight_files]
        place = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
        wanted = [_Wanted(path, variable) for path, variable in parameters]
        _check_names(facts, place.keys(), {name for tensor in wanted for name in tensor.names})
        _check_tied_head(facts, place)
        total, done = sum(math.prod(variable.shape) for _, variable in parameters), 0
        loaded = []
        for (path, variable), tensor in zip(parameters, wanted, strict=True):
            tensor.check(facts, place)
            loaded.append((path, variable.replace(tensor.read(place))))
            done += math.prod(variable.shape)
            progress("loading weights", done, total)
    return nnx.merge(graph, nnx.from_flat_state(loaded))


class _Wanted:
    """A parameter, and the tensors that it is read from: one, or one for each expert."""

    def __init__(self, path: tuple[str | int, ...], variable: Any) -> None:
        self._outline: jax.ShapeDtypeStruct = variable.get_value()
        self._parting: Parting | None = variable.get_metadata()["parting"]
        name, self._transposed = tensor_of(path)
        self._stacked = "{}" in name
        assert not self._stacked or self._parting, "experts are dealt out to devices"
        count = self._parting.tensor_size if self._parting and self._stacked else 1
        self.names = [name.format(expert) for expert in range(count)]

    def check(self, facts: ModelFacts, place: Mapping[str, Any]) -> None:
        """Raise ModelError if a tensor has another shape than it must have."""
        shape = list(self._outline.shape)
        if self._stacked:
            del shape[0]
        elif self._parting:
            shape[self._parting.axis] = self._parting.tensor_size
        stored = tuple(shape[::-1] if self._transposed else shape)
        for name in self.names:
            found = tuple(place[name].get_slice(name).get_shape())
            if found != stored:
                raise ModelError(
                    f"the weights in {facts.folder}: {name} has shape {found}; config.json makes it {stored}"
                )

    def read(self, place: Mapping[str, Any]) -> jax.Array:
        """The parameter on its devices. Parts that several devices hold alike are read once for each."""
        sharding = self._outline.sharding
        made = jax.make_array_from_callback(self._outline.shape, sharding, lambda index: self._part(index, place))
        return made.block_until_ready()

    def _part(self, index: tuple[slice, ...], place: Mapping[str, Any]) -> np.ndarray:
        if self._parting is None:
            return self._tensor(self.names[0], place, ())
        start, stop, _ = index[self._parting.axis].indices(self._parting.size)
        segments = self._parting.segments(start, stop)
        if self._stacked:
            pieces = [
                self._tensor(self.names[expert], place, ())[None]
                for first, count in segments
                for expert in (range(first, first + count) if first >= 0 else [])
            ]
            missing = stop - start - len(pieces)
            return np.concatenate([*pieces, self._zeros(missing, 0)]) if missing else np.concatenate(pieces)
        axis = 1 - self._parting.axis if self._transposed else self._parting.axis
        pieces = []
        for first, count in segments:
            if first >= 0:
                taken = (slice(None),) * axis + (slice(first, first + count),)
                pieces.append(self._tensor(self.names[0], place, taken))
            else:
                pieces.append(self._zeros(count, self._parting.axis))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self._parting.axis)

    def _zeros(self, count: int, axis: int) -> np.ndarray:
        shape = self._outline.shape
        return np.zeros((*shape[:axis], count, *shape[axis + 1 :]), self._outline.dtype)

    def _tensor(self, name: str, place: Mapping[str, Any], taken: tuple[slice, ...]) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            tensor = np.asarray(place[name].get_slice(name)[taken] if taken else place[name].get_tensor(name))
        return np.ascontiguousarray((tensor.T if self._transposed else tensor).astype(self._outline.dtype, copy=False))


def _open(path: Any) -> Any:
    try:
        return safe_open(path, framework="flax")  # numpy's would not take bfloat16
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _check_names(facts: ModelFacts, found: Any, wanted: set[str]) -> None:
    for name in sorted(wanted - set(found)):
        raise ModelError(f"the weights in {facts.folder} lack {name}; the folder is not complete")
    for name in sorted(set(found) - wanted):
        if not (name == _HEAD and facts.tie_word_embeddings) and not name.endswith(_DERIVED):
            raise ModelError(f"the weights in {facts.folder} hold {name}, which {facts.architecture} does not have")


def _check_tied_head(facts: ModelFacts, place: Mapping[str, Any]) -> None:
    """A tied head may be stored all the same, as long as it is the embedding."""
    if facts.tie_word_embeddings and _HEAD in place:
        head, embedding = (np.asarray(place[name].get_tensor(name)) for name in (_HEAD, _EMBEDDING))
        if not np.array_equal(head, embedding):
            raise ModelError(f"the weights in {facts.folder}: {_HEAD} is not {_EMBEDDING}, but config.json ties them")
