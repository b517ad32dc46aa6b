"""Where the served model's files lie, whether they are whole, and the facts in them that processes need.

Reads headers and JSON only: it takes milliseconds, and imports neither a tensor library nor a tokenizer.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bus.config import Config, ConfigError

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
}
"""Architectures that can be served, each with the `model_type` that its config.json names."""

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

PREPARATION = "v1"
"""Version of what `executor.prepare` writes. Change it when that changes: folders made before are then made anew."""

_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh"}
"""Of the MLP, by the kind of model; of all others it is silu."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_HEADER_MAX = 100_000_000
_DTYPES = ("F32", "F16", "BF16")


class ModelError(ConfigError):
    """A model that cannot be served; the message is one sentence that names what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What `Config.model` stands for.

    `folder` is the HF-style folder to serve; `gguf` is the file it is prepared from (None for a folder that is given,
    and for the embedded model, whose file is fetched). `prepared` tells whether rankbus makes that folder.
    """

    name: str
    folder: Path
    gguf: Path | None
    prepared: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding parameters: `theta` is the base, `type` "default" for none of the extensions.

    `extra` holds the numbers of an extension under their names in config.json.
    """

    theta: float
    type: str
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many there are, how many each token goes to, and the inner size of each.

    `normalize` says that the weights of a token's experts are made to add up to 1.
    """

    count: int
    per_token: int
    inner_size: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says of itself. Sizes are in elements, `max_positions` in tokens."""

    folder: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    max_positions: int
    """Longest context."""
    eos_token_ids: tuple[int, ...]
    chat: bool
    """Whether it has a chat template."""
    weight_files: tuple[Path, ...]
    fingerprint: str
    """Hash of config.json and of the names, shapes and sizes of all weights."""
    query_scale: float
    """What the products of queries and keys are multiplied by."""
    activation: str = "silu"
    """Of the MLP: silu, or gelu_pytorch_tanh."""
    attention_bias: bool = False
    """Whether queries, keys and values have a bias."""
    head_norms: bool = False
    """Whether each head's query and key are normed."""
    windows: tuple[int, ...] = ()
    """How many tokens, itself the last, a token sees in each layer; 0 is all before it, and so is an empty tuple."""
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    """c tanh(x / c) bounds the scores of attention, and the logits; 0 is no bound."""
    embedding_scale: float = 1.0
    experts: Experts | None = None

    @property
    def kv_width(self) -> int:
        """Elements of the KV cache that a token takes, as far as the model goes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int:
        """See `windows`."""
        return self.windows[layer] if self.windows else 0


def resolve(config: Config) -> ModelSource:
    """Say which folder `config.model` is served from. The folder may still have to be prepared.

    Raises:
        ModelError: there is no such folder or file.
    """
    root = config.cache_path / "models" / PREPARATION
    if config.model == "embedded":
        name = config.served_model_name or EMBEDDED_NAME
        return ModelSource(name, root / EMBEDDED_NAME, gguf=None, prepared=True)
    path = Path(config.model).expanduser().absolute()
    if path.is_dir():
        return ModelSource(config.served_model_name or path.name, path, gguf=None, prepared=False)
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        identity = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
        folder = root / identity[:16] / path.stem
        return ModelSource(config.served_model_name or path.stem, folder, gguf=path, prepared=True)
    raise ModelError(
        f"model: {config.model} is not there; it must be embedded, an HF-style folder, or a file that ends in .gguf"
    )


def read(folder: Path) -> ModelFacts:
    """Read and check an HF-style folder.

    Raises:
        ModelError: a file is missing, cannot be read or is cut short, or the architecture is not supported.
    """
    facts = outline(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"the model folder {folder} has no tokenizer.json; a folder needs one")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    weights, names = _weights(folder, digest)
    _check_names(folder, names, facts.num_layers, facts.tie_word_embeddings)
    return replace(facts, weight_files=weights, fingerprint=digest.hexdigest()[:32])


def outline(folder: Path) -> ModelFacts:
    """What config.json alone says: facts without weights and without a fingerprint.

    Raises:
        ModelError: config.json cannot be read, or the architecture is not supported.
    """
    config = _read_json(folder, "config.json")
    architecture = _architecture(folder, config)
    kind = ARCHITECTURES[architecture]
    sizes = _sizes(folder, config)
    return ModelFacts(
        folder=folder,
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(folder, config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", kind == "gemma2")),
        max_positions=sizes["max_position_embeddings"],
        eos_token_ids=_eos(folder, config),
        chat=_has_chat_template(folder),
        weight_files=(),
        fingerprint="",
        query_scale=_number(folder, config, "query_pre_attn_scalar", sizes["head_dim"]) ** -0.5,
        activation=_ACTIVATIONS.get(kind, "silu"),
        attention_bias=kind == "qwen2",
        head_norms=kind in ("qwen3", "qwen3_moe"),
        windows=_windows(folder, config, kind, sizes["num_hidden_layers"]),
        attention_soft_cap=_number(folder, config, "attn_logit_softcapping", 0),
        final_soft_cap=_number(folder, config, "final_logit_softcapping", 0),
        embedding_scale=sizes["hidden_size"] ** 0.5 if kind == "gemma2" else 1.0,
        experts=_experts(folder, config) if kind == "qwen3_moe" else None,
    )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"the model folder {folder} has no {name}; a folder needs one") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; copy it again")
    return value


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ["none"]
    architecture = str(named[0]) if isinstance(named, list) else str(named)
    allowed = ", ".join(ARCHITECTURES)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{folder}/config.json: architecture {architecture} is not supported; it must be {allowed}")
    if config.get("quantization_config"):
        raise ModelError(f"{folder}/config.json: quantized weights are not supported; they must be {_list(_DTYPES)}")
    activation = _ACTIVATIONS.get(ARCHITECTURES[architecture], "silu")
    supported: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "decoder_sparse_step": 1}
    supported |= {"hidden_activation": activation} if activation != "silu" else {"hidden_act": activation}
    supported |= {"mlp_only_layers": []}
    for key, allowed_value in supported.items():
        if (config.get(key) or allowed_value) != allowed_value:
            raise ModelError(
                f"{folder}/config.json: {key} {config[key]!r} is not supported; it must be {json.dumps(allowed_value)}"
            )
    return architecture


def _windows(folder: Path, config: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int, ...]:
    """See `ModelFacts.windows`. Which layers have the window is listed, or else as the architecture has it."""
    window = config.get("sliding_window")
    if window is None or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return ()
    if kind == "llama":
        raise ModelError(f"{folder}/config.json: sliding_window is {window!r}; a Llama has none")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ModelError(f"{folder}/config.json: sliding_window is {window!r}; it must be null or a positive number")
    listed = config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise ModelError(f"{folder}/config.json: layer_types must list all {num_layers} layers")
        return tuple(window if name == "sliding_attention" else 0 for name in listed)
    first_full = config.get("max_window_layers", 28)
    match kind:
        case "mistral":
            has_window = [True] * num_layers
        case "gemma2":
            has_window = [layer % 2 == 0 for layer in range(num_layers)]
        case _:
            has_window = [layer >= first_full for layer in range(num_layers)]
    return tuple(window if has else 0 for has in has_window)


def _experts(folder: Path, config: Mapping[str, Any]) -> Experts:
    count = _count(folder, config, "num_experts")
    per_token = _count(folder, config, "num_experts_per_tok")
    if per_token > count:
        raise ModelError(f"{folder}/config.json: num_experts_per_tok is {per_token}; there are {count} experts")
    inner_size = _count(folder, config, "moe_intermediate_size")
    return Experts(count, per_token, inner_size, bool(config.get("norm_topk_prob", False)))


def _number(folder: Path, config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{folder}/config.json: {key} is {value!r}; it must be null or a positive number")
    return float(value)


def _count(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{folder}/config.json: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _sizes(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    values = dict(config)
    heads = values.get("num_attention_heads")
    hidden = values.get("hidden_size")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        values["head_dim"] = hidden // heads
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    found = {key: _count(folder, values, key) for key in keys}
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ModelError(f"{folder}/config.json: num_attention_heads must be a multiple of num_key_value_heads")
    return found


def _rope(folder: Path, config: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    try:
        extra = {name: float(value) for name, value in parameters.items() if value is not None}
        return Rope(float(theta), str(kind), extra)
    except (TypeError, ValueError):
        raise ModelError(f"{folder}/config.json: the rope parameters must be numbers") from None


def _eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        value = _read_json(folder, "generation_config.json").get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{folder}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    return (folder / _TOKENIZER_CONFIG).is_file() and "chat_template" in _read_json(folder, _TOKENIZER_CONFIG)


def _weights(folder: Path, digest: "hashlib._Hash") -> tuple[tuple[Path, ...], set[str]]:
    """The folder's weight files, each checked to be whole, and the names of all tensors in them."""
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX} has no weight_map; copy it again")
    elif (folder / _SINGLE).is_file():
        weight_map = None
    else:
        raise ModelError(f"the model folder {folder} has no weights; it needs {_SINGLE}, or {_INDEX} and its shards")
    shards = sorted(set(weight_map.values())) if weight_map else [_SINGLE]
    found: set[str] = set()
    for shard in shards:
        names = set(_tensors(folder / shard, digest))
        listed = {name for name, where in weight_map.items() if where == shard} if weight_map else names
        if listed - names:
            raise ModelError(f"{folder / shard} lacks {min(listed - names)}, which {_INDEX} promises; copy it again")
        found |= names
    return tuple(folder / shard for shard in shards), found


