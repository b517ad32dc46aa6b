"""Sampling against plain definitions, against transformers' logits processors, and as a distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bus.messages import Sampling
from executor import constraints, sampling
from executor.constraints import UNCONSTRAINED, Constraints, Line
from executor.sampling import RowParams
from tests.executor.definition import CHANCE, SAMPLERS, chi_square, plain_adjust, probabilities, sampling_of
from tests.executor.driving import Driver

VOCABULARY = 259
RANDOM = np.random.default_rng


class Rows:
    """A history and parameters of a few rows, as they lie on one shard."""

    def __init__(self, *rows: tuple[list[int], int, Sampling]) -> None:
        """Rows are given by their tokens, how many of these are prompt, and their parameters."""
        width = sampling.HISTORY_MULTIPLE * 2
        self.history = np.full((len(rows), width), 7, np.int32)  # what is left over from others must not count
        for row, (tokens, _, _) in enumerate(rows):
            self.history[row, : len(tokens)] = tokens
        packed = sampling.pack([(parameters, prompt_len) for _, prompt_len, parameters in rows])
        self.params = RowParams(*map(jnp.asarray, packed))
        self.ends = np.array([len(tokens) for tokens, _, _ in rows], np.int32)
        self.order = np.arange(len(rows), dtype=np.int32)
        self._rows = rows

    def draw(self, logits: np.ndarray) -> np.ndarray:
        return np.asarray(jax.jit(sampling.draw)(jnp.asarray(logits), self.params, self.order, self.ends))

    def adjust(self, logits: np.ndarray, masks: dict[int, list[int]] | None = None) -> np.ndarray:
        """`masks` has the tokens that lines may draw besides what their parameters allow."""
        lines = []
        for line, (tokens, prompt_len, parameters) in enumerate(self._rows):
            asked = Constraints.of(parameters, prompt_len, logits.shape[1])
            mask = None if masks is None or line not in masks else words_of(masks[line], logits.shape[1])
            if asked is not None or mask is not None:
                lines.append(Line(line, len(tokens), asked or UNCONSTRAINED, mask))
        adjusted = jnp.asarray(logits)
        for call in constraints.compose([lines], len(self._rows), logits.shape[1]):
            shard = jax.tree.map(lambda x: jnp.asarray(x)[0], call)
            adjusted = jax.jit(sampling.adjust)(adjusted, self.history, self.params, self.order, self.ends, shard)
        return np.asarray(adjusted)


def words_of(tokens: list[int], vocabulary: int) -> np.ndarray:
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def random_row(random: np.random.Generator) -> tuple[list[int], int, Sampling]:
    length = int(random.integers(1, 400))
    tokens = random.integers(0, 30, length).tolist()
    # Often so little output that bad words would have to reach into the prompt
    prompt_len = max(1, length - int(random.integers(0, 4 if random.random() < 0.5 else length)))
    parameters: dict[str, Any] = {}

    def sometimes(name: str, value: Any) -> None:
        if random.random() < 0.5:
            parameters[name] = value

    sometimes("presence_penalty", float(random.uniform(-2, 2)))
    sometimes("frequency_penalty", float(random.uniform(-2, 2)))
    sometimes("repetition_penalty", float(random.uniform(0.5, 2)))
    sometimes("logit_bias", {int(token): float(random.uniform(-9, 9)) for token in random.integers(0, VOCABULARY, 5)})
    sometimes("allowed_token_ids", random.integers(0, VOCABULARY, 60).tolist())
    words = [random.integers(0, 30, int(size)).tolist() for size in random.integers(1, 4, 6)]
    sometimes("bad_words_token_ids", [*words, [*tokens[-2:], 5], [*tokens[-3:], 258]])
    sometimes("min_tokens", int(random.integers(0, 2 * max(1, length - prompt_len))))
    return tokens, prompt_len, sampling_of(eos_token_id=2, stop_token_ids=[11, 12], **parameters)


@pytest.mark.parametrize("seed", range(4))
def test_adjustments_are_those_of_the_definition(seed: int) -> None:
    random = RANDOM(seed)
    rows = [random_row(random) for _ in range(12)]
    logits = random.normal(0, 5, (len(rows), VOCABULARY)).astype(np.float32)
    found = Rows(*rows).adjust(logits)
    for line, row in enumerate(rows):
        np.testing.assert_allclose(found[line], plain_adjust(logits[line], *row), rtol=1e-5, atol=1e-4)


def test_masks_leave_what_they_allow_of_what_the_parameters_do() -> None:
    random = RANDOM(9)
    rows = [random_row(random) for _ in range(6)]
    logits = random.normal(0, 5, (len(rows), VOCABULARY)).astype(np.float32)
    masks = {line: random.choice(np.arange(3, VOCABULARY), 90, replace=False).tolist() for line in (0, 2, 3, 5)}
    found = Rows(*rows).adjust(logits, masks)
    for line, row in enumerate(rows):
        expected = plain_adjust(logits[line], *row)
        allowed = np.isin(np.arange(VOCABULARY), masks.get(line, range(VOCABULARY)))
        np.testing.assert_allclose(found[line], np.where(allowed, expected, -np.inf), rtol=1e-5, atol=1e-4)


def test_output_may_end_before_its_minimum_where_a_mask_allows_nothing_else() -> None:
    asked = sampling_of(min_tokens=5, eos_token_id=2, stop_token_ids=[11, 60])
    logits = np.zeros((3, VOCABULARY), np.float32)
    found = Rows(*[([1, 2, 3], 3, asked)] * 3).adjust(logits, {0: [2, 60], 1: [2, 60, 61]})
    assert [np.flatnonzero(np.isfinite(line)).tolist() for line in found[:2]] == [[2, 60], [61]]
    assert not np.isfinite(found[2, [2, 11, 60]]).any()


def test_penalties_and_bad_words_are_those_of_transformers() -> None:
    random = RANDOM(0)
    tokens = random.integers(0, 40, 50).tolist()
    logits = random.normal(0, 5, (1, VOCABULARY)).astype(np.float32)
    ids, scores = torch.tensor([tokens]), torch.tensor(logits)

    penalty = Rows((tokens, 50, sampling_of(repetition_penalty=1.7))).adjust(logits)
    np.testing.assert_allclose(penalty, RepetitionPenaltyLogitsProcessor(1.7)(ids, scores), rtol=1e-6)

    words = [[3], [*tokens[-2:], 9], [*tokens[-1:], 10], [1, 2, 11]]
    banned = Rows((tokens, 1, sampling_of(bad_words_token_ids=words))).adjust(logits)
    np.testing.assert_array_equal(banned, NoBadWordsLogitsProcessor(words, eos_token_id=2)(ids, scores))


def test_more_biases_and_bans_than_one_call_takes() -> None:
    random = RANDOM(1)
    vocabulary = 3000
    tokens = random.integers(0, vocabulary, 40).tolist()
    bias = {token: float(random.uniform(-3, 3)) for token in range(0, vocabulary, 2)}
    words = [[*tokens[-4:], token] for token in range(1, 900, 3)] + [[token] for token in range(2, 900, 3)]
    asked = sampling_of(logit_bias=bias, bad_words_token_ids=words, presence_penalty=1.5, repetition_penalty=1.3)
    logits = random.normal(0, 5, (1, vocabulary)).astype(np.float32)
    expected = plain_adjust(logits[0], tokens, 4, asked)
    np.testing.assert_allclose(Rows((tokens, 4, asked)).adjust(logits)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0.0, 0, 0.9), (0.0, 0, 0.05), (0.0, 5, 1.0), (0.0, 1000, 1.0), (0.02, 0, 1.0), (0.01, 30, 0.8), (0.3, 2, 0.5)],
)
def test_filters_keep_what_transformers_keeps(min_p: float, top_k: int, top_p: float) -> None:
    logits = RANDOM(2).normal(0, 3, (6, VOCABULARY)).astype(np.float32)
    likely = np.exp(logits - logits.max(axis=1, keepdims=True))
    parameters = (np.full(6, min_p, np.float32), np.full(6, top_k, np.int32), np.full(6, top_p, np.float32))
    kept = np.asarray(jax.jit(sampling.keep)(likely, *parameters))
    scores = torch.tensor(logits)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)
    np.testing.assert_array_equal(kept, torch.isfinite(scores).numpy())


def test_lines_are_filtered_each_by_its_own() -> None:
    logits = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    likely = np.exp(logits - 7)
    parameters = (np.array([0, 0, 0.1, 0]), np.array([0, 3, 0, 0]), np.array([1, 1, 1, 0.7]))
    kept = np.asarray(sampling.keep(likely, *(jnp.asarray(x, t) for x, t in zip(parameters, "fif", strict=True))))
    assert kept.sum(axis=1).tolist() == [8, 3, 3, 2]


def draws(logits: np.ndarray, seeds: np.ndarray, positions: np.ndarray, **parameters: Any) -> np.ndarray:
    """A token for each pair of seed and position, all from the same `logits`."""
    packed = sampling.pack([(sampling_of(**parameters | {"seed": int(seed)}), 0) for seed in seeds])
    params = RowParams(*map(jnp.asarray, packed))
    lines = np.arange(seeds.size, dtype=np.int32)
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32), (seeds.size, 1))
    return np.asarray(jax.jit(sampling.draw)(tiled, params, lines, positions.astype(np.int32)))


@pytest.mark.parametrize("over", ["positions", "seeds", "large seeds"])
def test_draws_follow_the_distribution(over: str) -> None:
    count = 20000
    logits = RANDOM(3).normal(0, 1, 20)
    numbers = np.arange(count)
    match over:
        case "positions":
            tokens = draws(logits, np.full(count, 12345), numbers, temperature=0.7)
        case "seeds":
            tokens = draws(logits, numbers, np.full(count, 17), temperature=0.7)
        case _:
            tokens = draws(logits, (numbers.astype(object) << 40) - 2**62, np.full(count, 17), temperature=0.7)
    assert chi_square(np.bincount(tokens, minlength=20), np.exp(logits / 0.7)) < CHANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_of_each_sampler_follow_its_distribution(sampler: str) -> None:
    numbers, random = np.arange(20000), RANDOM(11)
    asked = sampling_of(**SAMPLERS[sampler])
    logits = random.normal(0, 1.5, (1, 32)).astype(np.float32)
    tokens = [*random.integers(0, 32, 12).tolist(), 6, 9]
    adjusted = Rows((tokens, 6, asked)).adjust(logits)
    drawn = draws(adjusted[0], numbers // 100, numbers % 100, **SAMPLERS[sampler])
    expected = probabilities(plain_adjust(logits[0], tokens, 6, asked)[None], asked)[0]
    assert chi_square(np.bincount(drawn, minlength=32), expected) < CHANCE


def test_draws_at_successive_positions_and_seeds_are_independent() -> None:
    for seeds, positions in ((np.full(20001, 5), np.arange(20001)), (np.arange(20001), np.full(20001, 5))):
        tokens = draws(np.zeros(4), seeds, positions)
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert chi_square(pairs, np.ones(16)) < CHANCE


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    random = RANDOM(4)
    logits = random.normal(0, 2, VOCABULARY).astype(np.float32)
    keys = [(seed, position) for seed in (0, 1, -5, 2**63) for position in (1, 2, 300)]
    rows = [([0] * position, 1, sampling_of(seed=seed, top_p=0.9)) for seed, position in keys]
    alone = [int(Rows(row).draw(logits[None])[0]) for row in rows]
    assert len(set(alone)) > 4
    for size in (12, 16, 33):
        order = random.permutation(np.resize(np.arange(len(rows)), size))
        together = Rows(*(rows[i] for i in order)).draw(np.tile(logits, (size, 1)))
        assert together.tolist() == [alone[i] for i in order]


def test_greedy_and_nan_lines_among_others() -> None:
    logits = RANDOM(5).normal(0, 1, (4, VOCABULARY)).astype(np.float32)
    rows = Rows(*(([1, 2], 1, sampling_of(temperature=t)) for t in (0.0, 1.0, 0.9, 0.0)))
    clean = rows.draw(logits)
    assert clean[[0, 3]].tolist() == logits[[0, 3]].argmax(axis=1).tolist()
    poisoned = logits.copy()
    poisoned[2, 100] = poisoned[3, 5] = np.nan
    assert rows.draw(poisoned).tolist() == [*clean[:2], -2, -2]
    assert np.asarray(sampling.greedy(poisoned)).tolist() == [*logits[:2].argmax(axis=1), -2, -2]


def test_the_smallest_of_equal_tokens_is_greedy() -> None:
    logits = np.array([[0, 3, 3, 1], [-np.inf] * 4], np.float32)
    assert np.asarray(sampling.greedy(logits)).tolist() == [1, 0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = RANDOM(6).normal(0, 3, (3, VOCABULARY)).astype(np.float32)
    drawn = np.array([5, int(logits[1].argmax()), 200], np.int32)
    found = jax.tree.map(np.asarray, jax.jit(sampling.logprobs)(logits, drawn))
    expected = torch.log_softmax(torch.tensor(logits), -1).numpy()
    top = np.argsort(-expected, axis=1)[:, : sampling.TOP_LOGPROBS]
    np.testing.assert_array_equal(found.tokens, top)
    np.testing.assert_allclose(found.values, np.take_along_axis(expected, top, 1), atol=1e-5)
    np.testing.assert_allclose(found.sampled, expected[np.arange(3), drawn], atol=1e-5)
    assert found.rank.tolist() == [int((e >= e[t]).sum()) for e, t in zip(expected, drawn, strict=True)]
    assert found.rank[1] == 1


# The same through the runner


def raw_logits(sent: Any) -> np.ndarray:
    return np.asarray(sent[1].drawn.logits[0, 0])


@pytest.mark.parametrize("seed", range(3))
def test_the_runner_draws_what_the_definition_says(driver: Driver, seed: int) -> None:
    """With steps in flight, so that penalties and bans see tokens which the host does not know yet."""
    random = RANDOM(seed)
    prompt = random.integers(3, VOCABULARY, 20).tolist()
    asked = sampling_of(
        temperature=0.0,
        logprobs=-1,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        repetition_penalty=1.4,
        logit_bias={3: 4.0, 9: 5.0},
        allowed_token_ids=[*list(range(0, VOCABULARY, 2)), 3, 9],
        min_tokens=6,
        eos_token_id=3,
        stop_token_ids=[9],
        bad_words_token_ids=[[8], [9, 3], [3, 9]],
    )
    where = (1, 2)
    driver.start(where, prompt, asked)
    sent = [driver.send({where: 20}), *(driver.send({where: 1}) for _ in range(11))]
    tokens = list(prompt)
    for step in sent:
        logits = raw_logits(step)
        token = driver.take(step)[where]
        assert token == plain_adjust(logits, tokens, 20, asked).argmax()
        tokens.append(token)
    assert not {3, 9} & set(tokens[20:26])
    assert {3, 9} & set(tokens[26:]), "the bias is strong enough for them to come once they may"


def test_a_request_draws_the_same_in_any_row_and_company(driver: Driver) -> None:
    prompt = RANDOM(7).integers(3, VOCABULARY, 30).tolist()
    asked = sampling_of(seed=99, temperature=1.2, top_k=50, top_p=0.95)
    driver.start((0, 0), prompt, asked)
    alone = driver.generate((0, 0), 12)
    driver.start((0, 0), prompt, sampling_of(seed=98, temperature=1.2, top_k=50, top_p=0.95))
    assert driver.generate((0, 0), 12) != alone

    driver.start((1, 3), prompt, asked)
    found = [driver.prefill((1, 3), 7)]
    for row in range(3):
        driver.start((0, row), prompt[row:], sampling_of(seed=row, temperature=0.5 * row))
        driver.prefill((0, row))
    while len(found) < 12:
        found.append(driver.step({(0, 0): 1, (0, 1): 1, (0, 2): 1, (1, 3): 1})[(1, 3)])
    assert found == alone


def test_output_that_was_there_before_counts_as_output(driver: Driver) -> None:
    """A row that resumes goes on as it would have."""
    prompt = RANDOM(8).integers(3, VOCABULARY, 25).tolist()
    asked = sampling_of(seed=5, temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5, min_tokens=9)
    driver.start((0, 0), prompt, asked)
    whole = driver.generate((0, 0), 10)
    driver.start((1, 1), prompt, asked, output=whole[:6])
    assert driver.generate((1, 1), 4) == whole[6:]


@pytest.mark.parametrize("wanted", [0, 5, 40, -1])
def test_logprobs_come_for_the_rows_that_want_them(driver: Driver, wanted: int) -> None:
    prompt = RANDOM(9).integers(3, VOCABULARY, 10).tolist()
    driver.start((0, 0), prompt, sampling_of(temperature=0.0))
    driver.start((0, 1), prompt, sampling_of(seed=3, logprobs=wanted))
    driver.start((1, 0), prompt[:4], sampling_of(temperature=0.0, logprobs=-1))
    driver.start((1, 1), prompt, sampling_of(temperature=0.0, logprobs=-1))
    driver.logprobs.clear()
    drawn = driver.step({(0, 0): 10, (0, 1): 10, (1, 0): 3, (1, 1): 10})
    assert drawn[(1, 0)] == -1
    assert set(driver.logprobs) == {(0, 1), (1, 1)}
    tokens, values, rank = driver.logprobs[(0, 1)]
    all_tokens, all_values, _ = driver.logprobs[(1, 1)]
    count = VOCABULARY if wanted == -1 else wanted
    assert tokens[0] == drawn[(0, 1)]
    assert tokens[1:].tolist() == all_tokens[1 : count + 1].tolist()
    np.testing.assert_allclose(values[1:], all_values[1 : count + 1], atol=1e-5)
    place = all_tokens[1:].tolist().index(tokens[0])
    assert rank == place + 1
    assert values[0] == pytest.approx(all_values[place + 1], abs=1e-5)
