"""Speed of the bare model step, and start-up times: ``python -m bench.step MODEL_FOLDER``.

Decode at several numbers of sequences (contexts of about 200), with two steps in flight as the executor keeps them, and
prefill. Beside each the GEMM-only bound: the step's matrix products alone, measured right after it, so that the ratio
means something on a machine that is shared. Of each the fastest stretch counts.
"""

import argparse
import time
from collections import deque
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from bench.cpu import Products
from bus.config import Config
from bus.messages import Sampling
from executor.progress import show
from executor.runner import Runner
from executor.step import MergedStep, RowSetup

PROMPT = 150
STEPS = 60
DEPTH = 2
GREEDY = Sampling(seed=0, max_tokens=1, temperature=0.0)


class Load:
    """Sequences that decode side by side, spread over the ranks."""

    def __init__(self, runner: Runner, config: Config, count: int, prompt: int, sampling: Sampling) -> None:
        self._runner = runner
        self._ranks = np.sort(np.arange(count, dtype=np.int32) % config.ranks)
        first = np.searchsorted(self._ranks, self._ranks)
        within = (np.arange(count) - first).astype(np.int32)
        self._rows = (self._ranks * config.max_num_seqs + within).astype(np.int32)
        blocks = -(-(prompt + STEPS + 2) // config.block_size)
        first = np.array(runner.first_blocks, np.int32)[self._ranks] + within * np.int32(blocks)
        self._tables = first[:, None] + np.arange(blocks, dtype=np.int32)
        self._positions = np.zeros(count, np.int32)
        tokens = np.random.default_rng(0).integers(0, runner.vocab_size, (count, prompt), dtype=np.int32)
        self._setups = [RowSetup(int(r), 0, t, prompt, sampling) for r, t in zip(self._rows, tokens, strict=True)]

    def skip(self, num_tokens: int) -> None:
        """Go on as if so many tokens had been computed: what is in the KV cache makes no difference to speed."""
        self._positions += num_tokens

    def step(self, num_tokens: int, samples: bool, only: slice = slice(None)) -> MergedStep:
        """The next step, `num_tokens` for each of the sequences in `only`."""
        rows = self._rows[only]
        step = MergedStep(
            setups=self._setups,
            ranks=self._ranks[only],
            rows=rows,
            positions=self._positions[only].copy(),
            num_tokens=np.full(rows.size, num_tokens, np.int32),
            samples=np.full(rows.size, samples, np.bool_),
            block_tables=self._tables[only],
        )
        self._setups = []
        self._positions[only] += num_tokens
        return step


def decode(runner: Runner, config: Config, count: int, sampling: Sampling) -> float:
    """Tokens per second of `count` sequences, in the fastest tenth of the steps' run (the machine may be shared)."""
    load = Load(runner, config, count, PROMPT, sampling)
    load.skip(PROMPT)
    flying = deque([runner.dispatch(load.step(1, True)) for _ in range(DEPTH)])
    runner.collect(flying.popleft())
    ends = [time.perf_counter()]
    for _ in range(STEPS - DEPTH):
        flying.append(runner.dispatch(load.step(1, True)))
        runner.collect(flying.popleft())
        ends.append(time.perf_counter())
    runner.collect(flying.popleft())
    span = len(ends) // 10
    fastest = min(ends[i + span] - ends[i] for i in range(len(ends) - span))
    return count * span / fastest


def prefill(runner: Runner, config: Config, prompt: int) -> float:
    """Tokens per second of a prompt, in chunks of `max_num_batched_tokens`."""
    best = 0.0
    for _ in range(3):
        load = Load(runner, config, 1, prompt, GREEDY)
        started = time.perf_counter()
        for start in range(0, prompt, config.max_num_batched_tokens):
            size = min(config.max_num_batched_tokens, prompt - start)
            handle = runner.dispatch(load.step(size, start + size == prompt))
        runner.collect(handle)
        best = max(best, prompt / (time.perf_counter() - started))
    return best


def gemm_bound(products: Products, tokens: int, logits: int) -> float:
    """Tokens per second of a step of so many tokens, `logits` of which go through the head, by its products alone."""
    return tokens / min(products.ask(tokens, logits)["seconds"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache-dir", default="~/.cache/rankbus")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512, 2048])
    arguments = parser.parse_args()
    config = Config(max_model_len=4096, num_blocks=1200, cache_dir=arguments.cache_dir)
    progress = show(Console(stderr=True))
    started = time.perf_counter()
    runner = Runner(config, arguments.model, progress)
    loaded = time.perf_counter()
    runner.warm_up(progress)
    print(f"load {loaded - started:.1f} s, programs {time.perf_counter() - loaded:.1f} s, on {jax.devices()[0]}")
    with Products(arguments.model) as products:
        compare(runner, config, products, arguments.sequences, arguments.prompts)


def compare(runner: Runner, config: Config, products: Products, sequences: list[int], prompts: list[int]) -> None:
    """Print each speed beside its bound."""
    for count in sequences:
        greedy = decode(runner, config, count, GREEDY)
        bound = gemm_bound(products, count, count)
        drawn = decode(runner, config, count, Sampling(seed=0, max_tokens=1, temperature=0.8, top_p=0.9))
        print(
            f"decode {count:3d} sequences: greedy {greedy:6.1f} tok/s, top-p {drawn:6.1f} tok/s, products alone "
            f"{bound:6.1f} tok/s: {greedy / bound:.0%}"
        )
    for prompt in prompts:
        speed = prefill(runner, config, prompt)
        bound = gemm_bound(products, min(prompt, config.max_num_batched_tokens), 1)
        print(f"prefill {prompt:5d} tokens: {speed:7.1f} tok/s, products alone {bound:7.1f} tok/s: {speed / bound:.0%}")


if __name__ == "__main__":
    main()
