"""The kernels for CPUs against plain products and dense attention, and a machine on which they cannot be compiled."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import log
from executor.attention_cpu import attend
from executor.kernels import library, products
from tests.executor.driving import Driver

FLOAT = np.float32


@pytest.fixture(scope="module", autouse=True)
def kernels(engine_cache: Path) -> None:
    assert library.load(engine_cache), "the machine that runs the tests has a C++ compiler"


# Products


class Weights(nnx.Module):
    def __init__(self, weight: np.ndarray) -> None:
        self.kernel = nnx.Param(jnp.asarray(weight))
        self.embedding = nnx.Param(jnp.asarray(weight.T))
        self.scale = nnx.Param(jnp.ones((32, 32)))


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, FLOAT)


@pytest.mark.parametrize(("depth", "width"), [(1, 16), (7, 48), (1537, 32)])
def test_products_with_packed_weights_are_products(depth: int, width: int) -> None:
    weight = random((depth, width))
    model = Weights(weight)
    products.pack_model(model)
    assert model.kernel.shape == model.embedding.shape == (width // 16, depth, 16)
    assert model.scale.shape == (32, 32)
    for rows in [1, 2, 3, 5, 6, 7, 97, 200]:
        x = random((1, rows, depth), rows)
        wanted = x.astype(np.float64) @ weight
        for function, parameter in ((products.matmul, model.kernel), (products.scores, model.embedding)):
            got = np.asarray(function(jnp.asarray(x), parameter[...]))
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=1e-5 * depth**0.5)
    which = np.arange(width, dtype=np.int32)[::-1].reshape(2, -1)
    np.testing.assert_array_equal(products.look_up(model.embedding[...], which), weight.T[which])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_cannot_be_packed_work_as_they_are(dtype: str) -> None:
    weight = jnp.asarray(random((24, 40 if dtype == "float32" else 32)), dtype)
    model = Weights(np.zeros((2, 2), FLOAT))
    model.kernel.set_value(weight)
    model.embedding.set_value(weight.T)
    products.pack_model(model)
    x = jnp.asarray(random((3, 24)), dtype)
    assert model.kernel.shape == weight.shape
    np.testing.assert_array_equal(products.matmul(x, model.kernel[...]), x @ weight)
    np.testing.assert_array_equal(products.scores(x, model.embedding[...]), x @ weight)
    np.testing.assert_array_equal(products.look_up(model.embedding[...], jnp.array([5, 1])), weight.T[np.array([5, 1])])


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    """So batches of all sizes compute the same, to the bit: a request's answer does not hang on its company."""
    model = Weights(random((576, 64)))
    products.pack_model(model)
    x = jnp.asarray(random((40, 576)))
    whole = np.asarray(products.matmul(x, model.kernel[...]))
    for count in (1, 2, 3, 6, 13, 23):
        np.testing.assert_array_equal(products.matmul(x[:count], model.kernel[...]), whole[:count])


