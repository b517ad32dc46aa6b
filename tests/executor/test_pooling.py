"""Vectors of prompts: of HF transformers' last hidden states, however a prompt is computed and whatever runs beside."""

from typing import Any

import numpy as np
import pytest
import torch

from bus.messages import Pooling, PoolingKind, Sampling
from bus.sampling import pooled
from executor.pooling import POOLED_TOKEN
from tests.executor.driving import GREEDY, Driver, Where
from tests.executor.test_llama import prompt_of


def asking(kind: PoolingKind, normalize: bool = False) -> Sampling:
    return pooled(Pooling(kind=kind, normalize=normalize))


def vector_of(model: Any, prompt: list[int], pooling: Pooling) -> np.ndarray:
    """What transformers makes of a prompt."""
    with torch.no_grad():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = states[-1] if pooling.kind == "last" else states.mean(0)
    return (torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector).numpy()


def check(driver: Driver, where: Where, model: Any, prompt: list[int], sampling: Sampling) -> None:
    """Compare a row's vector, which was told since the last time, with the model's."""
    assert sampling.pooling is not None
    np.testing.assert_allclose(driver.pooled.pop(where), vector_of(model, prompt, sampling.pooling), atol=2e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize(("length", "chunk"), [(70, 64), (70, 33), (9, 1), (1, 1)])
def test_chunks_of_any_size_give_those_of_transformers(
    driver: Driver, model: Any, kind: PoolingKind, length: int, chunk: int
) -> None:
    """More tokens in a step than one call of the program takes, and steps of one token. Nothing is drawn."""
    assert driver.runner._steps.lines < 16
    prompt = prompt_of(length, seed=length + chunk)
    for normalize in (False, True):
        driver.start((1, 2), prompt, asking(kind, normalize))
        assert driver.prefill((1, 2), chunk) == POOLED_TOKEN
        check(driver, (1, 2), model, prompt, asking(kind, normalize))


def test_prompts_are_pooled_beside_rows_that_draw(driver: Driver, model: Any) -> None:
    """Of several ranks, ragged, and rows that draw give what they give alone."""
    prompts = {(0, 0): prompt_of(1), (0, 3): prompt_of(50, 1), (1, 0): prompt_of(23, 2), (1, 2): prompt_of(2, 3)}
    kinds: dict[Where, PoolingKind] = {(0, 0): "mean", (0, 3): "mean", (1, 0): "last", (1, 2): "mean"}
    beside = {(0, 1): prompt_of(5, 4), (1, 1): prompt_of(40, 5)}
    drawing = Sampling(seed=9, max_tokens=9, temperature=0.8, logprobs=1)
    alone, together = [], []
    for where, prompt in beside.items():
        driver.start(where, prompt, drawing)
        alone.append(driver.generate(where, 8))
        driver.start(where, prompt, drawing)
    for where, prompt in prompts.items():
        driver.start(where, prompt, asking(kinds[where]))
    given: dict[Where, list[int]] = {where: [] for where in beside}
    while any(len(tokens) < 8 for tokens in given.values()) or len(driver.pooled) < len(prompts):
        running = {where: min(driver.left(where), 9) for where in driver.rows if where not in driver.pooled}
        for where, token in driver.step(running).items():
            if where in given:
                given[where] += [token] if token >= 0 else []
            else:
                assert (token == POOLED_TOKEN) == (where in driver.pooled)
    together = [tokens[:8] for tokens in given.values()]
    assert together == alone
    for where, prompt in prompts.items():
        check(driver, where, model, prompt, asking(kinds[where]))


def test_a_row_that_begins_anew_gives_the_whole_mean(driver: Driver, model: Any) -> None:
    prompt = prompt_of(41, seed=7)
    driver.start((0, 0), prompt_of(30, 8), asking("mean"))
    driver.step({(0, 0): 13})
    driver.start((0, 0), prompt, asking("mean"))
    driver.prefill((0, 0), 22)
    check(driver, (0, 0), model, prompt, asking("mean"))
    driver.start((0, 0), prompt, asking("mean"))
    driver.start((0, 0), prompt, GREEDY)
    assert min(driver.generate((0, 0), 2)) >= 0
    assert not driver.pooled


def test_what_is_not_a_number_is_not_told(driver: Driver, model: Any) -> None:
    """Of one row, and the rows beside it and after it are none the worse."""
    prompt = prompt_of(20, seed=3)
    driver.start((0, 0), prompt, asking("mean"))
    driver.start((0, 1), prompt, asking("mean"))
    driver.step({(0, 0): 8, (0, 1): 8})
    sums = driver.runner._pools._sums
    driver.runner._pools._sums = sums.at[0, 0].set(np.nan)
    assert driver.step({(0, 0): 12, (0, 1): 12}) == {(0, 0): -2, (0, 1): POOLED_TOKEN}
    assert (0, 0) not in driver.pooled
    check(driver, (0, 1), model, prompt, asking("mean"))
    driver.start((0, 0), prompt, asking("mean"))
    driver.prefill((0, 0))
    check(driver, (0, 0), model, prompt, asking("mean"))