def _tensors(path: Path, digest: "hashlib._Hash") -> Iterator[str]:
    """Names of the tensors in a safetensors file whose header agrees with the file's length.

    Source: the format's description, https://github.com/huggingface/safetensors#format
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            raw = file.read(min(length, _HEADER_MAX))
    except FileNotFoundError:
        raise ModelError(f"the model folder {path.parent} has no {path.name}, which its index names") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if 8 + length > size:
        raise ModelError(f"{path} is cut short: it ends within its header; copy it again")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        dtypes = {entry["dtype"] for entry in header.values()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path} is not a safetensors file; copy it again") from None
    if 8 + length + end != size:
        raise ModelError(f"{path} is cut short: it has {size} bytes and needs {8 + length + end}; copy it again")
    for dtype in sorted(dtypes - set(_DTYPES)):
        raise ModelError(f"{path}: weights of type {dtype} are not supported, {_list(_DTYPES)} are")
    digest.update(f"{path.name}\0{size}\0".encode() + raw)
    yield from header


def _check_names(folder: Path, names: set[str], num_layers: int, tied: bool) -> None:
    """The tensors without which no architecture here can be: the embedding, every layer, the head if it is not tied."""
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    needed += [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(num_layers)]
    needed += [] if tied else ["lm_head.weight"]
    for name in needed:
        if name not in names:
            raise ModelError(f"the weights in {folder} lack {name}; the folder is not complete")


def _list(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]
