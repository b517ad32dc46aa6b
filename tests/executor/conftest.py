"""Fixtures of tests that run the tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.executor.driving import Driver


@pytest.fixture(scope="module")
def driver(tiny_model: Path, engine_cache: Path) -> Driver:
    """A runner of the tiny model, with the settings that most tests have."""
    return Driver(tiny_model, engine_cache)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """The tiny model as transformers has it."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
