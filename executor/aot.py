"""Compile the steps of a model for TPUs that are not there, and read from the programs what they cost.

``python -m executor.aot OUT CONFIG …`` does it for the folders CONFIG, of which only config.json is read, on several
topologies, prints a table and writes OUT, a JSON file.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from bus import model_files
from bus.config import Config, ConfigError
from bus.model_files import ModelFacts
from executor import attention_tpu, hlo, weights
from executor import mesh as meshes
from executor.attention_tpu import TpuAttention
from executor.mesh import DATA, MODEL
from executor.programs import Key
from executor.step_programs import UNSTAGED, StepPrograms

DTYPE = jnp.dtype(jnp.bfloat16)
GIB = 2**30

CONTEXT = 1024
"""Length of every sequence in a decode step, for what the kernel reads of the KV cache."""


class Chip(NamedTuple):
    """What a device that JAX sees has: bytes of memory, bytes and bfloat16 operations a second."""

    memory_bytes: int
    bytes_s: float
    flops_s: float


CHIPS = {
    "TPU v4": Chip(32 * GIB, 1.2e12, 275e12),
    "TPU v5 lite": Chip(16 * GIB, 0.82e12, 197e12),
    "TPU v5": Chip(95 * GIB, 2.76e12, 459e12),
    "TPU v6 lite": Chip(32 * GIB, 1.64e12, 918e12),
}
"""By JAX's name of the device. Source: the pages of each version under https://cloud.google.com/tpu/docs."""


class Program(NamedTuple):
    """A compiled program of a step, on one device; `times` is how often the step runs it."""

    key: Key
    times: int
    bytes_moved: int
    """See `hlo.memory_traffic`."""
    flops: float
    temporary_bytes: int
    donated_bytes: int
    text: str


class Step(NamedTuple):
    """What a step costs on each device. `batch` counts sequences (decode) or tokens (prefill) of each data shard."""

    kind: str
    batch: int
    programs: list[Program]
    bytes_minimum: int
    kernel_kv_bytes: int
    memory_bytes: int
    compile_s: float

    @property
    def bytes_moved(self) -> int:
        return sum(program.times * program.bytes_moved for program in self.programs)

    @property
    def flops(self) -> float:
        return sum(program.times * program.flops for program in self.programs)


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology such as v6e:2x2; none of them has to be there.

    Raises:
        ConfigError: libtpu knows no such topology, or is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    # libtpu would ask the machine's metadata server for these, and take its TPU for this process alone.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # whatever libtpu runs into
        reason = str(error).splitlines()[0]
        raise ConfigError(f"topology: {topology} cannot be compiled for, v6e:2x2 for one can ({reason})") from None
    if devices[0].device_kind not in CHIPS:
        raise ConfigError(f"topology: {topology} has a {devices[0].device_kind}; known are {', '.join(CHIPS)}")
    return list(devices)


