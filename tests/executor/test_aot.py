"""A small model's steps, compiled by the TPU's compiler for a TPU that is not there."""

from pathlib import Path

import pytest

from bus import model_files
from bus.config import Config, ConfigError
from executor import aot, plan
from executor.aot import Target
from tests.models import write_folder

# Heads as the embedded model has them: three KV heads of size 64, which the kernel refuses as they are. Large enough
# that weights stand out from all else, and a KV cache that the compiler cannot keep in the chip's fast memory.
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
}
CONFIGS = Path(__file__).parents[2] / "bench" / "configs"
COLLECTIVES = ("all-gather", "all-gather-start", "all-to-all", "collective-permute", "collective-permute-start")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_folder(tmp_path_factory.mktemp("aot") / "model", **SHAPE)
    settings = {"ranks": 2, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 16384}
    config = Config(**settings, tensor_parallel=2, max_model_len=1024)
    return Target(config, model_files.outline(folder), aot.devices_of("v6e:2x2"))


@pytest.fixture(scope="module")
def decode(target: Target) -> aot.Step:
    return target.compile("decode", 8)


@pytest.mark.timeout(400)
def test_a_decode_step_compiles_and_moves_little_more_than_it_must(target: Target, decode: aot.Step) -> None:
    assert {program.name for program in decode.programs} == {"decode enter 8", "decode layers 8", "head 8", "greedy 8"}
    enter, *others = decode.programs
    table = 4096 // 2 * 576 * 2  # so small a table is copied whole to where it is looked up
    assert enter.bytes_accessed <= 1.1 * table
    assert sum(program.bytes_accessed for program in others) <= 1.15 * decode.bytes_minimum
    assert decode.memory_bytes < target.chip.memory_bytes


@pytest.mark.timeout(400)
def test_neither_weights_nor_the_kv_cache_are_copied_or_exchanged(target: Target, decode: aot.Step) -> None:
    (layers,) = (program for program in decode.programs if program.name.startswith("decode layers"))
    assert layers.donated_bytes >= target.kv_bytes, "the KV cache is updated in place"
    cache = target.kv_bytes // len(target.steps.kv[0])
    smallest_weight = 576 * 2 * 64 * 2 // 2  # of a layer's matrices, on one device, in bytes
    for program in decode.programs:
        assert aot.moved(program.hlo, ("copy", "copy-start", "transpose"), cache) == []
        assert aot.moved(program.hlo, COLLECTIVES, smallest_weight) == []


@pytest.mark.timeout(400)
def test_what_the_kernel_reads_is_counted_apart(decode: aot.Step) -> None:
    sequences, positions, layers, kv_heads, width, item = 8, 1024, 2, 2, 128, 2
    assert decode.kernel_kv_bytes == sequences * positions * layers * 2 * kv_heads * width * item


TEXT = """
%fused (param_0: bf16[64,8]) -> bf16[64,8] {
  ROOT %copy.9 = bf16[64,8]{1,0} copy(%param_0)
}

ENTRY %main {
  %param.1 = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %param.2 = f32[4]{0} parameter(1)
  %copy-start = (bf16[64,8]{1,0:T(8,128)S(1)}, bf16[64,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%param.1), x={}
  %copy-done = bf16[64,8]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %slice-start = ((s8[1024]{0}), s8[256]{0:S(1)}, s32[]) slice-start(%param.1), slice={[0:256]}
  %slice-done = s8[256]{0:S(1)} slice-done(%slice-start)
  %fusion.1 = f32[4]{0:S(1)} fusion(%copy-done, %param.2), kind=kLoop, calls=%fused
  %scatter_fusion = bf16[64,8]{1,0} fusion(%param.1, %fusion.1, %param.2), kind=kCustom
  %gather_fusion = f32[4]{0} fusion(%param.1, %fusion.1), kind=kCustom
  %ragged_paged_attention_kernel.1 = bf16[64,8]{1,0} custom-call(%param.1), custom_call_target="tpu_custom_call"
  %ragged_dot = f32[4]{0} custom-call(%param.1), custom_call_target="tpu_custom_call"
  ROOT %tuple = (bf16[64,8]{1,0}, f32[4]{0}) tuple(%ragged_paged_attention_kernel.1, %gather_fusion)
}
"""


def test_the_traffic_of_a_program_is_read_from_its_text() -> None:
    prefetched, sliced, used, scattered, gathered = 1024, 256, 16, (16 + 16) + 16, 16 + 16
    other_kernel = 1024 + 16
    assert aot.memory_traffic(TEXT) == prefetched + sliced + used + scattered + gathered + other_kernel
    assert len(aot.moved(TEXT, ("copy", "copy-start"), 1024)) == 2
    assert aot.moved(TEXT, ("copy", "copy-start"), 1025) == []


def test_what_does_not_fit_is_named() -> None:
    devices = aot.devices_of("v5e:2x2")
    llama, mixture = (model_files.outline(CONFIGS / name) for name in ("Llama-3-8B", "Qwen3-30B-A3B"))
    with pytest.raises(
        ConfigError, match=r"the weights take 16\.\d GiB of each device's 16 GiB; raise tensor_parallel"
    ):
        Target(Config(ranks=4), mixture, devices)
    with pytest.raises(ConfigError, match="do not hold a sequence of max_model_len 8192"):
        Target(Config(ranks=4, kv_memory_fraction=0.1), llama, devices)
    with pytest.raises(ConfigError, match="topology: v6e:9x9 cannot be compiled for"):
        aot.devices_of("v6e:9x9")


def test_the_models_of_make_aot_can_be_served() -> None:
    architectures = {model_files.outline(folder).architecture for folder in CONFIGS.iterdir()}
    assert architectures == set(model_files.ARCHITECTURES)


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "x"]) == 2
    assert plan.main(["--help"]) == 0
    assert "--topology v6e:2x2" in capsys.readouterr().out
