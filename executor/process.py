"""The parts of the executor process: the runner, the device's threads, the core, and the shell that joins them."""

import time

from rich.console import Console

from bus import model_files
from bus.config import Config, ConfigError
from bus.journal import recorder as journal
from bus.links import Identity
from bus.log import get_logger
from bus.messages import Adapter, PlaceAdapter, ReadAdapter
from bus.model_files import ModelFacts
from bus.shell import Shell
from executor import hosts
from executor.adapter_files import AdapterError
from executor.adapter_loading import AdapterLoader
from executor.checks import Limits
from executor.core import RunStep
from executor.follower import FollowerCore, Unread
from executor.group import Broken
from executor.pipeline import Pipeline
from executor.progress import show
from executor.replay import Construction, Plain, build
from executor.runner import Runner

log = get_logger()

FINISH_S = 5.0
"""How long the steps that are at the device may take when the process ends; supervisord kills after 10 s."""


class DeviceError(Exception):
    """The device failed, and the process with it."""


class GroupError(Exception):
    """The executor's processes cannot go on together: one of them is lost, failed, or does not answer."""


class Executor:
    """A warm model, ready to be run. With an index above 0 it is a follower: see `follower.FollowerCore`."""

    def __init__(self, config: Config, me: Identity) -> None:
        hosts.join(config, me.index)
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
        adapters = _load_first(config, runner)
        # Processes that run steps together have the same adapters in the same slots
        self._programs = "/".join([runner.digest, *(adapter.identity for adapter in adapters)])
        self._broken = ""
        if me.index:
            self._follow(config, me, runner)
        else:
            self._lead(config, me, runner, source.name, facts, adapters)
        self._loader = AdapterLoader(runner, self._pipeline.between, self._shell.post)

    def _lead(
        self, config: Config, me: Identity, runner: Runner, model: str, facts: ModelFacts, adapters: list[Adapter]
    ) -> None:
        """Be the one that ranks and frontends know."""
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            blocks_of_rank=[runner.blocks_of_rank(rank) for rank in range(config.ranks)],
            first_blocks=runner.first_blocks,
            most_drafts=config.most_drafts,
            draws_drafts=config.speculation == "model",
        )
        construction = Construction(model, limits, self._programs, adapters)
        recorder = journal.start(config, me, construction, Plain(), facts)
        self._shell = Shell(me, config, build(config, construction), self._perform, recorder)
        self._pipeline = Pipeline(runner, self._shell.post, config.async_depth)
        self._shell.bind("step", config.step_endpoint())
        for frontend in range(config.frontends):
            self._shell.connect("command", config.command_endpoint(frontend), frontend)
        if config.executors > 1:
            self._shell.bind("follower", config.follower_endpoint())

    def _follow(self, config: Config, me: Identity, runner: Runner) -> None:
        """Run what executor 0 says. No journal is kept: executor 0's has all that a follower is told."""
        self._shell = Shell(me, config, FollowerCore(self._programs, config.max_num_seqs), self._perform)
        self._pipeline = Pipeline(Unread(runner), self._shell.post, config.async_depth)
        self._shell.connect("follower", config.follower_endpoint())

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            DeviceError: the device failed.
            GroupError: the executor's processes cannot go on together.
        """
        log.info("ready")
        reason = self._shell.run()
        log.info("the executor ends", reason=reason)
        try:
            self._finish(reason)
        finally:
            hosts.let_go()

    def _finish(self, reason: str) -> None:
        """Let the device finish; raise what the process ends by if that is an error."""
        if self._broken:
            raise GroupError(self._broken)
        if not self._pipeline.stop(FINISH_S):
            log.warning("a step was still running", waited_s=FINISH_S)
        if self._pipeline.error is not None:
            raise DeviceError(reason) from self._pipeline.error

    def stop(self, reason: str) -> None:
        """End `run` soon; safe in a signal handler."""
        self._shell.stop(reason)

    def _perform(self, effect: RunStep | ReadAdapter | PlaceAdapter | Broken) -> None:
        match effect:
            case RunStep():
                self._pipeline.submit(effect)
            case ReadAdapter():
                self._loader.read(effect)
            case PlaceAdapter():
                self._loader.place(effect)
            case Broken():
                self._broken = effect.reason


def _load_first(config: Config, runner: Runner) -> list[Adapter]:
    """Load the adapters that are wanted from the start, into the slots from 1 on.

    Raises:
        ConfigError: one of them cannot be used.
    """
    adapters = []
    for slot, (name, path) in enumerate(config.first_adapters.items(), 1):
        try:
            brought = runner.read_adapter(name, path)
        except AdapterError as error:
            raise ConfigError(f"lora_modules: {error}") from None
        runner.place_adapter(slot, brought)
        adapters.append(Adapter(name=name, path=path, identity=brought.identity))
        log.info("adapter loaded", name=name, path=path, identity=brought.identity)
    return adapters
