"""Write an HF-style folder from a GGUF file: weights as float32, configuration, tokenizer, chat template."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bus.model_files import ARCHITECTURES, ModelError

Float32 = npt.NDArray[np.float32]

SHARD_BYTES = 2 * 1024**3
"""Weights are written in files of about this size, so that no more than that is in memory at once."""

_ARCHITECTURE_OF = {kind: name for name, kind in ARCHITECTURES.items() if kind in ("llama", "mistral")}
"""What can be converted, by the file's name of it: the other architectures name and order their tensors otherwise."""

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def convert(gguf: Path, folder: Path, begin: Callable[[int], None], advance: Callable[[int], None]) -> None:
    """Write the HF-style folder `folder` from the file `gguf`.

    `begin` is told how many bytes of weights there are to write, and `advance` how many more are done.

    Raises:
        ModelError: the file is not GGUF, is cut short, or holds something that cannot be served.
    """
    reader = _open(gguf)
    folder.mkdir()
    _write_texts(gguf, reader, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS]
    plan = [_Tensor(tensor, _hf_name(tensor.name, gguf), config) for tensor in weights]
    begin(sum(tensor.nbytes for tensor in plan))
    _write_weights(plan, folder, advance)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a GGUF file, and what it is called and how it lies in an HF-style folder."""

    source: Any
    name: str
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return int(self.source.n_elements) * 4

    def read(self) -> Float32:
        values = _dequantize(self.source)
        if self.name.endswith("q_proj.weight"):
            return _split_halves(values, self.config["num_attention_heads"])
        if self.name.endswith("k_proj.weight"):
            return _split_halves(values, self.config["num_key_value_heads"])
        return values


def _dequantize(tensor: Any) -> Float32:
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return values.reshape([int(size) for size in reversed(tensor.shape)])


def _split_halves(values: Float32, heads: int) -> Float32:
    """Order each head's rows as HF's rotary embedding wants them.

    GGUF's llama keeps the two numbers that rotate together side by side (row 2i and 2i+1 of a head); HF keeps them half
    a head apart (row i and i + head/2).
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(rows, columns)


def _open(gguf: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{gguf} is not a whole GGUF file ({error}); copy it again") from None
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURE_OF:
        allowed = " or ".join(_ARCHITECTURE_OF)
        raise ModelError(f"{gguf}: architecture {architecture} is not supported; it must be {allowed}")
    return reader


def _field(reader: Any, name: str) -> Any:
    """A value of the file's metadata; None if it is not there."""
    return reader.fields[name].contents() if name in reader.fields else None


def _hf_name(name: str, gguf: Path) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    raise ModelError(f"{gguf}: the tensor {name} is not one of a Llama or Mistral model, which alone can be served")


def _write_texts(gguf: Path, reader: Any, folder: Path) -> None:
    """Write what is not weights as transformers reads it from the file, but for the rope, which it does not read."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # transformers raises whatever its readers run into
        raise ModelError(f"{gguf}: its configuration or tokenizer cannot be read ({error})") from error
    config.architectures = [_ARCHITECTURE_OF[config.model_type]]
    config.dtype = "float32"
    config.rope_parameters |= _rope_extension(gguf, reader, config.rope_parameters["rope_theta"])
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rope_extension(gguf: Path, reader: Any, theta: float) -> dict[str, Any]:
    """What the file says of the rotary embedding beside its base, in the words of an HF config."""
    prefix = _field(reader, "general.architecture")
    width, heads = _field(reader, f"{prefix}.embedding_length"), _field(reader, f"{prefix}.attention.head_count")
    head_dim = _field(reader, f"{prefix}.attention.key_length") or width // heads
    rotated = _field(reader, f"{prefix}.rope.dimension_count") or head_dim
    kind = _field(reader, f"{prefix}.rope.scaling.type") or "none"
    if rotated != head_dim or kind not in ("none", "linear"):
        raise ModelError(
            f"{gguf}: its rotary embedding ({kind}, {rotated} of {head_dim} dimensions) is not supported; it must be "
            "none, linear or that of Llama 3, over all dimensions"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(_field(reader, f"{prefix}.rope.scaling.factor"))}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            return _llama3(gguf, _dequantize(tensor), theta, head_dim)
    return {}


def _llama3(gguf: Path, factors: Float32, theta: float, head_dim: int) -> dict[str, Any]:
    """The numbers behind `factors` [head_dim / 2], by which a file of Llama 3.1 or later divides its frequencies.

    All of these models slow waves longer than the old context of 8,192 positions by one factor, keep those shorter than
    a quarter of it, and interpolate between. If that does not give the file's factors, the file is something else.
    """
    numbers = {
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / (kept + (1.0 - kept) / numbers["factor"])
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{gguf}: its {_ROPE_FACTORS} are not those of a Llama 3 model, which alone can be served")
    return {"rope_type": "llama3", **numbers}


def _write_weights(plan: list[_Tensor], folder: Path, advance: Callable[[int], None]) -> None:
    from safetensors.numpy import save_file

    shards: list[list[_Tensor]] = [[]]
    for tensor in plan:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = {}
        for tensor in shard:
            values[tensor.name] = tensor.read()
            weight_map[tensor.name] = name
            advance(tensor.nbytes)
        save_file(values, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in plan)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
