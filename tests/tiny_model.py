"""A Llama of a few thousand random weights in an HF-style folder, with a tokenizer of one token per byte."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
EOS = 2
MAX_POSITIONS = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Write the model into `folder`, which is made, and return it. Equal seeds give equal files."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate([*SPECIAL, *alphabet])}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, vocab)
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocab: dict[str, int]) -> None:
    """A tokenizer of single characters, by their names in GPT-2's alphabet of bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(config: dict[str, int], random: np.random.Generator) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:  # type: ignore[type-arg]
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden) * 8,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocab, hidden) * 3,
    }
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        weights |= {
            f"{start}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{start}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{start}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{start}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{start}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{start}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{start}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{start}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{start}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights
