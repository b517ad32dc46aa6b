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
from tests.compiler import as_served
from tests.engine import Engine

COLD_START_S = 400.0
"""How long the engine may take to be ready when every program is still to be compiled."""

CACHE = load().cache_path
"""Prepared models and compiled programs are kept between runs, as they are for a user."""


@pytest.fixture(scope="session")
def engine(embedded_model: Path) -> Iterator[Engine]:
    """The engine as `rankbus serve` runs it by default: one frontend, two ranks, one executor."""
    defaults = Config()
    with as_served():
        engine = Engine(
            embedded_model,
            CACHE,
            max_num_seqs=defaults.max_num_seqs,
            max_num_batched_tokens=defaults.max_num_batched_tokens,
            num_blocks=None,
        )
    with engine:
        start(engine)
        yield engine


def start(engine: Engine) -> None:
    """Start an engine, and wait until it is ready with all ranks."""
    engine.start()
    engine.wait_ready(COLD_START_S)
    wait_for_blocks(engine, COLD_START_S)


def wait_for_blocks(engine: Engine, deadline_s: float) -> None:
    """Until frontend 0 knows that all ranks have blocks; it is ready as soon as one has."""

    def all_have() -> bool:
        blocks = metrics(engine, "rankbus_rank_num_blocks").values()
        return len(blocks) == engine.config.ranks and min(blocks) > 0

    engine.wait_until(all_have, "all ranks have blocks", deadline_s)


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
    BATCH_TOKENS = 1500

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.positions = 0
        self.ties = 0

    def logits(self, sequences: list[tuple[list[int], list[int]]]) -> Iterator[tuple[int, np.ndarray]]:
        """For each (prompt, output), by its index: the scores [len(output), vocabulary] of each place of `output`.

        Sequences of like lengths run together, padded on the right, where padding is not seen.
        """
        order = sorted(range(len(sequences)), key=lambda index: sum(map(len, sequences[index])))
        while order:
            group = order[:1]
            for index in order[1:]:
                if (len(group) + 1) * sum(map(len, sequences[index])) > self.BATCH_TOKENS:
                    break
                group.append(index)
            del order[: len(group)]
            tokens = self._torch.zeros((len(group), sum(map(len, sequences[group[-1]]))), dtype=self._torch.long)
            for line, index in enumerate(group):
                sequence = [*sequences[index][0], *sequences[index][1]]
                tokens[line, : len(sequence)] = self._torch.tensor(sequence)
            with self._torch.no_grad():
                hidden = self._model.model(tokens).last_hidden_state
                for line, index in enumerate(group):
                    prompt, output = sequences[index]
                    first = len(prompt) - 1
                    yield index, self._model.lm_head(hidden[line, first : first + len(output)]).numpy()

    def logprobs(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Log-probabilities [len(output), vocabulary] of what comes at each place of `output`."""
        ((_, logits),) = self.logits([(prompt, output)])
        return np.asarray(self._torch.log_softmax(self._torch.from_numpy(logits), dim=-1).numpy())

    def check_greedy(self, sequences: list[tuple[list[int], list[int]]]) -> None:
        """Fail unless each output token is the most likely after what is before it, but for counted ties."""
        for index, scores in self.logits(sequences):
            prompt, output = sequences[index]
            gaps = scores.max(axis=-1) - scores[np.arange(len(output)), output]
            assert (gaps < self.TIE).all(), f"prompt of {len(prompt)}: token {int(gaps.argmax())} is {gaps.max()} below"
            self.positions += len(output)
            self.ties += int((scores.argmax(axis=-1) != np.asarray(output)).sum())


@pytest.fixture(scope="session")
def reference(embedded_model: Path) -> Any:
    return Reference(embedded_model)
