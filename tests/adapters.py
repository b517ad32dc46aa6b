"""LoRA adapters with random weights in peft's format, and the models that they make when they are merged."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    rank: int,
    targets: Sequence[str] = ALL_TARGETS,
    *,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter for the model in a folder into another, and return that; `settings` change its config."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    random = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        parts = name.split(".")
        wanted = parts[-1] == "weight" and parts[-2] in targets and "experts" not in parts
        if not wanted or (layers is not None and int(parts[2]) not in layers):
            continue
        outputs, inputs = weight.shape
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32) * inputs**-0.5
        tensors[f"{prefix}.lora_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32) * 0.4
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merged(model: Path, adapter: Path | None) -> Any:
    """The model of transformers with W + scale · B A in place of each W that the adapter has factors for; float32."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is None:
        return found
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(found.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                weights[target] += torch.from_numpy(scale * (b.astype(np.float64) @ a)).float()
    return found
