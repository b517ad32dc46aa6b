"""Fixtures of tests that run the tiny model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from executor import device
from tests.executor.driving import Driver


@pytest.fixture(scope="session", autouse=True)
def compiled_once(engine_cache: Path) -> None:
    """What is compiled without a runner, before there is one, is kept like all else."""
    device.set_up(engine_cache)


@pytest.fixture(scope="session")
def shared_driver(tiny_model: Path, engine_cache: Path) -> Driver:
    """See `driver`."""
    return Driver(tiny_model, engine_cache)


@pytest.fixture
def driver(shared_driver: Driver) -> Iterator[Driver]:
    """A runner of the tiny model, with the settings that most tests have. No row is set up."""
    yield shared_driver
    shared_driver.clear()


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Any:
    """The tiny model as transformers has it."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
