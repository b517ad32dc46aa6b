"""Compile the steps of a model for TPUs that are not there, and read from the programs what they cost.

``python -m executor.aot OUT CONFIG …`` does it for the folders CONFIG, of which only config.json is read, on several
topologies, prints a table and writes OUT, a JSON file.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from bus import model_files
from bus.config import Config, ConfigError
from bus.model_files import ModelFacts
from executor import attention_tpu, weights
from executor import mesh as meshes
from executor.attention_tpu import TpuAttention
from executor.mesh import DATA, MODEL
from executor.step_programs import StepPrograms

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

    name: str
    times: int
    bytes_accessed: int
    """See `memory_traffic`."""
    flops: float
    temporary_bytes: int
    donated_bytes: int
    hlo: str


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
    def bytes_accessed(self) -> int:
        return sum(program.times * program.bytes_accessed for program in self.programs)

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
        model = weights.outline(facts, DTYPE, self.mesh)
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
        times = {(f"{name} enter", batch): 1, ("head", drawn): 1, ("greedy", drawn): 1}
        for group in range(len(steps.layers)):
            key = (steps.layers_name(name, group), batch)
            times[key] = times.get(key, 0) + 1
        started = time.monotonic()
        programs = [_program(*key, steps.programs.compile_one(*key), count) for key, count in times.items()]
        temporary = max(program.temporary_bytes for program in programs)
        return Step(
            kind,
            batch,
            programs,
            self._minimum(batch, drawn),
            self._kernel_kv_bytes(name, batch),
            self.weight_bytes + self.kv_bytes + temporary,
            time.monotonic() - started,
        )

    def _minimum(self, tokens: int, lines: int) -> int:
        """Bytes that a device must move: see docs/tpu.md for what is counted."""
        steps, item = self.steps, DTYPE.itemsize
        leaves = [leaf for group in steps.layers for layer in group for leaf in layer]
        total = sum(map(_local_bytes, leaves))
        activations = 0
        for leaf in leaves:
            local = leaf.sharding.shard_shape(leaf.shape)
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
        pairs, width = steps.kv[0][0].sharding.shard_shape(steps.kv[0][0].shape)[3:]
        return total + self.facts.num_layers * tokens * pairs * width * item

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
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _program(name: str, size: int, compiled: Any, times: int) -> Program:
    cost, memory, hlo = compiled.cost_analysis(), compiled.memory_analysis(), compiled.as_text()
    return Program(
        f"{name} {size}",
        times,
        memory_traffic(hlo),
        cost["flops"],
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        hlo,
    )


# What the compiled text says

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]\)")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done", "slice-done", "after-all")
"""Instructions that move nothing, or end what another one began."""


class Instruction(NamedTuple):
    """An instruction of a program's text: its opcode, its result, and the names of its operands."""

    name: str
    opcode: str
    result: str
    operands: list[str]
    line: str


def instructions(hlo: str) -> Iterator[Instruction]:
    """All instructions of a program, those within fused computations and loops too."""
    for line in hlo.splitlines():
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
        if found:
            name, result, opcode, rest = found.groups()
            yield Instruction(name, opcode, result, re.findall(r"%([\w.\-]+)", rest.split("), ")[0]), line)


def memory_traffic(hlo: str) -> int:
    """Bytes that a program moves from and to the device's memory, without its attention kernel.

    What lies in the chip's fast memory (S(1) in the text) is not counted, other than in `cost_analysis`: there it
    counts when it is copied in, once whole for each of the slices in which that is done, and again when it is used. Of
    a scatter only what is written counts, of a gather what is found.
    """
    found = {instruction.name: instruction for instruction in instructions(hlo[hlo.index("\nENTRY") :])}
    return sum(_traffic(instruction, found) for instruction in found.values())


def _traffic(instruction: Instruction, others: Mapping[str, Instruction]) -> int:
    if instruction.opcode in _FREE or 'custom_call_target="ConcatBitcast"' in instruction.line:
        return 0
    if instruction.name.startswith("ragged_paged_attention"):
        return 0
    operands = [_arrays(others[name].result) for name in instruction.operands if name in others]
    if instruction.opcode == "copy-start":
        return _arrays(instruction.result)[0].size
    if instruction.opcode == "slice-start":
        return _arrays(instruction.result)[1].size
    results = _arrays(instruction.result)
    read = [sum(array.size for array in arrays if not array.on_chip) for arrays in operands]
    written = sum(array.size for array in results if not array.on_chip)
    if "scatter" in instruction.name or "dynamic-update-slice" in instruction.name:
        update = sum(sorted(array.size for arrays in operands for array in arrays)[:-1])
        return sum(sorted(read)[:-1]) + update
    if "gather" in instruction.name:
        read = [min(size, sum(array.size for array in results)) for size in read]
    return sum(read) + written


