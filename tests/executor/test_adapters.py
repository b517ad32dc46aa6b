"""LoRA adapters in the runner, against the models that transformers computes with their factors merged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import structlog
from safetensors.numpy import load_file, save_file

from bus import config
from bus.config import ConfigError
from executor import adapter_files
from executor.adapter_files import AdapterError
from tests.adapters import ALL_TARGETS, merged, write_adapter
from tests.executor.driving import Driver, Where
from tests.executor.test_llama import ALL, generate, logprobs_of, prompt_of
from tests.families import write_family

SETTINGS = {"max_loras": 3, "max_lora_rank": 8}

ROWS: dict[Where, int] = {(0, 0): 1, (0, 1): 2, (1, 0): 3, (1, 1): 0, (1, 2): 1}
"""The slot of each row that runs, on two ranks."""


class Adapted(NamedTuple):
    """A model, adapters of different ranks and matrices, and what transformers makes of each, itself first."""

    model: Path
    folders: list[Path]
    references: list[Any]


def adapted(root: Path, model: Path) -> Adapted:
    folders = [
        write_adapter(root / "all", model, 4, seed=1),
        write_adapter(root / "attention", model, 8, ("q_proj", "v_proj", "o_proj"), seed=2, use_rslora=True),
        write_adapter(root / "mlp", model, 1, ("gate_proj", "down_proj"), seed=3, layers=[1], lora_alpha=3),
    ]
    return Adapted(model, folders, [merged(model, None), *(merged(model, folder) for folder in folders)])


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(tmp_path_factory.mktemp("adapters"), tiny_model)


def driver_of(model: Adapted, cache: Path, **settings: Any) -> Driver:
    driver = Driver(model.model, cache, **SETTINGS | settings)
    for slot, folder in enumerate(model.folders, 1):
        driver.load(slot, folder)
    return driver


def prompt_in(where: Where) -> list[int]:
    return prompt_of(9 + 7 * where[0] + 3 * where[1], seed=sum(where))


def run_all(driver: Driver, count: int) -> dict[Where, list[int]]:
    """Tokens of all rows side by side, some decoding while others prefill."""
    for where, slot in ROWS.items():
        driver.start(where, prompt_in(where), adapter=slot)
    drawn: dict[Where, list[int]] = {where: [] for where in ROWS}
    while min(map(len, drawn.values())) < count:
        for where, token in driver.step({where: min(driver.left(where), 7) for where in ROWS}).items():
            drawn[where] += [token] if token != -1 else []
    return {where: tokens[:count] for where, tokens in drawn.items()}


def test_three_adapters_and_none_in_one_batch_are_as_merged(tiny: Adapted, engine_cache: Path) -> None:
    driver = driver_of(tiny, engine_cache)
    drawn = run_all(driver, 12)
    for where, slot in ROWS.items():
        assert drawn[where] == generate(tiny.references[slot], prompt_in(where), 12), where
    firsts = {slot: generate(model, prompt_in((0, 0)), 12) for slot, model in enumerate(tiny.references)}
    assert len(set(map(tuple, firsts.values()))) == len(firsts)  # they are different models
    for slot, model in enumerate(tiny.references):
        for length in (1, 37):
            driver.start((1, 3), prompt_of(length), ALL, adapter=slot)
            ours = driver.logits((1, 3))
            np.testing.assert_allclose(ours, logprobs_of(model, prompt_of(length)), atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
def test_families_with_adapters_are_as_merged(family: str, tmp_path: Path, engine_cache: Path) -> None:
    model = write_family(tmp_path / family, family)
    targets = ALL_TARGETS[:4] if family == "qwen3_moe" else ALL_TARGETS
    folder = write_adapter(tmp_path / "adapter", model, 4, targets)
    driver = Driver(model, engine_cache, **SETTINGS)
    driver.load(2, folder)
    for slot, reference in ((2, merged(model, folder)), (0, merged(model, None))):
        driver.start((0, 1), prompt_of(37), ALL, adapter=slot)
        np.testing.assert_allclose(driver.logits((0, 1)), logprobs_of(reference, prompt_of(37)), atol=2e-4)


def test_loading_and_unloading_compiles_nothing(tiny: Adapted, engine_cache: Path) -> None:
    driver = Driver(tiny.model, engine_cache, **SETTINGS, max_num_seqs=1, max_num_batched_tokens=16)
    driver.runner.warm_up(lambda *_: None)
    with structlog.testing.capture_logs() as logs:
        for slot in (1, 2, 1):  # the last takes the first one's place
            for place, folder in enumerate(tiny.folders, 1):
                driver.load(slot, folder)
                driver.start((0, 0), prompt_of(20), adapter=slot)
                assert driver.generate((0, 0), 3, chunk=16) == generate(tiny.references[place], prompt_of(20), 3)
    assert not [line for line in logs if line["log_level"] == "error"]


def test_a_sessions_next_turn_has_its_adapter(tiny: Adapted, engine_cache: Path) -> None:
    driver = driver_of(tiny, engine_cache)
    driver.start((1, 1), prompt_of(10), adapter=2)
    first = driver.generate((1, 1), 3)
    more = prompt_of(6, seed=9)
    driver.resume((1, 1), 1, more)
    context = [*prompt_of(10), *first[:-1], *more]
    assert driver.generate((1, 1), 3) == generate(tiny.references[2], context, 3)


def test_drafts_are_judged_by_the_model_with_its_adapter(tiny: Adapted, engine_cache: Path) -> None:
    """The draft model draws without adapters: what it draws may be wrong, and then it is not kept."""
    small = {"speculation": "model", "draft_model": str(tiny.model), "num_speculative_tokens": 3}
    driver = driver_of(tiny, engine_cache, **small)
    for slot in (1, 0):
        where, expected = (0, slot), generate(tiny.references[slot], prompt_of(12), 10)
        driver.start(where, prompt_of(12), adapter=slot)
        drawn, most = [driver.prefill(where)], 0
        while len(drawn) < 10:
            (tokens,) = driver.take_tried(driver.send({where: 1}, drafts={where: 3})).values()
            drawn, most = drawn + tokens, max(most, len(tokens))
        assert drawn[:10] == expected
        assert slot or most == 4  # without an adapter both models are the same


def test_weights_of_8_bits_take_adapters(tiny: Adapted, engine_cache: Path) -> None:
    driver = driver_of(tiny, engine_cache, quantization="int8")
    rounded = {}
    for slot in (0, 1):
        driver.start((0, 0), prompt_of(20), ALL, adapter=slot)
        rounded[slot] = driver.logits((0, 0))
        np.testing.assert_allclose(rounded[slot], logprobs_of(tiny.references[slot], prompt_of(20)), atol=0.3)
    assert np.abs(rounded[0] - rounded[1]).max() > 1


def test_without_adapters_programs_take_nothing_for_them(tiny: Adapted, engine_cache: Path) -> None:
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    off, on = (Driver(tiny.model, engine_cache, max_loras=count, **small).runner._steps for count in (0, 1))
    for steps in (off, on):
        steps.trace()
    names = [{key.name for key in steps.programs._traced} for steps in (off, on)]
    assert names[1] - names[0] == {"adapter layers"}
    assert [len(group) for group in off.adapters] == [len(group) for group in on.adapters]
    assert not any(layer for group in off.adapters for layer in group)
    assert off.digest("tiny") != on.digest("tiny")


# Adapters that cannot be used

Change = Callable[[Path], None]


def settings(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return rewrite


Q = "base_model.model.model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[Change, str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter that can be read"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no adapter that can be read"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "holds no adapter that can be read"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is no JSON object"),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x10"), "cannot be read"),
    "DoRA": (settings(use_dora=True), "use_dora True is not supported; it must be left out"),
    "saved modules": (settings(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\] is not supported"),
    "bias": (settings(bias="all"), "bias 'all' is not supported; it must be none"),
    "another kind": (settings(peft_type="IA3"), "peft_type 'IA3' is not supported; it must be LORA"),
    "ranks by pattern": (settings(rank_pattern={"q_proj": 2}), "rank_pattern .* is not supported"),
    "PiSSA": (settings(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4' is not supported"),
    "unknown target": (
        settings(target_modules=["lm_head"]),
        "target_modules has 'lm_head', for which this model takes",
    ),
    "rank": (settings(r=9), "r 9 is not supported; it must be from 1 to max_lora_rank, 8"),
    "no rank": (settings(r=None), "r None is not supported"),
    "alpha": (settings(lora_alpha="2"), "lora_alpha '2' is not supported; it must be a number"),
    "empty": (tensors(lambda found: found.clear()), "holds no tensors"),
    "a layer too many": (
        tensors(lambda found: found.update({Q.replace("0", "7") + ".lora_A.weight": found[f"{Q}.lora_A.weight"]})),
        r"layers.7.self_attn.q_proj.lora_A.weight is no factor of a matrix that may have an adapter",
    ),
    "an embedding": (
        tensors(lambda found: found.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(3)})),
        "lora_embedding_A is no factor of a matrix",
    ),
    "half a pair": (tensors(lambda found: found.pop(f"{Q}.lora_B.weight")), "lacks .*q_proj.lora_B.weight"),
    "shape": (
        tensors(lambda found: found.update({f"{Q}.lora_A.weight": np.ones((4, 63), np.float32)})),
        r"lora_A.weight has shape \(4, 63\); the model and r make it \(4, 64\)",
    ),
    "NaN": (
        tensors(lambda found: found.update({f"{Q}.lora_A.weight": np.full((4, 64), np.nan, np.float32)})),
        "lora_A.weight has values that are no numbers",
    ),
    "infinite": (
        tensors(lambda found: found.update({f"{Q}.lora_B.weight": np.full((64, 4), np.inf, np.float32)})),
        "lora_B.weight has values that are no numbers",
    ),
}


@pytest.fixture(scope="module")
def bare(tiny_model: Path, engine_cache: Path) -> Driver:
    return Driver(tiny_model, engine_cache, **SETTINGS)


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_cannot_be_used_is_refused(case: str, bare: Driver, tiny_model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_model, 4)
    change, sentence = BAD[case]
    change(folder)
    with pytest.raises(AdapterError, match=sentence):
        bare.load(1, folder)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"lora_modules": "a=/a", "max_loras": "0"}, "lora_modules: 1 adapters are not allowed; max_loras is 0"),
        ({"lora_modules": "a", "max_loras": "2"}, "lora_modules: 'a' is not allowed; it must be NAME=FOLDER"),
        (
            {"lora_modules": "a=/a,a=/b", "max_loras": "2"},
            "it must be NAME=FOLDER, with commas between, and no name twice",
        ),
    ],
)
def test_adapters_for_the_start_that_cannot_be_are_refused(flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config.load(flags, {})
    assert config.load({"lora_modules": "a=/a, b=/b", "max_loras": "2"}, {}).first_adapters == {"a": "/a", "b": "/b"}


def test_factors_of_experts_are_refused(tmp_path: Path, engine_cache: Path) -> None:
    model = write_family(tmp_path / "moe", "qwen3_moe")
    folder = write_adapter(tmp_path / "adapter", model, 4, ("q_proj",))
    settings(target_modules=["q_proj", "gate_proj"])(folder)
    with pytest.raises(AdapterError, match="'gate_proj', for which this model takes no adapters"):
        Driver(model, engine_cache, **SETTINGS).load(1, folder)


def test_an_adapters_identity_is_its_name_and_its_files(tiny_model: Path, tmp_path: Path, bare: Driver) -> None:
    shapes = bare.runner._steps.adapter_layout.shapes
    folders = [write_adapter(tmp_path / f"{place}", tiny_model, 4, seed=min(place, 1)) for place in range(3)]
    first, second, same = (adapter_files.read(folder, "a", shapes, 8).identity for folder in folders)
    assert first != second == same
    assert adapter_files.read(folders[0], "b", shapes, 8).identity != first
    settings(lora_alpha=5)(folders[0])
    assert adapter_files.read(folders[0], "a", shapes, 8).identity != first


def test_weights_in_bfloat16_are_read(tiny_model: Path, tmp_path: Path, bare: Driver) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    folder = write_adapter(tmp_path / "adapter", tiny_model, 4)
    path = folder / "adapter_model.safetensors"
    save_torch({name: values.to(torch.bfloat16) for name, values in load_torch(path).items()}, path)
    found = adapter_files.read(folder, "a", bare.runner._steps.adapter_layout.shapes, 8).factors
    expected = load_torch(path)[f"{Q}.lora_A.weight"].float().numpy().T
    np.testing.assert_array_equal(found[Q.removeprefix("base_model.model.")].a, expected)
