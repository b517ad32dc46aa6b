"""The executor process: ``python -m executor``."""

import signal

from bus import process
from bus.config import Config
from bus.links import Identity


def run(config: Config, me: Identity) -> None:
    """Load the model, compile what the cache lacks, and only then meet ranks and frontends; serve until told."""
    from executor.process import Executor  # imports JAX

    executor = Executor(config, me)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: executor.stop(f"it got {signal.Signals(number).name}"))
    executor.run()


if __name__ == "__main__":
    process.main("executor", run)
