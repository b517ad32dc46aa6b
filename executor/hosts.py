"""Several processes of the executor as one machine to JAX: all devices are known to all, and programs span them."""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from bus.config import Config, ConfigError
from bus.log import get_logger

log = get_logger()

JOIN_S = 300
"""How long the processes wait for each other at the start."""

LET_GO_S = 1.0


def join(config: Config, index: int) -> None:
    """Meet the executor's other processes; before anything else is done with JAX. `index` is this one's.

    When a process is lost, JAX ends the others too, at the latest `heartbeat_timeout_s` after: none that waits in a
    program for a device of a lost process waits for ever.

    Raises:
        ConfigError: there is no process of this index.
    """
    if index >= config.executors:
        last = config.executors - 1
        raise ConfigError(f"--index {index} is not allowed; with executors {config.executors} the last is {last}")
    if config.executors == 1:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    # A CPU runs programs that do not need each other at the same time, and what they exchange between processes would
    # be mixed up: one after the other, then. Accelerators run all in order, and have no use for this.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    log.info("waiting for the executor's other processes", executors=config.executors, coordinator=config.coordinator)
    jax.distributed.initialize(
        config.coordinator,
        config.executors,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=max(1, round(config.heartbeat_timeout_s)),
    )


def let_go() -> None:
    """Before the process ends: let the others, who were told, end first. JAX aborts them when the first one is gone."""
    if are_several() and not is_follower():
        time.sleep(LET_GO_S)


def are_several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def is_follower() -> bool:
    """Whether this process is another than the first."""
    return bool(jax.process_index())


def least(value: int) -> int:
    """The least of what the processes have; the same in all. At most 2⁵¹ - 1, and rounded down to a multiple of 2²⁰."""
    if not are_several():
        return value
    return int(np.min(multihost_utils.process_allgather(np.int32(value >> 20)))) << 20
