"""The executor process: ``python -m executor``."""

import signal
import time

from bus import process
from bus.config import Config
from bus.links import Identity
from bus.log import get_logger

log = get_logger()


def run(config: Config, me: Identity) -> None:
    """Load the model, compile what the cache lacks, and only then meet ranks and frontends; serve until told."""
    begin = time.monotonic()
    from executor.process import Executor

    log.info("JAX imported", seconds=round(time.monotonic() - begin, 2))
    executor = Executor(config, me)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: executor.stop(f"it got {signal.Signals(number).name}"))
    executor.run()


if __name__ == "__main__":
    process.main("executor", run, process.end_at_once)
