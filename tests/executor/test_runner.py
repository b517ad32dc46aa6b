"""The runner's promises besides model and sampling: memory, places, and that nothing is compiled while serving."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bus import log
from bus.config import Config, ConfigError
from bus.messages import Sampling
from bus.model_files import ModelError
from executor import device
from executor.kv_layout import KvLayout, memory_fraction
from executor.placement import SETUP_ROWS, SETUP_TOKENS, Placement
from executor.programs import bucket, sizes_up_to
from executor.runner import Runner
from executor.step import RowSetup
from tests.executor.driving import GREEDY, Driver
from tests.models import write_folder


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of all events in which JAX compiled, or loaded from its cache, anything."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


FEATURES = [
    GREEDY,
    Sampling(seed=1, max_tokens=9, top_p=0.9, min_p=0.1, top_k=9),
    Sampling(seed=2, max_tokens=9, presence_penalty=1.0, min_tokens=5, eos_token_id=2),
    Sampling(seed=3, max_tokens=9, logprobs=-1, logit_bias={5: 1.0}, prompt_logprobs=2),
    Sampling(seed=4, max_tokens=9, logprobs=3, temperature=0.0, allowed_token_ids=[5, 6]),
    Sampling(seed=5, max_tokens=9, bad_words_token_ids=[[5, 6], [7]], prompt_logprobs=-1),
]


def test_nothing_is_compiled_after_the_warm_up(tiny_model: Path, engine_cache: Path) -> None:
    """Limits that are no powers of two; steps up to the largest, and rows that ask for everything."""
    driver = Driver(tiny_model, engine_cache, ranks=2, max_num_seqs=2, max_num_batched_tokens=20, num_blocks=100)
    done: list[tuple[str, int, int]] = []
    driver.runner.warm_up(lambda *progress: done.append(progress))
    assert done[-1][1] == done[-1][2] > 0
    random = np.random.default_rng(0)
    rows = [(rank, row) for rank in range(2) for row in range(2)]
    with compilations() as events:
        for turn in range(len(FEATURES)):
            for number, where in enumerate(rows):
                prompt = random.integers(3, 259, int(random.integers(25, 60))).tolist()
                driver.start(where, prompt, FEATURES[(number + turn) % len(FEATURES)])
            driver.step({(0, 0): 11, (0, 1): 9, (1, 1): 20})  # all that a rank may
            for count in (1, 2, 3, 4, 3, 2, 1):
                for most in (12, 1):
                    step = {where: min(most, driver.left(where)) for where in rows[:count]}
                    masked = [where for where in rows[:count:2] if step[where] == driver.left(where)]
                    drawn = driver.step(step, {where: [[5, 6]] for where in masked})
                    assert all(drawn[where] in (5, 6) for where in masked)
    assert events == []


START = """
import sys
from pathlib import Path
from bus import log
from tests.executor.driving import Driver

