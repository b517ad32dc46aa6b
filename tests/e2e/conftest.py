"""One engine on the embedded model for all end-to-end tests, and HF transformers on the same weights as reference."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.config import Config, load
from frontend.client import Client
from tests.engine import Engine

COLD_START_S = 400.0
"""How long the engine may take to be ready when every program is still to be compiled."""

CACHE = load().cache_path
"""Prepared models and compiled programs are kept between runs, as they are for a user."""


@pytest.fixture(scope="session")
def engine(embedded_model: Path) -> Iterator[Engine]:
    """The engine as `rankbus serve` runs it by default: one frontend, two ranks, one executor."""
    defaults = Config()
    with Engine(
        embedded_model,
        CACHE,
        max_num_seqs=defaults.max_num_seqs,
        max_num_batched_tokens=defaults.max_num_batched_tokens,
        num_blocks=None,
    ) as engine:
        engine.start()
        engine.wait_ready(COLD_START_S)
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.config.client_endpoint(0)) as client:
        yield client


def metrics(engine: Engine, name: str, frontend: int = 0) -> dict[str, float]:
    """The samples of a metric in /metrics, by their labels."""
    with urllib.request.urlopen(f"http://{engine.config.host}:{engine.port(frontend)}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in samples}


class Reference:
    """HF transformers on the same float32 weights."""

    TIE = 1e-4

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.positions = 0
        self.ties = 0

    def logprobs(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Log-probabilities [len(output), vocabulary] of what comes at each place of `output`."""
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return np.asarray(self._torch.log_softmax(logits.float(), dim=-1).numpy())

    def check_greedy(self, prompt: list[int], output: list[int]) -> None:
        """Fail unless each output token is the most likely after what is before it, but for counted ties."""
        with self._torch.no_grad():
            kept = self._model(self._torch.tensor([prompt + output]), logits_to_keep=len(output) + 1)
        scores = kept.logits[0, :-1].numpy()
        best = scores.max(axis=-1)
        chosen = scores[np.arange(len(output)), output]
        gaps = best - chosen
        assert (gaps < self.TIE).all(), f"prompt of {len(prompt)}: token {int(gaps.argmax())} is {gaps.max()} below"
        self.positions += len(output)
        self.ties += int((scores.argmax(axis=-1) != np.asarray(output)).sum())


@pytest.fixture(scope="session")
def reference(embedded_model: Path) -> Any:
    return Reference(embedded_model)
