"""The limit of a step: its matrix products alone. ``python -m bench.products MODEL_FOLDER``, then a line per question.

A question is {"rows", "logits"}: a step of so many tokens, of which so many go through the head. The answer says how
many seconds the products take with weights as [inputs, outputs] and as [outputs, inputs], by XLA, and packed, by the
kernels: the median of some runs each; and the floating-point operations. Products follow each other as in the model,
with nothing between them; those that nothing follows are results, so none is left out. Weights are random numbers.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bus import model_files
from bus.config import load
from executor import device
from executor.kernels import library, products

Matrix = jax.Array
RUNS_S = 1.5
RUNS = 5
"""Of each layout, at least as many runs, for at least as long."""


class Weights(nnx.Module):
    """All that a model multiplies with: for each layer query, key, value, output, gate, up, down; and the head."""

    def __init__(self, facts: model_files.ModelFacts) -> None:
        hidden, inner = facts.hidden_size, facts.intermediate_size
        queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        random = np.random.default_rng(0)

        def weight(inputs: int, outputs: int) -> "Weight":
            return Weight(random.standard_normal((inputs, outputs), np.float32) * inputs**-0.5)

        self.layers = nnx.List([nnx.List([weight(*shape) for shape in shapes]) for _ in range(facts.num_layers)])
        self.head = weight(hidden, facts.vocab_size)

    def take(self) -> tuple[list[list[Matrix]], Matrix]:
        return [[weight.kernel[...] for weight in layer] for layer in self.layers], self.head.kernel[...]


class Weight(nnx.Module):
    def __init__(self, values: np.ndarray) -> None:
        self.kernel = nnx.Param(jnp.asarray(values))


def step(
    multiply: Callable[[Matrix, Matrix], Matrix], logits: int, weights: tuple[list[list[Matrix]], Matrix], x: Matrix
) -> list[Matrix]:
    layers, head = weights
    results = []
    for query, key, value, output, gate, up, down in layers:
        results += [multiply(x, key), multiply(x, value)]
        x = multiply(multiply(x, query), output)
        results.append(multiply(x, gate))
        x = multiply(multiply(x, up), down)
    return [*results, multiply(x[:logits], head)]


def seconds(multiply: Callable[[Matrix, Matrix], Matrix], logits: int, weights: Any, x: Matrix) -> float:
    compiled = jax.jit(lambda weights, x: step(multiply, logits, weights, x)).lower(weights, x).compile()
    jax.block_until_ready(compiled(weights, x))
    times: list[float] = []
    while len(times) < RUNS or sum(times) < RUNS_S:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(weights, x))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    facts = model_files.read(Path(sys.argv[1]))
    config = load()
    device.set_up(config.cache_path)
    model = Weights(facts)
    as_stored = model.take()
    layouts: dict[str, tuple[Callable[[Matrix, Matrix], Matrix], Any]] = {
        "inputs_outputs": (jnp.matmul, as_stored),
        "outputs_inputs": (lambda x, w: x @ w.T, jax.tree.map(lambda w: jnp.array(w.T), as_stored)),
    }
    if library.load(config.cache_path):
        products.pack_model(model)
        layouts["packed"] = (products.matmul, model.take())
    per_token = 2 * sum(weight.size for layer in as_stored[0] for weight in layer)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((asked["rows"], facts.hidden_size), np.float32))
        answer = {name: seconds(multiply, asked["logits"], weights, x) for name, (multiply, weights) in layouts.items()}
        flops = asked["rows"] * per_token + asked["logits"] * 2 * as_stored[1].size
        print(json.dumps({"seconds": answer, "flops": flops}), flush=True)


if __name__ == "__main__":
    main()
