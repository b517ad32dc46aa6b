"""Fixtures that tests of all kinds share."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from bus import config, model_files
from executor import prepare
from tests.tiny_model import write_tiny_llama

_LONGEST = (
    "tests/e2e",
    "tests/executor/test_families.py",
    "tests/process/test_whole_engine.py",
    "tests/process/test_asked.py",
    "tests/process/test_hosts.py",
    "tests/process/test_adapters.py",
    "tests/process/test_journal.py",
    "tests/process/test_serve.py",
    "tests/executor/test_adapters.py",
    "tests/executor/test_aot.py",
    "tests/executor/test_runner.py",
    "tests/executor/test_llama.py",
    "tests/process/test_frontend.py",
    "tests/frontend/test_server.py",
    "tests/executor/test_sampling.py",
    "tests/process/test_rank_commands.py",
    "tests/executor/test_draft_distribution.py",
    "tests/executor/test_prepare.py",
)
"""Begun first, so that at the end no process works alone for long."""


class _ByEngine(LoadFileScheduling):
    """Each file in one process, and all end-to-end tests in the same, which then starts their engine once."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        longest = next(filter(self.workqueue.__contains__, _LONGEST), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """What says which process has which tests."""
    return _ByEngine(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make much that lives for ever; looking through it again and again costs seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """What a test sets up of logging ends with it: its streams are pytest's, and are closed by then."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with random weights."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def engine_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache_dir that engines share, this session's and later ones', so that each program is compiled once.

    Without pytest's cache (`-p no:cacheprovider`) the session's processes share one of their own.
    """
    if pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return pytestconfig.cache.mkdir("rankbus")
    root = tmp_path_factory.getbasetemp()
    return (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "rankbus"


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's folder, prepared where `rankbus serve` looks for it, too."""
    return prepare.prepare(model_files.resolve(config.load({"model": "embedded"})), Console(stderr=True))
