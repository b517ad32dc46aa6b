"""A model folder is read with the right facts, or refused with a sentence that names what is wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from bus import model_files
from bus.config import Config
from bus.model_files import ModelError
from tests import models


def test_facts_of_a_folder(tmp_path: Path) -> None:
    facts = model_files.read(models.write_folder(tmp_path / "tiny"))
    assert (facts.architecture, facts.vocab_size, facts.num_layers) == ("LlamaForCausalLM", 259, 2)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 16)
    assert facts.rope == model_files.Rope(10000.0, "default")
    assert facts.eos_token_ids == (2,)
    assert facts.max_positions == 1024
    assert not facts.tie_word_embeddings
    assert facts.chat
    assert facts.weight_files == (tmp_path / "tiny" / "model.safetensors",)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    facts = model_files.read(models.write_folder(tmp_path / "tiny", shards=3))
    assert [path.name for path in facts.weight_files] == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]


def test_the_generation_config_names_more_stop_tokens(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert model_files.read(folder).eos_token_ids == (2, 5)


def test_a_sliding_window_is_each_layers(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "tiny", architectures=["MistralForCausalLM"], sliding_window=64)
    facts = model_files.read(folder)
    assert (facts.windows, facts.max_positions) == ((64, 64), 1024)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1}},
    ],
)
def test_rope_parameters_old_and_new(tmp_path: Path, changes: dict[str, Any]) -> None:
    rope = model_files.read(models.write_folder(tmp_path / "tiny", **changes)).rope
    assert rope == model_files.Rope(5e5, "llama3", {"factor": 8.0, "low_freq_factor": 1.0})


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    first = model_files.read(models.write_folder(tmp_path / "a")).fingerprint
    assert model_files.read(models.write_folder(tmp_path / "b")).fingerprint == first
    assert model_files.read(models.write_folder(tmp_path / "c", rope_theta=1e6)).fingerprint != first
    assert model_files.read(models.write_folder(tmp_path / "d", shards=2)).fingerprint != first


def _cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("shards", "harm", "sentence"),
    [
        (1, _remove("config.json"), "has no config.json"),
        (1, _remove("tokenizer.json"), "has no tokenizer.json"),
        (1, _remove("model.safetensors"), "has no weights"),
        (2, _remove(SHARD), f"has no {SHARD}"),
        (1, _cut("config.json", 20), "config.json cannot be read as JSON"),
        (1, _write("config.json", "[]"), "holds no JSON object"),
        (1, _cut("model.safetensors", 0), "cut short"),
        (1, _cut("model.safetensors", 5), "cut short"),
        (1, _cut("model.safetensors", 100), "cut short: it ends within its header"),
        (1, _cut("model.safetensors", -1), "cut short: it has"),
        (2, _cut(SHARD, -4), f"{SHARD} is cut short"),
        (1, _write("model.safetensors", "\x08\0\0\0\0\0\0\0not json"), "is not a safetensors file"),
        (2, _write("model.safetensors.index.json", "{}"), "has no weight_map"),
    ],
)
def test_a_harmed_folder_is_refused(tmp_path: Path, shards: int, harm: Callable[[Path], object], sentence: str) -> None:
    folder = models.write_folder(tmp_path / "tiny", shards=shards)
    harm(folder)
    with pytest.raises(ModelError, match=sentence) as refusal:
        model_files.read(folder)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; it must be LlamaForCausalLM"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be \"silu\""),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a whole number"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2\."),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "rope parameters must be numbers"),
    ],
)
def test_an_unsupported_config_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        model_files.read(models.write_folder(tmp_path / "tiny", **changes))


def test_a_shard_without_a_promised_tensor_is_refused(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "tiny", shards=2)
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": where | {"model.norm.bias": SHARD}}))
    with pytest.raises(ModelError, match=r"lacks model\.norm\.bias"):
        model_files.read(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_weights_without_a_needed_tensor_are_refused(tmp_path: Path, name: str) -> None:
    folder = models.write_folder(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"lack {re.escape(name)}"):
        model_files.read(folder)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "tiny", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    assert model_files.read(folder).tie_word_embeddings


def test_a_folder_without_a_chat_template(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text("{}")
    assert not model_files.read(folder).chat
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert model_files.read(folder).chat


def test_what_model_stands_for(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    embedded = model_files.resolve(Config(cache_dir=cache))
    assert (embedded.name, embedded.prepared, embedded.gguf) == ("SmolLM2-135M-Instruct", True, None)
    folder = models.write_folder(tmp_path / "tiny")
    given = model_files.resolve(Config(model=str(folder), cache_dir=cache))
    assert (given.name, given.prepared, given.folder) == ("tiny", False, folder)
    named = model_files.resolve(Config(model=str(folder), cache_dir=cache, served_model_name="mine"))
    assert named.name == "mine"


def test_a_changed_gguf_file_is_another_model(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    config = Config(model=str(file), cache_dir=str(tmp_path / "cache"))
    file.write_bytes(b"one")
    first = model_files.resolve(config)
    assert (first.name, first.gguf) == ("some", file)
    assert model_files.resolve(config) == first
    file.write_bytes(b"another")
    assert model_files.resolve(config).folder != first.folder


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "file.bin"])
def test_a_model_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.bin").touch()
    with pytest.raises(ModelError, match=f"model: .*{name} is not there; it must be embedded"):
        model_files.resolve(Config(model=str(tmp_path / name), cache_dir=str(tmp_path)))
