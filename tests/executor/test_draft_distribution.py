"""With drafts, too, tokens are drawn from the distribution that their parameters mean, also those after right drafts.

The model is one whose next token depends on its last one alone, so that the distribution after anything is known.
"""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.executor.definition import CHANCE, SAMPLERS, chi_square, probabilities, sampling_of
from tests.executor.driving import Driver, Where
from tests.tiny_model import write_tiny_llama

VOCABULARY = 32
KINDS = ("temperature", "top_k", "top_p", "min_p", "bias", "penalties", "chat")
ROWS = 96
"""Of each kind."""
STEPS = 142
DRAFTS = 3
PROMPT = [5, 9, 13]
BINS = 20

Drawn = list[tuple[list[int], list[bool]]]
"""The output of rows, and which of its tokens came after a draft that was right, in the same step."""


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with 32 tokens, and with attention that adds nothing."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("forgetful") / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": VOCABULARY}))
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if "o_proj" in name:
            weights[name] = np.zeros_like(values)
        elif "embed_tokens" in name or "lm_head" in name:
            weights[name] = values[:VOCABULARY].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def table(forgetful: Path) -> np.ndarray:
    """The logits after each token, as transformers has them."""
    model = AutoModelForCausalLM.from_pretrained(forgetful, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(model(torch.arange(VOCABULARY)[:, None]).logits[:, 0].numpy())


def guesses(table: np.ndarray, last: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Drafts [rows, DRAFTS] after the `last` tokens: what the model might say, by dice of their own."""
    likely = np.exp(table - table.max(axis=1, keepdims=True))
    shares = np.cumsum(likely / likely.sum(axis=1, keepdims=True), axis=1)
    chain = []
    for _ in range(DRAFTS):
        last = np.minimum((shares[last] < random.random((last.size, 1))).sum(axis=1), VOCABULARY - 1)
        chain.append(last)
    return np.stack(chain, axis=1)


@pytest.fixture(scope="module")
def drawn(forgetful: Path, table: np.ndarray, engine_cache: Path) -> dict[str, Drawn]:
    """What rows of all kinds draw together, a few drafts in every step."""
    per_rank = len(KINDS) * ROWS // 2
    limits = {"max_num_seqs": per_rank, "max_num_batched_tokens": per_rank * (1 + DRAFTS)}
    sizes = {"max_model_len": 640, "block_size": 64, "num_blocks": 2 * per_rank * 8}
    speculation = {"speculation": "ngram", "num_speculative_tokens": DRAFTS}
    driver = Driver(forgetful, engine_cache, **limits, **sizes, **speculation)
    random = np.random.default_rng(1)
    rows: list[Where] = [(row % 2, row // 2) for row in range(2 * per_rank)]
    kinds = [KINDS[place % len(KINDS)] for place in range(len(rows))]
    for seed, (where, kind) in enumerate(zip(rows, kinds, strict=True)):
        driver.start(where, PROMPT, msgspec.structs.replace(sampling_of(**SAMPLERS[kind]), seed=seed))
    first = driver.step(dict.fromkeys(rows, len(PROMPT)))
    given = {where: ([first[where]], [False]) for where in rows}
    for _ in range(STEPS):
        last = np.array([given[where][0][-1] for where in rows])
        drafts = dict(zip(rows, guesses(table, last, random).tolist(), strict=True))
        for where, tokens in driver.take_tried(driver.send(dict.fromkeys(rows, 1), drafts)).items():
            given[where][0].extend(tokens)
            given[where][1].extend(place > 0 for place in range(len(tokens)))
    return {kind: [given[where] for where, own in zip(rows, kinds, strict=True) if own == kind] for kind in KINDS}


def distributions(table: np.ndarray, kind: str, output: list[int]) -> np.ndarray:
    """What each token of a row's output had to be drawn from, [len(output), vocabulary]."""
    asked = sampling_of(**SAMPLERS[kind])
    logits = table[[PROMPT[-1], *output[:-1]]].astype(np.float64)
    for token, bias in (asked.logit_bias or {}).items():
        logits[:, token] += bias
    before = np.zeros((len(output), VOCABULARY))
    before[1:] = np.cumsum(np.eye(VOCABULARY)[output[:-1]], axis=0)
    seen = (before > 0) | np.isin(np.arange(VOCABULARY), PROMPT)
    penalty = asked.repetition_penalty
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= asked.frequency_penalty * before + asked.presence_penalty * (before > 0)
    return probabilities(logits, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_follow_their_distribution(drawn: dict[str, Drawn], table: np.ndarray, kind: str) -> None:
    """Each token's place in the distribution that it had to come from is a number between 0 and 1, all equally likely.

    Tokens stand there in the order of their probabilities, and the place within a token's share is drawn.
    """
    places, verified = [], []
    dice = np.random.default_rng(2)
    for output, after_drafts in drawn[kind]:
        expected = distributions(table, kind, output)
        own = expected[np.arange(len(output)), output]
        assert (own > 0).all(), "no token comes that must not"
        likelier = expected > own[:, None]
        likelier |= (expected == own[:, None]) & (np.arange(VOCABULARY) < np.array(output)[:, None])
        places.append((expected * likelier).sum(axis=1) + own * dice.random(len(output)))
        verified.append(np.array(after_drafts))
    every, is_verified = np.concatenate(places), np.concatenate(verified)
    assert every.size >= 20_000
    assert is_verified.sum() >= 2_000
    for some in (every, every[is_verified], every[~is_verified]):
        counts = np.bincount(np.minimum((some * BINS).astype(int), BINS - 1), minlength=BINS)
        assert chi_square(counts, np.full(BINS, 1 / BINS)) < CHANCE
