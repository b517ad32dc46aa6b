"""On which CPU a process handles its messages.

libzmq has a thread of its own for the sockets, and each message is handed from it to the process's loop or back. On one
CPU that is a switch, between two an interrupt, which on virtual machines costs more than all that is done with the
message. So the two share a CPU, and the processes of an engine are spread over those there are.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.config import Config
from bus.messages import Role


def choose(role: Role, index: int, config: Config) -> int | None:
    """The CPU for a process's messages; None if the configuration leaves that to the kernel.

    The executor, then the ranks, then the frontends take the CPUs in turn. Where they begin depends on the folder of
    the run, so that engines which share a machine do not all begin with the first CPU.
    """
    if not config.pin_threads:
        return None
    cpus = sorted(os.sched_getaffinity(0))
    begin = zlib.crc32(str(config.run_path).encode())
    before = {"executor": 0, "rank": 1, "frontend": 1 + config.ranks}.get(role, 0)
    return cpus[(begin + before + index) % len(cpus)]


def may_batch(config: Config) -> bool:
    """Whether libzmq's thread may run as a batch job (sched(7), SCHED_BATCH).

    Then it does not interrupt the loop for each message, but sends what the loop has left when that waits, all at once:
    a quarter less work. It interrupts nobody else, either, so where a model computes on the same CPUs, messages would
    wait for that: a tenth fewer tokens.
    """
    if config.model_on_cpu is not None:
        return not config.model_on_cpu
    return any(path for pattern in _ACCELERATORS for path in _DEVICES.glob(pattern))


_DEVICES = Path("/dev")
_ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*")
"""Device files of TPUs and GPUs."""


@contextmanager
def pinned(cpu: int | None) -> Iterator[None]:
    """Keep the calling thread on `cpu` for the time of the `with` block; None leaves it where it is."""
    if cpu is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
