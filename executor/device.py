"""The devices that models run on: which they are, what memory they have, and where compiled programs are kept."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bus.config import Config
from executor import hosts


def set_up(cache_path: Path) -> list[jax.Device]:
    """Choose the platform and the cache of compiled programs; before anything else is done with JAX.

    Without a TPU in the machine the CPU is chosen outright: asking libtpu takes seconds and ends in warnings.
    """
    if not os.environ.get("JAX_PLATFORMS") and not _has_tpu():
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(cache_path / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return jax.devices()


def dtype_of(config: Config, device: jax.Device) -> Any:
    """Type of weights, activations and KV cache."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)


def memory_for_sharing(devices: Sequence[jax.Device]) -> int:
    """Bytes of which the KV pool gets a part: on accelerators what is free now, on a CPU all there is.

    It must be the same at each start, since programs are compiled for a pool's size. What is free on a CPU's machine is
    not. "All" is what the machine has, or what this process's control group may use of it; of several, the least.
    """
    if devices[0].platform != "cpu":
        stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
        return len(devices) * hosts.least(min(int(of["bytes_limit"] - of["bytes_in_use"]) for of in stats))
    return hosts.least(_memory_of_machine())


def _memory_of_machine() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group of its own, or one without a limit ("max")
        return total


def _has_tpu() -> bool:
    """Whether a TPU's device files are there. (vfio may stand for other devices too; then JAX finds out.)"""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("accel[0-9]*", "vfio/[0-9]*"))