class Target:
    """A model's programs for a configuration on a topology, with its weights and KV cache in outline."""

    def __init__(self, config: Config, facts: ModelFacts, devices: Sequence[jax.Device]) -> None:
        """Raise ConfigError if the configuration, or the model, does not fit."""
        self.chip = CHIPS[devices[0].device_kind]
        self.config, self.facts = config, facts
        self.mesh = meshes.make(config, devices)
        model = weights.outline(facts, DTYPE, self.mesh, config.quantization == "int8")
        self.weight_bytes = sum(map(_local_bytes, jax.tree.leaves(model)))
        """Of one device."""
        free = self.chip.memory_bytes - self.weight_bytes
        if free <= 0:
            raise ConfigError(
                f"the weights take {self.weight_bytes / GIB:.1f} GiB of each device's "
                f"{self.chip.memory_bytes / GIB:.0f} GiB; raise tensor_parallel or take a larger topology"
            )
        self.steps = StepPrograms(config, facts, self.mesh, model, free * self.mesh.size)
        self.kv_bytes = sum(map(_local_bytes, jax.tree.leaves(self.steps.kv)))
        """Of one device."""
        self.adapter_bytes = sum(map(_local_bytes, jax.tree.leaves(self.steps.adapters)))
        """Of one device, for all the adapters that may be loaded."""

    def compile(self, kind: str, batch: int) -> Step:
        """Compile a greedy step: the decode of `batch` sequences on each shard, or the prefill of `batch` tokens.

        `batch` is one of the sizes that `steps` has programs for.
        """
        steps = self.steps
        name = "decode" if kind == "decode" else "mixed"
        sequences = batch if kind == "decode" else 1
        drawn = next(size for size in steps.draw_sizes if size >= sequences)
        ending = steps.trace_step(name, batch)
        steps.trace_drawing(drawn, ending)
        keys = [Key(f"{name} enter", batch), Key("head", drawn), Key("greedy", drawn)]
        keys += [Key(steps.layers_name(name, group), batch) for group in range(len(steps.layers))]
        times = Counter(keys)
        started = time.monotonic()
        programs = [_program(key, count, steps.programs.compile_one(key)) for key, count in times.items()]
        temporary = max(program.temporary_bytes for program in programs)
        return Step(
            kind,
            batch,
            programs,
            self._minimum(batch, drawn),
            self._kernel_kv_bytes(name, batch),
            self.weight_bytes + self.adapter_bytes + self.kv_bytes + temporary,
            time.monotonic() - started,
        )

    def bytes_accessed(self, step: Step) -> int:
        """What `cost_analysis` counts for a step that was compiled, whose programs are compiled for it once more.

        That is without the use of fast memory. Otherwise it counts a weight when it is copied there, whole for each of
        the slices in which that is done, and again when it is used.
        """
        total = 0
        for program in step.programs:
            counted = self.steps.programs.compile_one(program.key, UNSTAGED)
            total += program.times * int(counted.cost_analysis()["bytes accessed"])
        return total

    def _minimum(self, tokens: int, lines: int) -> int:
        """Bytes that a device must move: see docs/tpu.md for what is counted."""
        steps, item = self.steps, DTYPE.itemsize
        leaves = [leaf for group in steps.layers for layer in group for leaf in layer]
        total = sum(map(_local_bytes, leaves))
        activations = 0
        for leaf in leaves:
            local = leaf.sharding.shard_shape(leaf.shape)
            if leaf.dtype == jnp.float32:
                continue  # scales of a matrix of 8 bits
            if len(local) == 2:
                activations += tokens * (local[0] + local[1])
            elif len(local) == 3:
                assert self.facts.experts is not None
                routed = tokens * self.mesh.shape[DATA] * self.facts.experts.per_token / self.mesh.size
                activations += math.ceil(routed * (local[1] + local[2]))
        head = max((leaf for leaf in steps.outer if len(leaf.shape) == 2), key=lambda leaf: leaf.shape[0])
        total += _local_bytes(head) + tokens * self.facts.hidden_size * item  # and the rows that are looked up
        total += activations * item
        # Logits are written, read when they are drawn from, and on several devices exchanged in between.
        total += 2 * lines // self.mesh.shape[MODEL] * self.facts.vocab_size * 4
        return total + tokens * (steps.block_bytes // steps.block_size // self.mesh.shape[MODEL])

    def _kernel_kv_bytes(self, name: str, batch: int) -> int:
        steps = self.steps
        attention = steps.attention(name)
        assert isinstance(attention, TpuAttention)
        sizes = attention.sizes(batch, steps.kv_layout.most_blocks)
        length = min(CONTEXT, steps.max_model_len)
        counts, lengths = ([1] * batch, [length] * batch) if name == "decode" else ([batch], [batch])
        blocks = attention_tpu.blocks_read(
            counts, lengths, steps.block_size, sizes["num_queries_per_block"], sizes["num_kv_pages_per_block"]
        )
        return blocks * steps.block_bytes // self.mesh.shape[MODEL]


def _local_bytes(leaf: Any) -> int:
    """Of a device's part of an array, as a TPU lays a matrix out: in tiles of 8 × 128, the way that pads less.

    Tiles of fewer rows are less high, and a vector is taken as it is.
    """
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    elements = math.prod(shape)
    if len(shape) > 1:
        rows, columns = shape[-2:]
        padded = (_up(rows, 8) * _up(columns, 128), _up(columns, 8) * _up(rows, 128))
        elements = elements // (rows * columns) * min(padded)
    return elements * int(leaf.dtype.itemsize)


def _up(size: int, multiple: int) -> int:
    """`size` padded to whole tiles of that size, or to a power of two if it is less than one."""
    if size < multiple == 8:
        return 1 << (size - 1).bit_length()
    return -(-size // multiple) * multiple


def _program(key: Key, times: int, compiled: Any) -> Program:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Program(
        key,
        times,
        hlo.memory_traffic(text),
        compiled.cost_analysis()["flops"],
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        text,
    )


# The command

TOPOLOGIES = {"v5e:2x2": 1, "v6e:2x2": 1, "v5e:4x4": 4}
"""Topologies, each with how many devices share a weight there, if that leaves each of them `_WORTH_SHARING`."""

_WORTH_SHARING = GIB

_INT8_ON = "v6e:2x2"
"""Where decode steps are compiled with weights of 8 bits, too."""

_WORTH_HALVING = GIB // 2
"""Bytes of weights, of one device, from which on 8 bits are tried."""

_BATCHES = {"decode": 8, "prefill": 512}

_ROWS = 64
"""Sequences that each rank has room for: so many that the compiler cannot bring a layer's KV cache into fast memory."""

_COLUMNS = ("model", "topology", "mesh", "weights", "step", "batch", "GB accessed", "ratio", "GB moved", "KV GB")
_MORE_COLUMNS = ("GFLOP", "GiB/chip", "compiled in s")


class Job(NamedTuple):
    """A step to compile: of the model in `folder`, with its weights as the setting `quantization` says."""

    folder: Path
    topology: str
    quantization: Literal["none", "int8"]
    kind: str


def jobs(folders: Sequence[Path], topologies: Sequence[str], kinds: Sequence[str]) -> Iterator[Job]:
    for kind in kinds:
        for topology in topologies:
            yield from (Job(folder, topology, "none", kind) for folder in folders)
    if "decode" in kinds and _INT8_ON in topologies:
        yield from (Job(folder, _INT8_ON, "int8", "decode") for folder in folders)


def settings_for(facts: ModelFacts, devices: int, tensor_parallel: int) -> Config:
    return Config(
        ranks=devices // tensor_parallel,
        tensor_parallel=tensor_parallel,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_BATCHES["prefill"],
        max_model_len=min(2048, facts.max_positions),
        num_blocks=devices // tensor_parallel * _ROWS * CONTEXT // 16,
    )


def target_of(job: Job) -> Target:
    """The model on few devices for each weight: on more if it does not fit, or as `TOPOLOGIES` says.

    Raises:
        ConfigError: it does not fit at all.
    """
    facts, devices = model_files.outline(job.folder), devices_of(job.topology)
    tensor_parallel = 1
    while True:
        config = settings_for(facts, len(devices), tensor_parallel)
        try:
            target = Target(msgspec.structs.replace(config, quantization=job.quantization), facts, devices)
            taken = target.weight_bytes + target.kv_bytes
            if taken > 0.9 * target.chip.memory_bytes:
                raise ConfigError(
                    f"weights and KV cache take {taken / GIB:.1f} GiB of each device's "
                    f"{target.chip.memory_bytes / GIB:.0f} GiB"
                )
            more = tensor_parallel < TOPOLOGIES.get(job.topology, 1)
            if not (more and target.weight_bytes >= 2 * _WORTH_SHARING):
                return target
        except ConfigError:
            if tensor_parallel == len(devices):
                raise
        tensor_parallel *= 2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m executor.aot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--kinds", nargs="+", choices=_BATCHES, default=list(_BATCHES))
    parsed = parser.parse_args(arguments)
    console = Console(width=180, highlight=False)
    table = Table(*_COLUMNS, *_MORE_COLUMNS)
    found: dict[str, list[dict[str, Any]]] = {"programs": [], "left_out": []}
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    for job in jobs(parsed.configs, parsed.topologies, parsed.kinds):
        try:
            target = target_of(job)
        except ConfigError as error:
            console.print(f"{job.folder.name} on {job.topology}: {error}")
            found["left_out"].append({"model": job.folder.name, "topology": job.topology, "reason": str(error)})
        else:
            if job.quantization == "int8" and target.weight_bytes < _WORTH_HALVING:
                continue
            step = target.compile(job.kind, _BATCHES[job.kind])
            found["programs"].append(_row(job, target, step, target.bytes_accessed(step)))
            shown = _shown(found["programs"][-1])
            table.add_row(*shown)
            console.print(*shown)
        parsed.out.write_text(json.dumps(found, indent=1) + "\n")  # so that what is done stays if this is ended
    console.print(table)
    return 0


def _row(job: Job, target: Target, step: Step, accessed: int) -> dict[str, Any]:
    return {
        "model": job.folder.name,
        "topology": job.topology,
        "mesh": f"{target.mesh.shape[DATA]}x{target.mesh.shape[MODEL]}",
        "quantization": job.quantization,
        "kind": step.kind,
        "batch": step.batch,
        "bytes_accessed_outside_kernel": accessed,
        "bytes_minimum_outside_kernel": step.bytes_minimum,
        "bytes_ratio": round(accessed / step.bytes_minimum, 4),
        "bytes_moved_outside_kernel": step.bytes_moved,
        "kernel_kv_bytes": step.kernel_kv_bytes,
        "flops": int(step.flops),
        "memory_per_chip_bytes": step.memory_bytes,
        "compile_s": round(step.compile_s, 1),
    }


def _shown(row: Mapping[str, Any]) -> list[str]:
    """The columns of a row."""
    words = [str(row[key]) for key in ("model", "topology", "mesh", "quantization", "kind", "batch")]
    gigabytes = [row[f"bytes_{what}_outside_kernel"] / 1e9 for what in ("accessed", "moved")]
    words += [f"{gigabytes[0]:.2f}", f"{row['bytes_ratio']:.2f}", f"{gigabytes[1]:.2f}"]
    words += [f"{row['kernel_kv_bytes'] / 1e9:.2f}", f"{row['flops'] / 1e9:.0f}"]
    return [*words, f"{row['memory_per_chip_bytes'] / GIB:.1f}", f"{row['compile_s']:.0f}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
