"""Steps with drafts: they give the tokens that steps without them give, whatever is tried."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bus import model_files
from bus.config import Config, ConfigError
from bus.messages import Sampling
from bus.model_files import ModelError
from executor.drafts import draft_facts
from tests.executor.driving import GREEDY, Driver, Where
from tests.tiny_model import write_tiny_llama

COUNT = 40
PROMPT = [5, 9, 13, 5, 9]
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": Sampling(seed=2**40 + 3, max_tokens=COUNT, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
    "penalties": Sampling(
        seed=8,
        max_tokens=COUNT,
        temperature=0.7,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
    ),
    "constraints": Sampling(
        seed=9,
        max_tokens=COUNT,
        temperature=1.5,
        min_tokens=12,
        eos_token_id=2,
        stop_token_ids=[3, 4, 7],
        logit_bias={2: 6.0, 3: 6.0, 11: 6.0},
        bad_words_token_ids=[[11, 11], [11, 2], [6]],
    ),
    "logprobs": Sampling(seed=10, max_tokens=COUNT, temperature=0.8, logprobs=3),
}
WHERE: dict[str, Where] = {
    "greedy": (0, 0),
    "drawn": (0, 2),
    "penalties": (1, 1),
    "constraints": (1, 3),
    "logprobs": (1, 0),
}


@pytest.fixture(scope="module")
def driver(tiny_model: Path, engine_cache: Path) -> Driver:
    return Driver(tiny_model, engine_cache, speculation="ngram", num_speculative_tokens=5)


def begin(driver: Driver) -> None:
    driver.logprobs.clear()
    driver.all_logprobs.clear()
    for name, where in WHERE.items():
        driver.start(where, PROMPT, SAMPLINGS[name])


def plain(driver: Driver) -> tuple[dict[str, list[int]], list[tuple[np.ndarray, np.ndarray, int]]]:
    """What all rows give without drafts, and the log-probabilities."""
    begin(driver)
    drawn = [driver.step(dict.fromkeys(WHERE.values(), len(PROMPT) if step == 0 else 1)) for step in range(COUNT)]
    return {name: [step[where] for step in drawn] for name, where in WHERE.items()}, driver.all_logprobs[
        WHERE["logprobs"]
    ]


def test_tokens_are_those_without_drafts(driver: Driver) -> None:
    expected, logprobs = plain(driver)
    begin(driver)
    dice = random.Random(4)
    given: dict[str, list[int]] = {name: [] for name in WHERE}
    accepted = rejected = 0
    while running := [name for name in WHERE if len(given[name]) < COUNT]:
        drafts = {}
        for name in running:
            right = expected[name][len(given[name]) :][: dice.randint(0, 5)]
            wrong = [dice.randrange(90) for _ in range(dice.randint(0, 5 - len(right)))]
            if right + wrong:
                drafts[WHERE[name]] = right + wrong
        left = {WHERE[name]: driver.left(WHERE[name]) for name in running}
        taken = driver.take_tried(driver.send(left, drafts))
        for name in running:
            given[name] += taken[WHERE[name]]
            accepted += len(taken[WHERE[name]]) - 1
            rejected += len(drafts.get(WHERE[name], ())) - len(taken[WHERE[name]]) + 1
    assert accepted > 50
    assert rejected > 20
    for name in WHERE:
        assert given[name][:COUNT] == expected[name]
    found = driver.all_logprobs[WHERE["logprobs"]]
    for (ids, values, rank), (own_ids, own_values, own_rank) in zip(logprobs, found, strict=False):
        assert ids.tolist() == own_ids.tolist()
        assert values == pytest.approx(own_values, abs=1e-4)
        assert rank == own_rank


def test_rows_with_and_without_drafts_run_beside_a_prompt(driver: Driver) -> None:
    expected, _ = plain(driver)
    begin(driver)
    first, second, third = (WHERE[name] for name in ("greedy", "drawn", "penalties"))
    driver.step({first: 5, second: 5})
    tries = expected["greedy"][1:5]
    taken = driver.take_tried(driver.send({first: 1, second: 1, third: 3}, {first: [*tries, 1]}))
    assert taken == {first: expected["greedy"][1:6], second: [expected["drawn"][1]], third: [-1]}
    assert driver.step({first: 1, second: 1, third: 2}) == {
        first: expected["greedy"][6],
        second: expected["drawn"][2],
        third: expected["penalties"][0],
    }


def test_each_token_that_a_row_draws_has_its_own_mask(driver: Driver) -> None:
    rows = [WHERE["drawn"], WHERE["constraints"]]

    def allowed(given: int, count: int) -> list[list[int]]:
        return [list(range((given + i) % 5, 259, 5)) for i in range(count)]

    begin(driver)
    drawn = [
        driver.step(dict.fromkeys(rows, 1 if n else len(PROMPT)), {where: allowed(n, 1) for where in rows})
        for n in range(12)
    ]
    expected = {where: [step[where] for step in drawn] for where in rows}
    assert all(token % 5 == n % 5 for tokens in expected.values() for n, token in enumerate(tokens))
    begin(driver)
    first, second = rows
    prefilled = driver.step(dict.fromkeys(rows, len(PROMPT)), {where: allowed(0, 1) for where in rows})
    given = {where: [token] for where, token in prefilled.items()}
    while (n := len(given[first])) < 12:
        right = expected[first][n : n + 2]
        drafts = [*right, n % 5 + 5]  # the last may be wrong
        m = len(given[second])
        masks = {second: allowed(m, 1), first: allowed(n, 1 + len(drafts))}
        taken = driver.take_tried(driver.send(dict.fromkeys(rows, 1), {first: drafts}, masks))
        given = {where: given[where] + taken[where] for where in rows}
    assert all(given[where][:12] == expected[where][: len(given[where])] for where in rows)
    assert len(given[second]) < 12


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_model_changes_no_token(tiny_model: Path, engine_cache: Path, tmp_path: Path, seed: int) -> None:
    """The model itself drafts what it will draw; another one with its tokens hardly ever does."""
    draft = write_tiny_llama(tmp_path / "draft", seed)
    driver = Driver(
        tiny_model, engine_cache, speculation="model", draft_model=str(draft), num_speculative_tokens=3, num_blocks=160
    )
    expected, _ = plain(driver)
    begin(driver)
    driver.step(dict.fromkeys(WHERE.values(), len(PROMPT)))
    given = {name: [driver.rows[where].tokens[-1]] for name, where in WHERE.items()}
    accepted = tried = 0
    while running := [name for name in WHERE if len(given[name]) < COUNT]:
        drafts = {WHERE[name]: 1 + (len(given[name]) + place) % 3 for place, name in enumerate(running)}
        taken = driver.take_tried(driver.send({WHERE[name]: 1 for name in running}, drafts))
        for name in running:
            given[name] += taken[WHERE[name]]
            accepted += len(taken[WHERE[name]]) - 1
        tried += sum(drafts.values())
    assert {name: tokens[:COUNT] for name, tokens in given.items()} == expected
    assert accepted / tried > 0.98 if seed == 0 else accepted / tried < 0.5


def test_no_program_is_compiled_by_a_step_with_drafts(tiny_model: Path, engine_cache: Path) -> None:
    """The programs that warming up compiles are all that steps with drafts, of any number, take."""
    driver = Driver(tiny_model, engine_cache, speculation="ngram", num_speculative_tokens=3, max_num_batched_tokens=32)
    driver.runner.warm_up(lambda *_: None)
    before = set(driver.runner._steps.programs._compiled)
    begin(driver)
    driver.step(dict.fromkeys(WHERE.values(), len(PROMPT)))
    for count in (1, 2, 3):
        driver.take_tried(
            driver.send(dict.fromkeys(WHERE.values(), 1), {where: [1] * count for where in WHERE.values()})
        )
    assert set(driver.runner._steps.programs._compiled) == before


def test_draft_models_that_cannot_be(tiny_model: Path, tmp_path: Path) -> None:
    facts = model_files.read(tiny_model)
    config = Config(speculation="model", draft_model=str(tiny_model))
    assert draft_facts(config, facts) == facts
    with pytest.raises(ConfigError, match="it has 259 tokens, and the model 300"):
        draft_facts(config, replace(facts, vocab_size=300))
    with pytest.raises(ConfigError, match="it takes 1024 tokens, and max_model_len is 2000"):
        draft_facts(msgspec.structs.replace(config, max_model_len=2000), facts)
    with pytest.raises(ModelError, match="nowhere is not there"):
        draft_facts(msgspec.structs.replace(config, draft_model="nowhere"), facts)
