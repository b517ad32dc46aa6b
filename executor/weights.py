"""From safetensors files into a model's parameters, one tensor at a time."""

import math
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from bus.model_files import ModelError, ModelFacts
from executor.models import ARCHITECTURES
from executor.progress import Progress

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = "rotary_emb.inv_freq"
"""Ends the names of tensors that some old files hold and nobody needs: they follow from config.json."""


def load(facts: ModelFacts, dtype: Any, progress: Progress) -> nnx.Module:
    """Make the model of a folder with its weights, as `dtype`, on the default device.

    No more than one tensor is held twice at any time.

    Raises:
        ModelError: a tensor is missing, is not the model's, or has another shape than the model's.
    """
    architecture = ARCHITECTURES[facts.architecture]
    model = nnx.eval_shape(lambda: architecture.model(facts, dtype, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    parameters = nnx.to_flat_state(state)
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in facts.weight_files]
        place = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
        wanted = [architecture.weight_name(path) for path, _ in parameters]
        _check_names(facts, place.keys(), {name for name, _ in wanted})
        _check_tied_head(facts, place)
        total, done = sum(math.prod(variable.shape) for _, variable in parameters), 0
        loaded = []
        for (path, variable), (name, transposed) in zip(parameters, wanted, strict=True):
            shape = tuple(variable.shape)
            stored = shape[::-1] if transposed else shape
            found = tuple(place[name].get_slice(name).get_shape())
            if found != stored:
                raise ModelError(
                    f"the weights in {facts.folder}: {name} has shape {found}; config.json makes it {stored}"
                )
            loaded.append((path, variable.replace(_read(place[name], name, transposed, dtype))))
            done += math.prod(shape)
            progress("loading weights", done, total)
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _open(path: Any) -> Any:
    try:
        return safe_open(path, framework="flax")  # numpy's would not take bfloat16
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _read(file: Any, name: str, transposed: bool, dtype: Any) -> jax.Array:
    with jax.default_device(jax.devices("cpu")[0]):
        tensor = np.asarray(file.get_tensor(name))
    return jax.device_put(np.ascontiguousarray((tensor.T if transposed else tensor).astype(dtype, copy=False)))


def _check_names(facts: ModelFacts, found: Any, wanted: set[str]) -> None:
    for name in sorted(wanted - set(found)):
        raise ModelError(f"the weights in {facts.folder} lack {name}; the folder is not complete")
    for name in sorted(set(found) - wanted):
        if not (name == _HEAD and facts.tie_word_embeddings) and not name.endswith(_DERIVED):
            raise ModelError(f"the weights in {facts.folder} hold {name}, which {facts.architecture} does not have")


def _check_tied_head(facts: ModelFacts, place: dict[str, Any]) -> None:
    """A tied head may be stored all the same, as long as it is the embedding."""
    if facts.tie_word_embeddings and _HEAD in place:
        head, embedding = (np.asarray(place[name].get_tensor(name)) for name in (_HEAD, _EMBEDDING))
        if not np.array_equal(head, embedding):
            raise ModelError(f"the weights in {facts.folder}: {_HEAD} is not {_EMBEDDING}, but config.json ties them")
