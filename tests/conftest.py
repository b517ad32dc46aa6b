"""Fixtures that tests of all kinds share."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from bus import config, model_files
from executor import prepare
from tests.compiler import optimise_little
from tests.tiny_model import write_tiny_llama

optimise_little()
os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads wait for each other in loops, on cores that others work on

LONGEST = (
    "tests/e2e/",
    "tests/executor/test_families.py",
    "tests/process/test_whole_engine.py",
    "tests/process/test_asked.py",
    "tests/process/test_serve.py",
    "tests/process/",
    "tests/executor/test_aot.py",
    "tests/executor/",
    "tests/frontend/test_server.py",
    "tests/ranks/",
    "",
)
"""What begins first, so that what is left at the end are files of a second, which both processes share evenly."""


class _ByEngine(LoadFileScheduling):
    """Each file in one process, and all end-to-end tests in the same, which then starts their engine once."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """What says which process has which tests."""
    config.option.loadscopereorder = False  # it would begin with the files of the most tests
    return _ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first; otherwise the order stays."""
    items.sort(key=lambda item: next(n for n, path in enumerate(LONGEST) if item.nodeid.startswith(path)))


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
def engine_cache(pytestconfig: pytest.Config) -> Path:
    """A cache_dir that engines share, this session's and later ones', so that each program is compiled once."""
    return pytestconfig.cache.mkdir("rankbus")


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's folder, prepared where `rankbus serve` looks for it, too."""
    return prepare.prepare(model_files.resolve(config.load({"model": "embedded"})), Console(stderr=True))