def test_several_products_at_once_and_the_gated_one() -> None:
    weights = [random((72, width), width) for width in (32, 16, 64, 64)]
    models = [Weights(weight) for weight in weights]
    for model in models:
        products.pack_model(model)
    packed = [model.kernel[...] for model in models]
    for rows in (1, 7, 130):
        x = random((rows, 72), rows)
        wide = x.astype(np.float64)
        for got, weight in zip(products.matmuls(jnp.asarray(x), packed), weights, strict=True):
            np.testing.assert_allclose(got, wide @ weight, atol=1e-4)
        for activation in ("silu", "gelu_pytorch_tanh"):
            wanted = products.activate(activation, jnp.asarray(x @ weights[2])) * (x @ weights[3])
            got = products.gated(activation, jnp.asarray(x), packed[2], packed[3])
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_activations_far_from_zero() -> None:
    """Of -200 to 200 nothing overflows or is NaN."""
    gate = Weights(np.eye(16, dtype=FLOAT))
    up = Weights(np.ones((16, 16), FLOAT) / 16)
    products.pack_model(gate)
    products.pack_model(up)
    x = np.repeat(np.array([-200, -88, -20, -1, 0, 1, 20, 88, 200], FLOAT)[:, None], 16, axis=1)
    for activation in ("silu", "gelu_pytorch_tanh"):
        got = products.gated(activation, jnp.asarray(x), gate.kernel[...], up.kernel[...])
        np.testing.assert_allclose(got, products.activate(activation, jnp.asarray(x)) * x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("used", [0, 1, 6, 8])
def test_rows_that_are_not_used_stay_nan_and_the_others_do_not_see_them(used: int) -> None:
    models = [Weights(random((24, 32), seed)) for seed in range(2)]
    for model in models:
        products.pack_model(model)
    first, second = (model.kernel[...] for model in models)
    x = jnp.asarray(random((1, 8, 24)))
    marked = products.mark_unused(x, jnp.arange(8)[None] < used)
    for function in (lambda x: products.matmul(x, first), lambda x: products.gated("silu", x, first, second)):
        got, whole = np.asarray(function(marked)), np.asarray(function(x))
        np.testing.assert_array_equal(got[:, :used], whole[:, :used])
        assert np.isnan(got[:, used:]).all()
    nan_between = x.at[0, 3, 0].set(jnp.nan)
    np.testing.assert_array_equal(np.isnan(products.matmul(nan_between, first))[0].all(axis=1), np.arange(8) == 3)


# Attention


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, scale: float, window: int, soft_cap: float
) -> np.ndarray:
    """Attention of queries [tokens, heads, dim] at positions from `first` on; k, v [positions, kv_heads, dim]."""
    shared = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), shared, axis=1) for x in (k, v))
    scores = np.einsum("thd,phd->htp", q * scale, k)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    at, seen = first + np.arange(q.shape[0])[:, None], np.arange(k.shape[0])
    visible = (seen <= at) & ((seen > at - window) if window else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("htp,phd->thd", weights / weights.sum(-1, keepdims=True), v)


def check_attention(
    shards: list[list[tuple[int, int]]],
    heads: tuple[int, int, int] = (6, 2, 24),
    block_size: int = 8,
    window: int = 0,
    soft_cap: float = 0.0,
    seed: int = 0,
    run: Callable[..., Any] = attend,
) -> None:
    """Compare a step with dense attention: for each shard its sequences (tokens before the step, tokens in it).

    `run` is what is compared, with `attend`'s parameters.
    Blocks are dealt out at random, and all that is not a sequence's is NaN: other blocks, and the rest of its last one.
    """
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, dim = heads
    places = max(map(len, shards)) + 2
    tokens = max(sum(new for _, new in shard) for shard in shards) + 3
    most_blocks = max(-(-(old + new) // block_size) for shard in shards for old, new in shard) + 1
    count = 1 + places * most_blocks
    scale = dim**-0.5
    kv = np.full((len(shards), count, block_size, 2 * kv_heads, dim), np.nan, FLOAT)
    positions, num_tokens = np.zeros((2, len(shards), places), np.int32)
    tables = np.zeros((len(shards), places, most_blocks), np.int32)
    q = rng.standard_normal((len(shards), tokens, num_heads, dim), FLOAT)
    k, v = rng.standard_normal((2, len(shards), tokens, kv_heads, dim), FLOAT)
    wanted = []
    for shard, sequences in enumerate(shards):
        free = iter(rng.permutation(np.arange(1, count)).tolist())
        begin = 0
        for place, (old, new) in enumerate(sequences):
            positions[shard, place], num_tokens[shard, place] = old, new
            blocks = [next(free) for _ in range(-(-(old + new) // block_size))] if new else []
            tables[shard, place, : len(blocks)] = blocks
            before = rng.standard_normal((2, old, kv_heads, dim), FLOAT)
            for at in range(old if new else 0):
                cell = kv[shard, blocks[at // block_size], at % block_size]
                cell[0::2], cell[1::2] = before[:, at]
            own = slice(begin, begin + new)
            keys, values = (np.concatenate([x, y[shard, own]]) for x, y in zip(before, (k, v), strict=True))
            if new:
                wanted.append(
                    (shard, own, blocks, keys, dense(q[shard, own], keys, values, old, scale, window, soft_cap))
                )
            begin += new
    call = partial(run, scale=scale, window=window, soft_cap=soft_cap)
    out, new_kv = (jax.jit(call, donate_argnums=3) if run is attend else call)(
        *map(jnp.asarray, (q, k, v, kv, positions, num_tokens, tables))
    )
    out, new_kv = np.asarray(out), np.asarray(new_kv)
    untouched = np.ones(kv.shape[:3], bool)
    for shard, own, blocks, keys, answer in wanted:
        np.testing.assert_allclose(out[shard, own], answer, atol=2e-5)
        at = np.arange(keys.shape[0])
        where = (shard, np.array(blocks)[at // block_size], at % block_size)
        np.testing.assert_array_equal(new_kv[where][:, 0::2], keys)
        untouched[where] = False
    assert np.isnan(new_kv[untouched]).all(), "what belongs to nobody was written"


EVERY_BORDER = [(old, new) for old in (0, 1, 7, 8, 9, 63, 64, 65) for new in (1, 2, 7, 8, 9, 17)]


def test_attention_at_every_border_in_one_mixed_step() -> None:
    check_attention([EVERY_BORDER])


def test_attention_of_shards_some_without_sequences() -> None:
    check_attention([[(30, 1), (0, 20), (0, 0), (5, 1)], [], [(0, 1)]])


@pytest.mark.parametrize("window", [1, 2, 8, 64, 100])
def test_attention_through_a_sliding_window(window: int) -> None:
    check_attention([[(0, 150), (149, 1), (70, 9), (0, 1), (63, 2)]], window=window)


def test_attention_with_a_soft_cap() -> None:
    check_attention([[(0, 33), (80, 1), (3, 9)]], soft_cap=2.0)
    check_attention([[(0, 33), (80, 1), (3, 9)]], soft_cap=2.0, window=16)


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((1, 1, 8), 1), ((9, 3, 64), 16), ((8, 2, 40), 48), ((4, 4, 128), 32), ((64, 1, 8), 4), ((7, 1, 32), 16)],
)
def test_attention_of_all_kinds_of_heads(heads: tuple[int, int, int], block_size: int) -> None:
    check_attention([[(100, 1), (0, 20), (60, 5)]], heads=heads, block_size=block_size)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=5), min_size=1, max_size=2),
    st.integers(0, 70),
    st.integers(0, 2**32),
)
def test_attention_of_any_step(shards: list[list[tuple[int, int]]], window: int, seed: int) -> None:
    if any(shards):
        check_attention(shards, window=window, seed=seed)


# Without them


def test_a_machine_without_a_compiler_serves_the_same_tokens_without_kernels(
    tiny_model: Path,
    tmp_path: Path,
    engine_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, 259, 10)]

    def generate() -> list[int]:
        driver = Driver(tiny_model, engine_cache, ranks=1, max_num_seqs=1, max_num_batched_tokens=16)
        driver.start((0, 0), prompt)
        return driver.generate((0, 0), 12)

    fast = generate()
    log.configure("executor", 0, 1, "info")
    monkeypatch.setattr(library._Loaded, "answer", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert generate() == fast
    assert library.load(tmp_path) is False
    assert capsys.readouterr().err.count("no C++ compiler") == 1


def test_a_compiler_that_fails_is_told_of_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "it ran out of ink" >&2\nexit 1\n')
    os.chmod(compiler, 0o755)
    log.configure("executor", 0, 1, "info")
    monkeypatch.setattr(library._Loaded, "answer", None)
    monkeypatch.setenv("CXX", str(compiler))
    assert library.load(tmp_path) is False
    assert "it ran out of ink" in capsys.readouterr().err
