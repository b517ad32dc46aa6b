"""``rankbus plan``: what a model needs and can do on TPUs that are not there, from its config.json alone."""

from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.table import Table

from bus import config as configuration
from bus import model_files
from bus.config import ConfigError
from executor.aot import CONTEXT, GIB, Step, Target, devices_of
from executor.kv_layout import memory_fraction
from executor.mesh import DATA, MODEL

USAGE = """usage: rankbus plan --model DIR --topology v6e:2x2 [--ranks 4] [--tensor-parallel 1] [--SETTING VALUE …]

Compiles the decode and prefill steps for that topology and shows what they need and how fast they can be at best."""


def main(arguments: list[str]) -> int:
    """Plan what the settings ask for, on the topology that ``--topology`` names."""
    flags, rest = configuration.split_flags(arguments)
    topology = _topology(rest)
    if topology is None:
        print(USAGE)
        return 0 if rest in (["--help"], ["-h"]) else 2
    config = configuration.load(flags)
    folder = model_files.resolve(config).folder
    console = Console(highlight=False)
    target = Target(config, model_files.outline(folder), devices_of(topology))
    console.print(f"{folder.name} on {topology}: {describe(target)}")
    console.print(_steps(target, console))
    return 0


def describe(target: Target) -> str:
    """The memory of a device, and how the model lies on the devices, in words."""
    mesh, config, steps = target.mesh, target.config, target.steps
    free = target.chip.memory_bytes - target.weight_bytes - target.adapter_bytes
    block_bytes = steps.block_bytes // mesh.shape[MODEL]
    adapters = f"  adapters   {target.adapter_bytes / GIB:7.2f} GiB per device, for {config.max_loras} of them"
    return "\n".join(
        [
            f"{config.ranks} ranks on {mesh.shape[DATA]} data shards of {mesh.shape[MODEL]} devices each",
            f"  weights    {target.weight_bytes / GIB:7.2f} GiB per device, of {target.chip.memory_bytes / GIB:.0f}",
            *([adapters] if config.max_loras else []),
            f"  KV cache   {target.kv_bytes / GIB:7.2f} GiB per device: {steps.kv_layout.num_blocks} blocks of "
            f"{steps.block_size} tokens in all; {free // block_bytes * mesh.shape[DATA]} would fill the memory "
            f"(kv_memory_fraction {memory_fraction(config, steps.platform):g})",
        ]
    )


def _topology(rest: list[str]) -> str | None:
    """The value of ``--topology`` if that is all there is besides settings."""
    match rest:
        case ["--topology", topology]:
            return topology
        case [one] if one.startswith("--topology="):
            return one.partition("=")[2]
    return None


def _steps(target: Target, console: Console) -> Table:
    steps = target.steps
    sizes = steps.decode_sizes
    wanted = [("decode", size) for size in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})]
    wanted.append(("prefill", steps.mixed_sizes[-1]))
    columns = ("step", "batch per shard", "GB", "KV GB", "GFLOP", "GiB per device", "ms at best")
    table = Table(*columns, "tokens/s per device", "bound by")
    for kind, size in wanted:
        with console.status(f"compiling {kind} of {size}"):
            step = _compile(target, kind, size)
        seconds, bound = roofline(target, step)
        table.add_row(
            kind,
            f"{size}",
            f"{step.bytes_moved / 1e9:.2f}",
            f"{step.kernel_kv_bytes / 1e9:.2f}",
            f"{step.flops / 1e9:.0f}",
            f"{step.memory_bytes / GIB:.1f}",
            f"{seconds * 1e3:.2f}",
            f"{size / seconds / target.mesh.shape[MODEL]:.0f}",
            bound,
        )
    table.caption = f"Per device. Sequences that decode are {min(CONTEXT, steps.max_model_len)} tokens long."
    return table


def _compile(target: Target, kind: str, size: int) -> Step:
    try:
        step = target.compile(kind, size)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(f"{kind} of {size} does not fit: {str(error).splitlines()[0]}") from None
    if step.memory_bytes > target.chip.memory_bytes:
        raise ConfigError(
            f"{kind} of {size} does not fit: weights, KV cache and temporary arrays take "
            f"{step.memory_bytes / GIB:.1f} GiB of each device's {target.chip.memory_bytes / GIB:.0f} GiB; lower "
            "num_blocks or kv_memory_fraction, or raise tensor_parallel"
        )
    return step


def roofline(target: Target, step: Step) -> tuple[float, str]:
    """The least time that a step can take, and what bounds it: moving its bytes, or its operations.

    What devices exchange is not counted, nor attention's operations, of which few come to each byte that it reads.
    """
    memory = (step.bytes_moved + step.kernel_kv_bytes) / target.chip.bytes_s
    compute = step.flops / target.chip.flops_s
    return (memory, "memory") if memory >= compute else (compute, "compute")
