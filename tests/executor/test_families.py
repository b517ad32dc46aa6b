"""Every family of models against HF transformers, on one device and on meshes of 8."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bus.config import Config, ConfigError
from bus.model_files import ModelError
from executor import hosts, mesh
from executor.models import parts
from tests.adapters import merged, write_adapter
from tests.executor import on_mesh
from tests.executor.driving import Driver
from tests.executor.test_llama import ALL, generate, logprobs_of, logprobs_within, prompt_of
from tests.executor.test_pooling import vector_of
from tests.families import FAMILIES, write_family
from tests.models import write_folder

MESHES = ["8x1", "4x2", "2x4"]
PARTED = MESHES[1:]
"""Where weights are parted. Where they are not, families differ in nothing that one device has not shown."""
INT8 = {"llama": "2x4", "qwen3_moe": "4x2"}
"""Where weights of 8 bits are tried: inputs and outputs of matrices parted, and experts."""
ADAPTED = ("llama", "4x2")
"""Where adapters are tried: with heads that two devices do not divide evenly, and on four shards."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path]) -> list[Path]:
    """Those that are loaded where adapters are tried; see `on_mesh`."""
    model = folders[ADAPTED[0]]
    root = model.with_name(f"{model.name}.adapters")
    attention = ("q_proj", "k_proj", "o_proj")
    return [
        write_adapter(root / "0", model, 8, seed=1),
        write_adapter(root / "1", model, 3, attention, seed=2, use_rslora=True),
        write_adapter(root / "2", model, 4, ("v_proj", "up_proj", "down_proj"), seed=3, layers=[0]),
    ]


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Callable[[str], Any]:
    loaded: dict[str, Any] = {}

    def load(family: str) -> Any:
        if family not in loaded:
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            loaded[family] = AutoModelForCausalLM.from_pretrained(folders[family], **options).eval()
        return loaded[family]

    return load


def meshes_of(family: str) -> list[str]:
    """The meshes that a family is tried on."""
    return MESHES if family == "llama" else PARTED


