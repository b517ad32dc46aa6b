"""The tiny model in other shapes: changed, in several files, or as GGUF."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from safetensors.numpy import load_file, save_file

from tests.tiny_model import write_tiny_llama


def write_folder(folder: Path, shards: int = 1, **changes: Any) -> Path:
    """An HF-style folder with its weights in so many files; `changes` go into its config.json."""
    write_tiny_llama(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    if shards == 1:
        return folder
    single = folder / "model.safetensors"
    weights = load_file(single)
    single.unlink()
    where = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(weights)}
    for shard in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def write_gguf(
    path: Path,
    architecture: str = "llama",
    rope_theta: float = 10000.0,
    rope_factors: np.ndarray | None = None,
    rope_scaling: tuple[str, float] | None = None,
    rope_dimensions: int = 16,
) -> Path:
    """A GGUF file with the tiny model's shapes and numbers, and a byte-level BPE tokenizer of one merge.

    The rows of its query and key matrices are not reordered, so it is not the same model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tiny_llama(Path(temporary) / "tiny")
        config = json.loads((folder / "config.json").read_text())
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        weights = load_file(folder / "model.safetensors")
    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_rope_dimension_count(rope_dimensions)
    if rope_scaling is not None:
        writer.add_rope_scaling_type(RopeScalingType(rope_scaling[0]))
        writer.add_rope_scaling_factor(rope_scaling[1])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*sorted(vocab, key=vocab.get)[:-1], "AB"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, values in weights.items():
        writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.layers.", "blk."),
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(ours, theirs)
    return name
