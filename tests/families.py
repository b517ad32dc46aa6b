"""A small model of each family, with random weights and every feature of the architecture on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_model import write_tiny_llama

_WINDOW = 24

FAMILIES: dict[str, dict[str, Any]] = {
    # Heads and a width that not every mesh divides evenly.
    "llama": {
        "hidden_size": 96,
        "intermediate_size": 100,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": _WINDOW},
    "qwen2": {"tie_word_embeddings": True},
    # Fewer KV heads than devices share a weight.
    "qwen3": {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
}
"""Changes to the tiny model's config.json, by `model_type`."""

_ARCHITECTURE = {"qwen3_moe": "Qwen3MoeForCausalLM"}


def write_family(folder: Path, family: str) -> Path:
    """Write an HF-style folder with a model of `family`, and return it."""
    write_tiny_llama(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | FAMILIES[family]
    config["model_type"] = family
    config["architectures"] = [_ARCHITECTURE.get(family, f"{family.capitalize()}ForCausalLM")]
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    random = np.random.default_rng(3)
    scales = {"embed_tokens": 0.1 if config["tie_word_embeddings"] else 1.0, "lm_head": 0.4}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.3 if tensor.dim() == 1 else scales.get(name.split(".")[-2], 0.0)
            values = random.standard_normal(tuple(tensor.shape)).astype(np.float32)
            values *= scale or tensor.shape[-1] ** -0.5
            if "norm" in name and family != "gemma2":
                values += 1
            tensor.copy_(torch.from_numpy(values))
    model.save_pretrained(folder)
    path.write_text(json.dumps(config))
    return folder
