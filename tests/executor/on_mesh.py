"""Run models on meshes of 8 virtual CPU devices, with 8 ranks, and print what they gave: a process of its own.

``python -m tests.executor.on_mesh CACHE OUT FOLDER=DATAxMODEL[+int8|+lora][,…] …`` writes OUT, an .npz file with an
array for each scene, named folder's name/DATAxMODEL/scene. `asking` is played with the first folder only, with weights
of 8 bits only `logits`, and with adapters, those in FOLDER.adapters, only `greedy`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bus.messages import Pooling, Sampling
from bus.sampling import pooled

if TYPE_CHECKING:
    from tests.executor.driving import Driver

RANKS = 8
TOKENS = 6
PROMPTS = {(rank, 0): 5 + 7 * rank for rank in range(RANKS)}
"""Length of the prompt in each row that runs. No chunk of those that are shown has one token, which would be a decode
step of a size that nothing else needs."""

SHOWN_ROWS = ((2, 0), (7, 0))

ADAPTERS = 3
SLOTS = {(rank, 0): rank % (1 + ADAPTERS) for rank in range(RANKS)}
"""The adapters of rows, where there are any."""

SETTINGS: dict[str, Any] = {
    "ranks": RANKS,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "num_blocks": RANKS * 32,
}

SHOWN = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=-1, prompt_logprobs=2)

POOLINGS = (Pooling(kind="mean", normalize=False), Pooling(kind="last"))

ASKING = {
    (0, 0): Sampling(seed=1, max_tokens=9, temperature=0.9, top_p=0.9, min_p=0.01, top_k=50),
    (1, 0): Sampling(seed=2, max_tokens=9, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    (2, 0): Sampling(seed=3, max_tokens=9, temperature=0.0, allowed_token_ids=[5, 77, 201]),
    (3, 0): Sampling(seed=4, max_tokens=9, logit_bias={5: 50.0}, bad_words_token_ids=[[5, 5]]),
    (6, 0): Sampling(seed=5, max_tokens=9, min_tokens=4, eos_token_id=2, logprobs=3),
    (7, 0): Sampling(seed=6, max_tokens=9, temperature=0.5, logprobs=2),
}
"""Rows that ask for all that sampling can do."""


def prompt_of(where: tuple[int, int], length: int) -> list[int]:
    return np.random.default_rng(where).integers(3, 259, length).tolist()


def greedy(driver: "Driver") -> Iterator[tuple[str, np.ndarray]]:
    """Tokens [ranks, TOKENS] of rows that prefill in chunks, side by side with others that decode already.

    All go on until all are done: with fewer rows steps would have other sizes.
    """
    outputs: dict[tuple[int, int], list[int]] = {where: [] for where in PROMPTS}
    for where, length in PROMPTS.items():
        driver.start(where, prompt_of(where, length), adapter=SLOTS[where] if driver.config.max_loras else 0)
    most = driver.config.max_num_batched_tokens
    while min(map(len, outputs.values())) < TOKENS:
        step = {where: min(driver.left(where), most - where[0] % 2) for where in PROMPTS}
        for where, token in driver.step(step).items():
            outputs[where] += [token] if token != -1 else []
    yield "greedy", np.array([tokens[:TOKENS] for tokens in outputs.values()])


def logits(driver: "Driver") -> Iterator[tuple[str, np.ndarray]]:
    """Log-probabilities [2, vocabulary] after two of the prompts, those of the prompts' tokens, and their vectors."""
    for where in SHOWN_ROWS:
        driver.start(where, prompt_of(where, PROMPTS[where]), SHOWN)
    most = driver.config.max_num_batched_tokens
    while left := {where: min(driver.left(where), most) for where in SHOWN_ROWS if where not in driver.logprobs}:
        driver.step(left)
    yield "logits", np.stack([driver.drawn_from(where) for where in SHOWN_ROWS])
    yield "prompts", np.concatenate([driver.take_prompt(where)[1][:, 0] for where in SHOWN_ROWS])
    for where, pooling in zip(SHOWN_ROWS, POOLINGS, strict=True):
        driver.start(where, prompt_of(where, PROMPTS[where]), pooled(pooling))
    while left := {where: min(driver.left(where), most) for where in SHOWN_ROWS if where not in driver.pooled}:
        driver.step(left)
    yield "vectors", np.stack([driver.pooled[where] for where in SHOWN_ROWS])


def asking(driver: "Driver") -> Iterator[tuple[str, np.ndarray]]:
    """Tokens [rows, TOKENS] that rows of all kinds draw, and the log-probabilities that were asked for last."""
    for where, sampling in ASKING.items():
        driver.start(where, prompt_of(where, 16), sampling)
    for _ in range(16 // driver.config.max_num_batched_tokens):
        step = driver.step(dict.fromkeys(ASKING, driver.config.max_num_batched_tokens))
    tokens = [step]
    tokens += [driver.step(dict.fromkeys(ASKING, 1)) for _ in range(TOKENS - 1)]
    yield "asking", np.array([[step[where] for where in ASKING] for step in tokens]).T
    yield "logprobs", np.concatenate([driver.logprobs[where][1] for where in ((6, 0), (7, 0))])


def main(cache: Path, out: Path, wanted: list[str]) -> None:
    found: dict[str, np.ndarray] = {}
    for item in wanted:
        folder, _, meshes = item.partition("=")
        for mesh in meshes.split(","):
            shape, _, special = mesh.partition("+")
            data, model = map(int, shape.split("x"))
            settings = SETTINGS | {"quantization": "int8" if special == "int8" else "none"}
            if special == "lora":
                settings |= {"max_loras": ADAPTERS, "max_lora_rank": 8}
            settings["max_num_batched_tokens"] = 16 * data // RANKS  # of a shard 16, the smallest program
            driver = Driver(Path(folder), cache, data_shards=data, tensor_parallel=model, **settings)
            scenes = (greedy, logits, asking) if item is wanted[0] else (greedy, logits)
            if special:
                scenes = (logits,) if special == "int8" else (greedy,)
            for slot, adapter in enumerate(
                sorted(Path(f"{folder}.adapters").iterdir()) if special == "lora" else (), 1
            ):
                driver.load(slot, adapter)
            for scene in scenes:
                found |= {f"{Path(folder).name}/{mesh}/{name}": array for name, array in scene(driver)}
    np.savez(out, **found)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    from tests.executor.driving import Driver

    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
