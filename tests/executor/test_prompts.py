"""Log-probabilities of prompts: those of HF transformers, however a prompt is computed and whatever runs beside it."""

from typing import Any

import numpy as np
import pytest

from bus.messages import Sampling
from executor.sampling import TOP_LOGPROBS
from tests.executor.driving import GREEDY, Driver, Where
from tests.executor.test_llama import all_logprobs_of, prompt_of


def asking(count: int, **options: Any) -> Sampling:
    return Sampling(**{"seed": 3, "max_tokens": 9, "temperature": 0.0, "prompt_logprobs": count} | options)


def check(driver: Driver, where: Where, model: Any, prompt: list[int], count: int) -> None:
    """Compare what was found of a row's prompt with the model's."""
    expected = all_logprobs_of(model, prompt)
    ids, values, ranks = driver.take_prompt(where)
    assert ids[:, 0].tolist() == prompt[1:]
    lines = np.arange(len(prompt) - 1)
    np.testing.assert_allclose(values, expected[lines[:, None], ids], atol=2e-4)
    own = expected[lines, prompt[1:]][:, None]
    assert (ranks >= (expected > own + 1e-4).sum(axis=1) + 1).all()
    assert (ranks <= (expected >= own - 1e-4).sum(axis=1)).all()
    most = expected.shape[1] if count < 0 else count
    assert ids.shape == (len(prompt) - 1, 1 + most)
    np.testing.assert_allclose(values[:, 1:], -np.sort(-expected, axis=1)[:, :most], atol=2e-4)


@pytest.mark.parametrize(("chunk", "count"), [(64, 2), (64, -1), (33, 0), (16, TOP_LOGPROBS + 1), (1, 3)])
def test_chunks_of_any_size_give_those_of_transformers(driver: Driver, model: Any, chunk: int, count: int) -> None:
    """More tokens in a step than one call of the programs has lines for, and steps of one token."""
    assert driver.runner._steps.lines < 16
    prompt = prompt_of(70, seed=chunk)
    driver.start((0, 2), prompt, asking(count))
    driver.prefill((0, 2), chunk)
    check(driver, (0, 2), model, prompt, count)


def test_prompts_are_computed_beside_rows_that_draw(driver: Driver, model: Any) -> None:
    """Of several ranks, ragged, and of rows that draw what they would draw if nobody asked."""
    prompts = {(0, 0): prompt_of(1), (0, 3): prompt_of(50, 1), (1, 0): prompt_of(23, 2), (1, 2): prompt_of(2, 3)}
    beside = {(0, 1): prompt_of(5, 4), (1, 1): prompt_of(40, 5)}
    drawing = Sampling(seed=9, max_tokens=9, temperature=0.8, logprobs=1)
    tokens: list[dict[Where, list[int]]] = []
    for options in ({}, {"prompt_logprobs": None}):
        given: dict[Where, list[int]] = {where: [] for where in (*prompts, *beside)}
        tokens.append(given)
        for where, prompt in beside.items():
            driver.start(where, prompt, drawing)
        driver.step({(0, 1): 5, (1, 1): 7})
        for number, (where, prompt) in enumerate(prompts.items()):
            driver.start(where, prompt, asking(number, logprobs=2, **options))
        driver.prompt_logprobs.clear()
        while running := {where: min(driver.left(where), 9) for where, got in given.items() if len(got) < 4}:
            for where, token in driver.step(running).items():
                given[where] += [token] if token >= 0 else []
        if not options:
            assert driver.prompt_logprobs.keys() == prompts.keys() - {(0, 0)}
            for number, (where, prompt) in enumerate(prompts.items()):
                if len(prompt) > 1:
                    check(driver, where, model, prompt, number)
    assert not driver.prompt_logprobs
    assert tokens[0] == tokens[1]


def test_a_row_that_resumes_gives_its_prompt_again_and_nothing_of_its_output(driver: Driver, model: Any) -> None:
    prompt = prompt_of(21, seed=7)
    driver.start((0, 0), prompt, asking(1))
    driver.step({(0, 0): 13})
    driver.prompt_logprobs.clear()
    driver.start((0, 0), prompt, asking(1), output=[5, 6, 7])
    driver.generate((0, 0), 2, chunk=22)
    check(driver, (0, 0), model, prompt, 1)
    driver.start((0, 0), prompt, asking(1))
    driver.start((0, 0), prompt, GREEDY)
    driver.generate((0, 0), 2)
    assert not driver.prompt_logprobs
