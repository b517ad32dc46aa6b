"""How XLA compiles in tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CHEAP = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def optimise_little() -> None:
    """Have XLA compile for a CPU in a third of the time, in this process and those it starts.

    Almost every program that tests compile runs a few times only.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _CHEAP not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_CHEAP}".strip()


@contextmanager
def as_served() -> Iterator[None]:
    """What is started meanwhile compiles as `rankbus serve` does."""
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = flags.replace(_CHEAP, "").strip()
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = flags
