"""The rank process: ``python -m ranks --index 0``."""

import signal
import time

from bus import model_files, process
from bus.config import Config, ConfigError
from bus.counters import Counters
from bus.journal import recorder as journal
from bus.links import Identity
from bus.log import get_logger
from bus.model_files import ModelError, ModelFacts
from bus.shell import Shell
from ranks.compiling import Compiler, plain
from ranks.core import RankCore
from ranks.grammars import Grammars, Vocabulary
from ranks.replay import Construction, NativeSchedulers
from ranks.scheduler import Schedulers

log = get_logger()


def run(config: Config, me: Identity) -> None:
    """Load the scheduler, connect, and work until told to end."""
    if not 0 <= me.index < config.ranks:
        raise ConfigError(
            f"--index: {me.index} is not a rank; with ranks = {config.ranks} it is 0 … {config.ranks - 1}"
        )
    begin = time.monotonic()
    counters = Counters()
    model = _model(config) if config.journals("rank") else None
    construction = Construction(Vocabulary.of(model.folder) if model else None)
    schedulers = _load_scheduler(config, counters, construction.vocabulary)
    core = RankCore(me.index, config, schedulers.build, counters)
    recorder = journal.start(
        config, me, construction, plain, model=model, core=core if config.scheduler == "native" else None
    )
    shell = Shell(me, config, core, lambda effect: compiler.submit(effect), recorder)
    compiler = Compiler(schedulers.compile, shell.post)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: shell.stop(f"it got {signal.Signals(number).name}"))
    shell.connect("step", config.step_endpoint())
    for frontend in range(config.frontends):
        shell.connect("command", config.command_endpoint(frontend), frontend)
    log.info("rank ready", scheduler=config.scheduler, seconds=round(time.monotonic() - begin, 2))
    log.info("rank ends", reason=shell.run())


def _load_scheduler(config: Config, counters: Counters, vocabulary: Vocabulary | None) -> Schedulers:
    """What makes a scheduler for a KV pool. vLLM's takes seconds to import, and so is only where it is asked for."""
    if config.scheduler == "native":
        grammars = Grammars(config, vocabulary)
        return Schedulers(NativeSchedulers(config, counters, grammars), grammars.compile)
    from ranks.vllm_loading import load

    return load(config, counters)


def _model(config: Config) -> ModelFacts | None:
    """What the model says of itself, for the journal; a rank needs no model, and may run where there is none."""
    try:
        return model_files.read(model_files.resolve(config).folder)
    except ModelError:
        return None


if __name__ == "__main__":
    process.main("rank", run)
