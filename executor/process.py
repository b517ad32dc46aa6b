"""The parts of the executor process: the runner, the device's threads, the core, and the shell that joins them."""

import time

from rich.console import Console

from bus import model_files
from bus.config import Config
from bus.journal import recorder as journal
from bus.links import Identity
from bus.log import get_logger
from bus.shell import Shell
from executor.core import RunStep
from executor.merge import Limits
from executor.pipeline import Pipeline
from executor.progress import show
from executor.replay import Construction, Plain, build
from executor.runner import Runner

log = get_logger()

FINISH_S = 5.0
"""How long the steps that are at the device may take when the process ends; supervisord kills after 10 s."""


class DeviceError(Exception):
    """The device failed, and the process with it."""


class Executor:
    """A warm model, ready to be run."""

    def __init__(self, config: Config, me: Identity) -> None:
        source = model_files.resolve(config)
        facts = model_files.read(source.folder)
        progress = show(Console(stderr=True))
        begin = time.monotonic()
        runner = Runner(config, source.folder, progress)
        log.info(
            "model loaded",
            seconds=round(time.monotonic() - begin, 2),
            model=source.name,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
        )
        runner.warm_up(progress)
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            blocks_of_rank=[runner.blocks_of_rank(rank) for rank in range(config.ranks)],
            first_blocks=runner.first_blocks,
            most_drafts=config.most_drafts,
        )
        construction = Construction(source.name, limits)
        recorder = journal.start(config, me, construction, Plain(), facts)
        self._shell = Shell(me, config, build(config, construction), self._perform, recorder)
        self._pipeline = Pipeline(runner, self._shell.post, config.async_depth)
        self._shell.bind("step", config.step_endpoint())
        for frontend in range(config.frontends):
            self._shell.connect("command", config.command_endpoint(frontend), frontend)

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            DeviceError: the device failed.
        """
        log.info("ready")
        reason = self._shell.run()
        log.info("the executor ends", reason=reason)
        if not self._pipeline.stop(FINISH_S):
            log.warning("a step was still running", waited_s=FINISH_S)
        if self._pipeline.error is not None:
            raise DeviceError(reason) from self._pipeline.error

    def stop(self, reason: str) -> None:
        """End `run` soon; safe in a signal handler."""
        self._shell.stop(reason)

    def _perform(self, effect: RunStep) -> None:
        self._pipeline.submit(effect)