log.configure("executor", 0, 1, "info")
driver = Driver(Path(sys.argv[1]), Path(sys.argv[2]), ranks=1, max_num_seqs=1, max_num_batched_tokens=16)
driver.runner.warm_up(lambda *_: None)
driver.start((0, 0), [5, 6, 7])
driver.generate((0, 0), 3)
"""


def test_the_second_start_takes_all_programs_from_the_cache(
    tiny_model: Path, engine_cache: Path, tmp_path: Path
) -> None:
    kernels = engine_cache / "kernels"  # which take a C++ compiler seconds, and are no programs
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels)
    compiled = []
    for _ in range(2):
        arguments = [sys.executable, "-c", START, str(tiny_model), str(tmp_path)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=100)
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        assert "a program was compiled while serving" not in [line["event"] for line in lines]
        (ready,) = (line for line in lines if line["event"] == "programs ready")
        compiled.append(ready["compiled"])
    assert compiled[0] > 5
    assert compiled[1] == 0


def test_a_program_that_was_not_compiled_ahead_is_an_error_in_the_log(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver(tiny_model, tmp_path, ranks=1, max_num_seqs=1, max_num_batched_tokens=16)
    log.configure("executor", 0, 1, "info")
    programs = driver.runner._steps.programs
    programs.compile_all(lambda *_: None)  # nothing was traced, so nothing is ready
    driver.start((0, 0), [5])
    assert driver.prefill((0, 0)) >= 0
    shown = capsys.readouterr().err
    assert "a program was compiled while serving" in shown
    assert "decode layers" in shown


# Memory


def layout(memory_bytes: int = 0, **settings: Any) -> KvLayout:
    defaults: dict[str, Any] = {"ranks": 3, "max_num_seqs": 2, "block_size": 16}
    return KvLayout(Config(**defaults | settings), 64, block_bytes=100, memory_bytes=memory_bytes)


def test_blocks_are_shared_out_with_the_remainder_to_the_first_ranks() -> None:
    shared = layout(num_blocks=17)
    assert [shared.blocks_of_rank(rank) for rank in range(3)] == [6, 6, 5]
    assert shared.shard_blocks == 18


def test_the_pool_follows_from_the_memory_and_from_what_rows_can_use() -> None:
    assert layout(memory_bytes=1800).num_blocks == 18
    assert layout(memory_bytes=10**9).num_blocks == 3 * 2 * 4


def test_a_tpus_memory_is_for_the_pool_and_a_cpus_for_others_too() -> None:
    assert memory_fraction(Config(), "tpu") >= 0.85
    assert memory_fraction(Config(), "cpu") <= 0.2
    assert memory_fraction(Config(kv_memory_fraction=0.3), "tpu") == 0.3


def test_a_pool_that_holds_no_whole_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="11 KV blocks of 16 tokens for 3 ranks do not hold a sequence"):
        layout(num_blocks=11)
    with pytest.raises(ConfigError, match="raise num_blocks or kv_memory_fraction"):
        layout(memory_bytes=1100)


def test_ranks_have_blocks_of_their_own_and_none_the_spare_one() -> None:
    for shards in (1, 2):
        config = Config(ranks=3, max_num_seqs=2, block_size=16, num_blocks=14)
        made = KvLayout(config, 64, 1, 0, shards)
        owned: dict[int, list[int]] = {0: [], 1: []}
        for rank in range(3):
            blocks = made.blocks_of_rank(rank)
            first = made.first_blocks[rank]
            owned[rank // (3 if shards == 1 else 2)] += range(first, first + blocks)
        for blocks in owned.values():
            assert sorted(blocks) == list(range(1, len(blocks) + 1))
            assert len(blocks) < made.shard_blocks


def test_the_memory_to_share_is_the_same_at_each_start() -> None:
    cpu = jax.devices("cpu")[0]
    before = device.memory_for_sharing([cpu])
    taken = np.ones(2**26, np.uint8)  # what is free now is less by as much
    assert device.memory_for_sharing([cpu]) == before
    assert taken.nbytes < before <= int(Path("/proc/meminfo").read_text().split()[1]) * 1024


def test_a_context_longer_than_the_models_is_refused(tiny_model: Path, engine_cache: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 2000 is not allowed; the model takes at most 1024"):
        Driver(tiny_model, engine_cache, max_model_len=2000)


# Places


def test_setups_larger_than_a_piece_are_written_whole() -> None:
    placement = Placement(shards=2, ranks_per_shard=1, max_num_seqs=40)
    random = np.random.default_rng(0)
    setups = [
        RowSetup(row, int(row), random.integers(0, 99, 60 * (row % 3) + 1).astype(np.int32), 1, GREEDY)
        for row in range(60)
    ]
    history = np.zeros((2, 41, 300), np.int64)
    rows: list[list[int]] = [[], []]
    pieces = list(placement.setup_pieces(setups))
    assert len(pieces) == max(-(-40 // SETUP_ROWS), -(-sum(s.tokens.size for s in setups[:40]) // SETUP_TOKENS))
    for piece in pieces:
        for shard in range(2):
            history[shard, piece.tokens[shard, :, 0], piece.tokens[shard, :, 1]] = piece.tokens[shard, :, 2]
            rows[shard] += piece.rows[shard].tolist()
    expected = np.zeros_like(history)
    for setup in setups:
        expected[setup.row // 40, setup.row % 40, setup.start : setup.start + setup.tokens.size] = setup.tokens
    assert (history[:, :40] == expected[:, :40]).all()
    assert sorted(row for row in rows[0] if row != 40) == list(range(40))
    assert sorted(row for row in rows[1] if row != 40) == list(range(20))


def test_buckets() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(6) == [1, 2, 4, 6]
    assert sizes_up_to(2000, 16) == [16, 32, 64, 128, 256, 512, 1024, 2000]
    assert [bucket([1, 2, 4, 6], size) for size in (1, 3, 6)] == [1, 4, 6]
    with pytest.raises(ValueError, match="7 is more than 6"):
        bucket([1, 2, 4, 6], 7)


# Weights


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("missing", r"lack model.layers.1.mlp.up_proj.weight; the folder is not complete"),
        ("unexpected", r"hold model.layers.0.self_attn.q_proj.bias, which LlamaForCausalLM does not have"),
        ("shape", r"model.norm.weight has shape \(63,\); config.json makes it \(64,\)"),
        ("untied", r"lm_head.weight is not model.embed_tokens.weight, but config.json ties them"),
    ],
)
def test_weights_that_are_not_the_models_are_named(
    fault: str, sentence: str, tmp_path: Path, engine_cache: Path
) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    match fault:
        case "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "unexpected":
            tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        case "shape":
            tensors["model.norm.weight"] = np.ones(63, np.float32)
        case _:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=sentence):
        Runner(Config(cache_dir=str(engine_cache), num_blocks=300), folder, lambda *_: None)


def test_loading_tells_how_far_it_is(tiny_model: Path, engine_cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    Runner(Config(cache_dir=str(engine_cache), num_blocks=300), tiny_model, lambda *progress: told.append(progress))
    assert {what for what, _, _ in told} == {"loading weights"}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2]


def test_bfloat16_weights_serve_as_float32_and_the_other_way_round(tiny_model: Path, engine_cache: Path) -> None:
    outputs = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(tiny_model, engine_cache, dtype=dtype)
        driver.start((0, 0), list(range(3, 40)), Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=-1))
        outputs.append(driver.logits((0, 0)))
    assert 0 < np.abs(outputs[0] - outputs[1]).max() < 0.5
