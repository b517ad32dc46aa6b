"""LoRA adapters in peft's format: what a folder with one must hold, and what it adds to the model's matrices."""

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from executor.step import Float32
from executor.tensors import Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")

_EMPTY = (
    *("alora_invocation_tokens", "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora", "use_qalora"),
)
"""Settings of peft that must be off: with them an adapter is more than two factors for each of some matrices."""

_CHANGES_BASE = ("corda", "loftq", "olora", "pissa")
"""Ways to begin (`init_lora_weights`) that change the model's own weights, which an adapter's files do not hold."""

_LARGEST = 1e30
"""Weights beyond this, infinite ones and what is no number would reach the tokens of other adapters."""

_READ_BYTES = 1 << 20


class AdapterError(Exception):
    """An adapter that cannot be used; the message is one sentence that names what is wrong and what is allowed."""


class Factors(NamedTuple):
    """What is added to a matrix [inputs, outputs]: `a` [inputs, r] times `b` [r, outputs], which has the scale in it.

    float32 both.
    """

    a: Float32
    b: Float32


class AdapterWeights(NamedTuple):
    """An adapter as it was read.

    `identity` stands for its name and all that is in its files; equal ones are the same adapter to all processes.
    `factors` are by the matrix's name in the model's files, without the end ``.weight``.
    """

    identity: str
    factors: dict[str, Factors]


def read(folder: Path, name: str, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> AdapterWeights:
    """The adapter in `folder`, which is called `name`.

    `shapes` are those of the matrices that may have factors, (inputs, outputs) by name. The format is that of
    https://huggingface.co/docs/peft/developer_guides/checkpoint; the scale is lora_alpha / r, or with use_rslora
    lora_alpha / √r (https://arxiv.org/abs/2312.03732).

    Raises:
        AdapterError: it cannot be used, or there is none.
    """
    config, weights = folder / CONFIG, folder / WEIGHTS
    try:
        settings = json.loads(config.read_bytes())
        identity = _identity(name, config, weights)
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} holds no adapter that can be read: {error}") from None
    if not isinstance(settings, dict):
        raise AdapterError(f"{config} is no JSON object")
    rank, scale = _check(settings, config, {matrix.rpartition(".")[2] for matrix in shapes}, max_rank)
    try:
        with safe_open(weights, framework="numpy") as file:
            tensors = Tensors(dict.fromkeys(file.keys(), file))
            return AdapterWeights(identity, _factors(tensors, weights, shapes, rank, scale))
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{weights} cannot be read: {error}") from None


def _identity(name: str, *files: Path) -> str:
    digest = blake2b(name.encode() + b"\0", digest_size=16)
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _check(settings: dict[str, Any], config: Path, targets: set[str], max_rank: int) -> tuple[int, float]:
    """The rank and the scale of an adapter with these settings."""

    def refuse(key: str, allowed: str) -> AdapterError:
        return AdapterError(f"{config}: {key} {settings.get(key)!r} is not supported; it must be {allowed}")

    if settings.get("peft_type") != "LORA":
        raise refuse("peft_type", "LORA")
    for key in _EMPTY:
        if settings.get(key):
            raise refuse(key, "left out, null, false or empty")
    if settings.get("bias", "none") != "none":
        raise refuse("bias", "none")
    if str(settings.get("init_lora_weights", "")).lower().startswith(_CHANGES_BASE):
        raise refuse("init_lora_weights", "a way that leaves the model's own weights as they are")
    named = settings.get("target_modules")
    unknown = [one for one in named if str(one).rpartition(".")[2] not in targets] if isinstance(named, list) else []
    if unknown:
        raise AdapterError(
            f"{config}: target_modules has {unknown[0]!r}, for which this model takes no adapters; it takes them for "
            f"{', '.join(sorted(targets))}"
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise refuse("r", f"from 1 to max_lora_rank, {max_rank}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise refuse("lora_alpha", "a number")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _factors(
    tensors: Tensors, weights: Path, shapes: Mapping[str, tuple[int, int]], rank: int, scale: float
) -> dict[str, Factors]:
    found: dict[str, Factors] = {}
    for tensor in sorted(tensors.names):
        matrix = tensor.removeprefix(_PREFIX)
        for suffix in _SUFFIXES:
            matrix = matrix.removesuffix(suffix)
        if matrix not in shapes or tensor not in _pair(matrix):
            raise AdapterError(
                f"{weights}: {tensor} is no factor of a matrix that may have an adapter; those that may are "
                f"{_PREFIX}MATRIX{' and '.join(_SUFFIXES)} for MATRIX from {min(shapes)} to {max(shapes)}"
            )
        found[matrix] = Factors(np.empty(0, np.float32), np.empty(0, np.float32))
    if not found:
        raise AdapterError(f"{weights} holds no tensors; an adapter has factors for at least one matrix")
    for matrix in found:
        inputs, outputs = shapes[matrix]
        first, second = _pair(matrix)
        a = _tensor(tensors, weights, first, (rank, inputs))
        b = _tensor(tensors, weights, second, (outputs, rank))
        found[matrix] = Factors(a.T, b.T * np.float32(scale))
        for tensor, values in ((first, a), (second, found[matrix].b)):
            if not np.abs(values).max() < _LARGEST:
                raise AdapterError(f"{weights}: {tensor} has values that are no numbers, or too large to compute with")
    return found


def _pair(matrix: str) -> tuple[str, str]:
    return f"{_PREFIX}{matrix}{_SUFFIXES[0]}", f"{_PREFIX}{matrix}{_SUFFIXES[1]}"


def _tensor(tensors: Tensors, weights: Path, name: str, shape: tuple[int, int]) -> Float32:
    if name not in tensors.names:
        raise AdapterError(f"{weights} lacks {name}; a matrix has both factors")
    if tensors.shape(name) != shape:
        raise AdapterError(f"{weights}: {name} has shape {tensors.shape(name)}; the model and r make it {shape}")
    values = np.empty(shape, np.float32)
    tensors.read(name, (), values)
    return values
