"""The model against HF transformers on the same float32 weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from bus.messages import Sampling
from bus.model_files import ModelError
from tests.executor.driving import GREEDY, Driver
from tests.models import write_folder

ALL = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=-1)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
}


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    loaded: dict[Path, Any] = {}

    def load(folder: Path) -> Any:
        if folder not in loaded:
            loaded[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return loaded[folder]

    return load


def logprobs_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].double(), -1).numpy()


def all_logprobs_of(model: Any, tokens: list[int]) -> np.ndarray:
    """[tokens - 1, vocabulary]: what the model thinks may stand where the second token does, the third, …"""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].double(), -1).numpy()


def logprobs_within(model: Any, tokens: list[int]) -> np.ndarray:
    """Of each token but the first; [tokens - 1]."""
    return all_logprobs_of(model, tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        done = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None
        )
    return done[0, len(prompt) :].tolist()


def prompt_of(length: int, seed: int = 0, vocabulary: int = 259) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocabulary, length).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_transformers(
    shape: str, tmp_path: Path, engine_cache: Path, reference: Callable[[Path], Any]
) -> None:
    folder = write_folder(tmp_path / "model", **SHAPES[shape])
    if shape == "tied":
        _change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    driver = Driver(folder, engine_cache)
    for length in (1, 37, 230):
        driver.start((1, 2), prompt_of(length), ALL)
        ours = driver.logits((1, 2))
        np.testing.assert_allclose(ours, logprobs_of(reference(folder), prompt_of(length)), atol=2e-4)


def test_weights_in_several_files_are_the_same_model(tiny_model: Path, tmp_path: Path, engine_cache: Path) -> None:
    whole, parted = (
        Driver(folder, engine_cache) for folder in (tiny_model, write_folder(tmp_path / "parted", shards=3))
    )
    for driver in (whole, parted):
        driver.start((0, 0), prompt_of(20), ALL)
    np.testing.assert_array_equal(whole.logits((0, 0)), parted.logits((0, 0)))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 250])
def test_greedy_output_is_that_of_transformers_whatever_the_chunks(
    driver: Driver, tiny_model: Path, reference: Callable[[Path], Any], length: int
) -> None:
    prompt = prompt_of(length, seed=length)
    expected = generate(reference(tiny_model), prompt, 6)
    for chunk in (64, 33, 5):
        driver.start((0, 1), prompt)
        assert driver.generate((0, 1), 6, chunk) == expected


def test_chunks_give_the_logits_of_the_whole(driver: Driver) -> None:
    prompt = prompt_of(60)
    found = []
    for chunk in (60, 16, 7, 1):
        driver.start((0, 0), prompt, ALL)
        found.append(driver.logits((0, 0), chunk))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=5e-5)


def test_rows_of_all_ranks_run_side_by_side_at_different_places(
    driver: Driver, tiny_model: Path, reference: Callable[[Path], Any]
) -> None:
    """Rows start at different steps, prefill in chunks beside others that decode, stop, and are used again."""
    random = np.random.default_rng(1)
    places = [(rank, row) for rank in range(2) for row in range(4)]
    waiting = [prompt_of(int(length), seed=100 + n) for n, length in enumerate(random.integers(1, 90, 24))]
    running: dict[tuple[int, int], list[int]] = {}
    outputs: dict[tuple[int, int], list[int]] = {}
    finished: list[tuple[list[int], list[int]]] = []
    while waiting or running:
        for where in places:
            if where not in running and waiting and random.random() < 0.5:
                running[where], outputs[where] = waiting.pop(), []
                driver.start(where, running[where])
        step = {}
        for where in running:
            row = driver.rows[where]
            left = len(row.tokens) - row.computed
            if random.random() < 0.8:
                step[where] = min(left, int(random.integers(1, 16)))
        for where, token in driver.step(step).items() if step else ():
            if token != -1:
                outputs[where].append(token)
            if len(outputs[where]) == 5:
                finished.append((running.pop(where), outputs[where]))
                driver.stop(where)
    assert len(finished) == 24
    for prompt, output in finished:
        assert output == generate(reference(tiny_model), prompt, 5)


def test_a_step_can_be_sent_before_the_one_it_builds_on_is_done(driver: Driver) -> None:
    prompt = prompt_of(30)
    driver.start((1, 0), prompt)
    expected = driver.generate((1, 0), 8)
    driver.start((1, 0), prompt)
    sent = [driver.send({(1, 0): 30}), *(driver.send({(1, 0): 1}) for _ in range(7))]
    assert [driver.take(step)[(1, 0)] for step in sent] == expected


def test_padding_touches_no_row(driver: Driver) -> None:
    """In steps of all sizes, with some of the rows and with all of them, none but a step's own rows changes."""
    rows = [(rank, row) for rank in range(2) for row in range(4)]
    for number, where in enumerate(rows):
        driver.start(where, prompt_of(40 + number, seed=number), Sampling(seed=number, max_tokens=1, temperature=0.5))
    for chosen, most in ((rows, 13), (rows[:1], 17), (rows[3:6], 9), (rows, 15), (rows, 16), (rows, 16)):
        driver.step({where: count for where in chosen if (count := min(driver.left(where), most))})
    for chosen in (rows[:3], rows[5:], rows[2:7], rows):
        before = {where: driver.kv(where) for where in rows}
        driver.step(dict.fromkeys(chosen, 1))
        for where in rows:
            length = before[where].shape[1]
            np.testing.assert_array_equal(driver.kv(where)[:, :length], before[where])
            assert driver.history(where) == driver.rows[where].tokens
    for first, count in (((1, 3), 9), ((0, 0), 5)):  # 16 and 12 tokens in a program for 16, all rows in use
        driver.start(first, prompt_of(count))
        others = [where for where in rows if where != first]
        before = {where: driver.kv(where) for where in others}
        driver.step({where: count if where == first else 1 for where in rows})
        for where in others:
            np.testing.assert_array_equal(driver.kv(where)[:, : before[where].shape[1]], before[where])
            assert driver.history(where) == driver.rows[where].tokens


