"""A small model's steps, compiled by the TPU's compiler for a TPU that is not there."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs

from bus import model_files
from bus.config import Config, ConfigError
from executor import aot, hlo, plan
from executor import mesh as meshes
from executor.aot import Target
from executor.programs import Key
from tests.models import write_folder

# Heads as the embedded model has them: three KV heads of size 64, which the kernel refuses as they are. Large enough
# that weights stand out from all else, and a KV cache that the compiler cannot keep in the chip's fast memory.
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 24576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 32768,
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
def test_a_decode_step_compiles_and_accesses_little_more_than_it_must(target: Target, decode: aot.Step) -> None:
    assert {program.key.name for program in decode.programs} == {"decode enter", "decode layers", "head", "greedy"}
    assert target.bytes_accessed(decode) <= 1.15 * decode.bytes_minimum
    assert decode.bytes_moved <= 1.15 * decode.bytes_minimum
    assert decode.memory_bytes < target.chip.memory_bytes


def assert_nothing_is_copied_or_exchanged(target: Target, text: str, smallest_weight: int) -> None:
    """Neither weights of at least that many bytes, nor the KV cache.

    What begins to be copied to fast memory (copy-start) stays as it is; other copies of weights lay them out anew.
    """
    cache = target.kv_bytes // target.facts.num_layers
    assert hlo.moved(text, ("copy", "transpose"), smallest_weight) == []
    assert hlo.moved(text, ("copy-start",), cache) == []
    assert hlo.moved(text, COLLECTIVES, smallest_weight) == []


@pytest.mark.timeout(400)
def test_neither_weights_nor_the_kv_cache_are_copied_or_exchanged(target: Target, decode: aot.Step) -> None:
    head = 32768 // 2 * 640 * 2
    for program in decode.programs:
        is_layers = program.key.name == "decode layers"
        assert_nothing_is_copied_or_exchanged(target, program.text, 576 * 2 * 64 * 2 // 2 if is_layers else head)
        assert not is_layers or program.donated_bytes >= target.kv_bytes, "the KV cache is updated in place"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "smallest_weight"), [("Gemma-2-2B", 2304 * 1024 * 2), ("Qwen3-30B-A3B", 2048 * 512 * 2)]
)
def test_wide_heads_and_experts_are_compiled_for(name: str, smallest_weight: int) -> None:
    """Layers of the real models: heads of 256, of which the kernel takes one at a time, and a mixture."""
    facts = model_files.outline(CONFIGS / name)
    facts = replace(facts, num_layers=1, windows=facts.windows[:1])
    devices = aot.devices_of("v5e:2x2")
    target = Target(aot.settings_for(facts, len(devices), 1), facts, devices)
    target.steps.trace_step("decode", 8)
    text = target.steps.programs.compile_one(Key("decode layers", 8)).as_text()
    assert_nothing_is_copied_or_exchanged(target, text, smallest_weight)


@pytest.mark.timeout(400)
def test_weights_of_8_bits_are_half_the_bytes(target: Target, decode: aot.Step) -> None:
    config = structs.replace(target.config, quantization="int8")
    small = Target(config, target.facts, aot.devices_of("v6e:2x2")).compile("decode", 8)
    assert small.bytes_moved <= 1.15 * small.bytes_minimum
    assert small.bytes_moved < 0.6 * decode.bytes_moved


@pytest.mark.timeout(400)
def test_what_the_kernel_reads_is_counted_apart(decode: aot.Step) -> None:
    sequences, positions, layers, kv_heads, width, item = 8, 1024, 2, 2, 128, 2
    assert decode.kernel_kv_bytes == sequences * positions * layers * 2 * kv_heads * width * item


TEXT = """
%fused (param_0: bf16[64,8]) -> bf16[64,8] {
  ROOT %copy.9 = bf16[64,8]{1,0} copy(%param_0)
}

%turn.1 (turned: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %turned = (s32[], bf16[64,8]{1,0}) parameter(0)
  %value = bf16[64,8]{1,0} get-tuple-element(%turned), index=1
  ROOT %negate = bf16[64,8]{1,0} negate(%value)
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
  %while.1 = (s32[], bf16[64,8]{1,0}) while(%tuple.1), condition=%turning, body=%turn.1
  ROOT %tuple = (bf16[64,8]{1,0}, f32[4]{0}) tuple(%ragged_paged_attention_kernel.1, %gather_fusion)
}
"""


def test_the_traffic_of_a_program_is_read_from_its_text() -> None:
    prefetched, sliced, used, scattered, gathered = 1024, 256, 16, (16 + 16) + 16, 16 + 16
    other_kernel, turn = 1024 + 16, 1024 + 1024
    assert hlo.memory_traffic(TEXT) == prefetched + sliced + used + scattered + gathered + other_kernel + turn
    assert len(hlo.moved(TEXT, ("copy", "copy-start"), 1024)) == 2
    assert hlo.moved(TEXT, ("copy", "copy-start"), 1025) == []


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


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5e:2x4", "v5e:4x4"])
def test_every_mesh_that_fits_a_slice_is_laid_out_on_it(topology: str) -> None:
    devices = aot.devices_of(topology)
    for data, model in product(range(1, len(devices) + 1), repeat=2):
        if data * model <= len(devices):
            used = devices[: data * model]
            laid_out = meshes.of(used, data, model).devices
            assert laid_out.shape == (data, model)
            assert sorted(device.id for device in laid_out.flat) == sorted(device.id for device in used)
    for one, other in meshes.of(devices, len(devices) // 2, 2).devices:
        assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1, "a shard's chips are apart"