class _Array(NamedTuple):
    size: int
    on_chip: bool


def _arrays(result: str) -> list[_Array]:
    """The arrays in the text of a result's type."""
    return [
        _Array(
            _SIZES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n), bool(_ON_CHIP.search(layout or ""))
        )
        for kind, dims, layout in _SHAPE.findall(result)
    ]


def moved(hlo: str, opcodes: Sequence[str], at_least: int) -> list[str]:
    """Instructions of these kinds whose result has at least so many bytes."""
    return [
        instruction.line.strip()[:200]
        for instruction in instructions(hlo)
        if instruction.opcode in opcodes
        and max((array.size for array in _arrays(instruction.result)), default=0) >= at_least
    ]


# The command

TOPOLOGIES = {"v5e:2x2": 4, "v6e:2x2": 4, "v5e:4x4": 16}
"""Topologies, and their devices."""

_BATCHES = {"decode": 64, "prefill": 512}


def settings_for(facts: ModelFacts, devices: int, tensor_parallel: int) -> Config:
    return Config(
        ranks=devices // tensor_parallel,
        tensor_parallel=tensor_parallel,
        max_num_seqs=_BATCHES["decode"],
        max_num_batched_tokens=_BATCHES["prefill"],
        max_model_len=min(2048, facts.max_positions),
        num_blocks=devices // tensor_parallel * _BATCHES["decode"] * CONTEXT // 16,
    )


def smallest_fit(facts: ModelFacts, devices: list[jax.Device]) -> Target:
    """The model on the fewest devices for each weight that it fits on."""
    tensor_parallel = 1
    while True:
        try:
            target = Target(settings_for(facts, len(devices), tensor_parallel), facts, devices)
            if target.weight_bytes + target.kv_bytes < 0.9 * target.chip.memory_bytes:
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
    console = Console(width=160)
    table = Table(
        "model",
        "topology",
        "mesh",
        "step",
        "batch",
        "GB accessed",
        "ratio",
        "kernel's KV GB",
        "GFLOP",
        "GiB/chip",
        "compiled in s",
    )
    rows: list[dict[str, Any]] = []
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    for folder in parsed.configs:
        facts = model_files.outline(folder)
        for topology in parsed.topologies:
            target = smallest_fit(facts, devices_of(topology))
            for kind in parsed.kinds:
                step = target.compile(kind, _BATCHES[kind])
                rows.append(_row(folder.name, topology, step))
                parsed.out.write_text(json.dumps({"programs": rows}, indent=1) + "\n")
                shape = f"{target.mesh.shape[DATA]}×{target.mesh.shape[MODEL]}"
                shown = [folder.name, topology, shape, kind, step.batch]
                shown += [f"{step.bytes_accessed / 1e9:.2f}", f"{step.bytes_accessed / step.bytes_minimum:.2f}"]
                shown += [f"{step.kernel_kv_bytes / 1e9:.2f}", f"{step.flops / 1e9:.0f}"]
                shown += [f"{step.memory_bytes / GIB:.1f}", f"{step.compile_s:.0f}"]
                table.add_row(*map(str, shown))
                console.print(*map(str, shown), highlight=False)
    console.print(table)
    return 0


def _row(model: str, topology: str, step: Step) -> dict[str, Any]:
    return {
        "model": model,
        "topology": topology,
        "kind": step.kind,
        "batch": step.batch,
        "bytes_accessed_outside_kernel": step.bytes_accessed,
        "bytes_minimum_outside_kernel": step.bytes_minimum,
        "bytes_ratio": round(step.bytes_accessed / step.bytes_minimum, 4),
        "kernel_kv_bytes": step.kernel_kv_bytes,
        "flops": int(step.flops),
        "memory_per_chip_bytes": step.memory_bytes,
        "compile_s": round(step.compile_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