def test_the_next_turn_goes_on_from_what_was_kept(
    driver: Driver, tiny_model: Path, reference: Callable[[Path], Any]
) -> None:
    first, second = prompt_of(21), prompt_of(9, seed=9)
    driver.start((0, 3), first)
    output = driver.generate((0, 3), 4)
    driver.resume((0, 3), 2, second)
    assert driver.generate((0, 3), 4) == generate(reference(tiny_model), first + output[:2] + second, 4)


def test_nan_stays_in_the_row_that_has_it(tiny_model: Path, tmp_path: Path, engine_cache: Path) -> None:
    """Also for those who later get its blocks."""
    folder = write_folder(tmp_path / "nan")
    poison = 200
    _change_weights(folder, lambda weights: weights["model.embed_tokens.weight"][poison].fill(np.nan))
    driver = Driver(folder, engine_cache, ranks=1, num_blocks=64)
    clean = [token for token in prompt_of(25) if token != poison]
    driver.start((0, 0), clean)
    expected = driver.generate((0, 0), 3)

    driver.start((0, 0), clean)
    driver.start((0, 1), [5, poison, 7])
    driver.start((0, 2), clean)
    first = driver.step({(0, 0): len(clean), (0, 1): 3, (0, 2): len(clean)})
    assert first == {(0, 0): expected[0], (0, 1): -2, (0, 2): expected[0]}
    assert driver.step({(0, 0): 1, (0, 1): 1})[(0, 0)] == expected[1]
    driver.start((0, 1), [poison] * 60)
    assert driver.prefill((0, 1), 60) == -2
    for _ in range(8):  # until the poisoned blocks have surely come round
        driver.stop((0, 1))
        driver.start((0, 1), clean)
        assert driver.generate((0, 1), 3) == expected


def test_greedy_output_of_the_embedded_model(
    embedded_model: Path, engine_cache: Path, reference: Callable[[Path], Any]
) -> None:
    driver = Driver(embedded_model, engine_cache, ranks=1, max_num_seqs=2, max_num_batched_tokens=32, num_blocks=40)
    prompt = prompt_of(45, vocabulary=49152)
    driver.start((0, 0), prompt, ALL)
    logits = driver.logits((0, 0), 32)
    np.testing.assert_allclose(logits, logprobs_of(reference(embedded_model), prompt), atol=1e-3)
    driver.start((0, 1), prompt, GREEDY)
    assert driver.generate((0, 1), 4, 32) == generate(reference(embedded_model), prompt, 4)


def test_a_rope_that_is_not_supported_is_named(tmp_path: Path, engine_cache: Path) -> None:
    folder = write_folder(tmp_path / "model", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ModelError, match="rope type yarn is not supported"):
        Driver(folder, engine_cache).runner.warm_up(lambda *_: None)


def _change_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