@pytest.fixture(scope="module")
def found(
    folders: dict[str, Path], adapters: list[Path], engine_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What every family gave on its meshes."""
    out = tmp_path_factory.mktemp("meshes") / "found.npz"
    special = {family: [f"{mesh}+int8"] for family, mesh in INT8.items()}
    special[ADAPTED[0]].append(f"{ADAPTED[1]}+lora")
    wanted = [
        f"{folder}={','.join([*meshes_of(family), *special.get(family, [])])}" for family, folder in folders.items()
    ]
    arguments = [sys.executable, "-m", "tests.executor.on_mesh", str(engine_cache), str(out), *wanted]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(
    family: str, folders: dict[str, Path], engine_cache: Path, reference: Callable[[str], Any]
) -> None:
    driver = Driver(folders[family], engine_cache)
    for length in (1, 37, 200):  # beyond windows, several blocks
        driver.start((1, 2), prompt_of(length), ALL)
        ours = driver.logits((1, 2))
        np.testing.assert_allclose(ours, logprobs_of(reference(family), prompt_of(length)), atol=2e-4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_a_mesh_are_those_of_transformers(family: str, found: Any, reference: Callable[[str], Any]) -> None:
    model = reference(family)
    expected = [generate(model, on_mesh.prompt_of(w, n), on_mesh.TOKENS) for w, n in on_mesh.PROMPTS.items()]
    for shape in meshes_of(family):
        assert found[f"{family}/{shape}/greedy"].tolist() == expected, shape
        for row, where in enumerate(on_mesh.SHOWN_ROWS):
            ours = found[f"{family}/{shape}/logits"][row]
            theirs = logprobs_of(model, on_mesh.prompt_of(where, on_mesh.PROMPTS[where]))
            np.testing.assert_allclose(ours, theirs, atol=2e-4, err_msg=shape)
        prompts = [on_mesh.prompt_of(where, on_mesh.PROMPTS[where]) for where in on_mesh.SHOWN_ROWS]
        told = np.concatenate([logprobs_within(model, prompt) for prompt in prompts])
        np.testing.assert_allclose(found[f"{family}/{shape}/prompts"], told, atol=2e-4, err_msg=shape)
        vectors = [vector_of(model, prompt, how) for prompt, how in zip(prompts, on_mesh.POOLINGS, strict=True)]
        np.testing.assert_allclose(found[f"{family}/{shape}/vectors"], vectors, atol=2e-4, err_msg=shape)


@pytest.mark.timeout(600)
def test_adapters_on_a_mesh_are_as_merged(found: Any, folders: dict[str, Path], adapters: list[Path]) -> None:
    family, shape = ADAPTED
    models = [merged(folders[family], adapter) for adapter in (None, *adapters)]
    rows = on_mesh.PROMPTS.items()
    expected = [generate(models[on_mesh.SLOTS[w]], on_mesh.prompt_of(w, n), on_mesh.TOKENS) for w, n in rows]
    assert found[f"{family}/{shape}+lora/greedy"].tolist() == expected
    plain = found[f"{family}/{shape}/greedy"].tolist()
    same = [one == other for one, other in zip(plain, expected, strict=True)]
    assert same == [slot == 0 for slot in on_mesh.SLOTS.values()]


@pytest.mark.timeout(600)
def test_all_that_sampling_can_do_is_the_same_on_every_mesh(
    found: Any, folders: dict[str, Path], engine_cache: Path
) -> None:
    driver = Driver(folders["llama"], engine_cache, **on_mesh.SETTINGS)
    alone = dict(on_mesh.asking(driver))
    for shape in MESHES:
        np.testing.assert_array_equal(found[f"llama/{shape}/asking"], alone["asking"], err_msg=shape)
        np.testing.assert_allclose(found[f"llama/{shape}/logprobs"], alone["logprobs"], atol=2e-4, err_msg=shape)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", INT8)
def test_weights_of_8_bits_are_the_same_on_a_mesh(
    family: str, found: Any, folders: dict[str, Path], engine_cache: Path
) -> None:
    driver = Driver(folders[family], engine_cache, **on_mesh.SETTINGS, quantization="int8")
    for name, alone in on_mesh.logits(driver):
        np.testing.assert_allclose(found[f"{family}/{INT8[family]}+int8/{name}"], alone, atol=1e-4, err_msg=name)


# Which devices


def test_ranks_are_spread_over_as_many_shards_as_there_are_devices_for() -> None:
    def shape(devices: int, **settings: Any) -> tuple[int, int]:
        return mesh.shape(Config(**settings), devices)

    assert shape(1, ranks=8) == (1, 1)
    assert shape(8, ranks=8) == (8, 1)
    assert shape(8, ranks=2) == (2, 1)
    assert shape(4, ranks=5) == (3, 1)  # two on each of the first shards; a fourth would have none
    assert shape(8, ranks=8, tensor_parallel=2) == (4, 2)
    assert shape(8, ranks=8, tensor_parallel=4, data_shards=1) == (1, 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel": 16}, "tensor_parallel: 16 is not allowed; there are 8 devices"),
        ({"tensor_parallel": 4, "data_shards": 3}, "data_shards: 3 shards of 4 devices each"),
        ({"ranks": 2, "data_shards": 4}, "it must be at most 2"),
        ({"ranks": 5, "data_shards": 4}, "it must be at most 3"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mesh.shape(Config(**settings), 8)


def test_executors_without_a_device_or_a_place_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="executors: 2 is not allowed; the mesh has 1 × 1 devices, all of them with 1 of"
    ):
        mesh.make(Config(executors=2), jax.devices())
    with pytest.raises(ConfigError, match="--index 2 is not allowed; with executors 2 the last is 1"):
        hosts.join(Config(executors=2), 2)


# Parts


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shared", [1, 2, 3, 7])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_every_device_has_its_heads_and_the_kv_heads_they_need(num_kv_heads: int, shared: int, devices: int) -> None:
    queries, keys = parts.heads(num_kv_heads * shared, num_kv_heads, 1, devices)
    assert queries.size % devices == keys.size % devices == 0
    held = [_units(parting, devices) for parting in (queries, keys)]
    assert sorted(q for of_device in held[0] for q in of_device if q >= 0) == list(range(num_kv_heads * shared))
    for my_queries, my_keys in zip(*held, strict=True):
        width = len(my_queries) // len(my_keys)
        for place, query in enumerate(my_queries):
            assert query < 0 or my_keys[place // width] == query // shared


def _units(parting: parts.Parting, devices: int) -> list[list[int]]:
    """The unit in each place of each device."""
    size = parting.size // devices
    return [
        [
            first + n if first >= 0 else -1
            for first, count in parting.segments(device * size, (device + 1) * size)
            for n in range(count)
        ]
        for device in range(devices)
    ]


# What cannot be served


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be null or a positive number"),
        ("llama", {"sliding_window": 8}, "a Llama has none"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must list all 2 layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 6 experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
    ],
)
def test_what_config_json_asks_for_in_vain_is_named(
    family: str, changes: dict[str, Any], sentence: str, tmp_path: Path, engine_cache: Path
) -> None:
    names = {"qwen3_moe": "Qwen3MoeForCausalLM"}
    architectures = [names.get(family, f"{family.capitalize()}ForCausalLM")]
    folder = write_folder(tmp_path / "model", **FAMILIES[family] | changes | {"architectures": architectures})
    with pytest.raises(ModelError, match=sentence):
        Driver(folder, engine_cache)
