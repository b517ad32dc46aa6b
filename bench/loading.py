"""How much memory loading takes: the peak of anonymous memory above the level before, beside the model's size.

``python -m bench.loading [--gigabytes 2]`` writes a model of random weights for each type, loads it as the executor
does, in a process of its own, and prints what its RssAnon rose by.
"""

import argparse
import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
"""Of layers as Llama-3.2-1B has them; those of a small model are half as wide, so that one is as small a part of it."""

_VOCABULARY = 32768
_SMALL = 1e9


class Loaded(NamedTuple):
    """`size` and `peak` in bytes: of all weights, and how far RssAnon rose above the level before loading."""

    size: int
    peak: int
    seconds: float


def write_model(folder: Path, size: int, dtype: str) -> int:
    """Write a Llama with random weights of about `size` bytes, each layer in a file of its own; its real size."""
    item = TYPES[dtype].itemsize
    shape = {key: value // (2 if size < _SMALL else 1) for key, value in _SHAPE.items()}
    hidden, inner, keys = shape["hidden_size"], shape["intermediate_size"], shape["hidden_size"] // 4
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layer_bytes = sum(int(np.prod(shape)) for shape in layer.values()) * item
    vocabulary = _VOCABULARY // (4 if size < _SMALL else 1)
    layers = max(1, round((size - 2 * vocabulary * hidden * item) / layer_bytes))
    outer = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    files = [outer] + [{f"model.layers.{n}.{name}": shape for name, shape in layer.items()} for n in range(layers)]
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    place: dict[str, str] = {}
    written = 0
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        values = {
            f"{key}.weight": random.random(shape, np.float32).astype(TYPES[dtype]) for key, shape in tensors.items()
        }
        save_file(values, folder / name)
        place |= dict.fromkeys(values, name)
        written += sum(value.nbytes for value in values.values())
    config: dict[str, Any] = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
    }
    config |= {"num_hidden_layers": layers, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    (folder / "tokenizer.json").write_text("{}")
    return written


def measure(folder: Path, size: int, dtype: str, *settings: str) -> Loaded:
    """Load the model in `folder` in a new process, with `settings` as flags; see `Loaded`."""
    command = [sys.executable, "-m", "bench.loading", "--load", str(folder), "--dtype", dtype, *settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            if child.stdout.readline() != b"ready\n":
                raise RuntimeError("the process that loads ended before it began")
            before = peak = _anonymous(child.pid)
            started = time.monotonic()
            child.stdin.write(b"go\n")
            child.stdin.flush()
            while not select.select([child.stdout], [], [], 0.001)[0]:
                peak = max(peak, _anonymous(child.pid))
            if child.stdout.readline() != b"loaded\n":
                raise RuntimeError("the process that loads ended before it was done")
            return Loaded(size, peak - before, time.monotonic() - started)
        finally:
            child.kill()


def _anonymous(pid: int) -> int:
    """RssAnon of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load(folder: Path, flags: dict[str, str]) -> None:
    """Load a model as the executor does, when a line comes on standard input."""
    from bus import config, model_files
    from executor import device, mesh
    from executor.runner import load_model

    settings = config.load(flags)
    devices = device.set_up(settings.cache_path)
    facts = model_files.read(folder)
    made = mesh.make(settings, devices)
    print("ready", flush=True)
    sys.stdin.readline()
    model = load_model(settings, facts, made, device.dtype_of(settings, devices[0]), lambda *_: None)
    print("loaded", flush=True)
    sys.stdin.readline()  # the model stays until the last look
    del model


def main(arguments: list[str]) -> None:
    from bus import config

    flags, rest = config.split_flags(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(rest)
    if parsed.load:
        load(parsed.load, flags)
        return
    for dtype in TYPES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            size = write_model(folder, int(parsed.gigabytes * 1e9), dtype)
            found = measure(folder, size, dtype, *(f"--{key}={value}" for key, value in flags.items()))
        print(
            f"{dtype}: {found.size / 1e9:.2f} GB loaded in {found.seconds:.1f} s with at most "
            f"{found.peak / 1e9:.2f} GB of anonymous memory, {found.peak / found.size:.2f} of its size"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
