"""The peers on the same workload: vLLM's Scheduler in process, tpu-inference's DPScheduler. ``python -m bench.peers``.

A step is schedule() and update_from_output() with every request decoding; each gets token 100. Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import cloudpickle
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
PROMPT = 128
BLOCKS_PER_RANK = 20_000
SIZES = ((2, 16), (2, 64), (2, 256), (2, 1024), (8, 32))
CHURN_TOKENS = 20
"""Output of each request when 5% of them end in each step."""

hash_function = get_hash_fn_by_name("sha256")
init_none_hash(hash_function)
hasher = get_request_block_hasher(BLOCK, hash_function)


def config_for(model: Path, max_num_seqs: int) -> Any:
    arguments = EngineArgs(
        model=str(model),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        enable_prefix_caching=True,
        async_scheduling=False,
        block_size=BLOCK,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = 100_000
    return config


def kv_cache(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def new_request(number: int, max_tokens: int, prompt: int = PROMPT) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=[(7 * number + place) % 30_000 for place in range(prompt - number % BLOCK)],
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=hasher,
    )


def sampled(schedule: Any) -> ModelRunnerOutput:
    names = list(schedule.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[100]] * len(names),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def step_ms(scheduler: Any, steps: int, refill: Callable[[int], None] = lambda ended: None) -> dict[str, float]:
    """Figures of the steps of a scheduler whose requests have been added.

    `refill` adds as many requests as ended in a step. It is not in the times of the steps; the mean `with_adds` has it.
    """
    while scheduler.schedule_and_update_prefill():
        pass
    times, with_adds = [], []
    for number in range(steps + 20):
        begin = time.perf_counter()
        schedule = scheduler.schedule()
        scheduled = time.perf_counter()
        output = sampled(schedule)
        given = time.perf_counter()
        outputs = scheduler.update_from_output(schedule, output)
        end = time.perf_counter()
        ended = sum(item.finish_reason is not None for group in outputs.values() for item in group.outputs)
        before = time.perf_counter()
        refill(ended)
        refilled = time.perf_counter()
        if number >= 20:
            times.append((scheduled - begin + end - given) * 1e3)
            with_adds.append(times[-1] + (refilled - before) * 1e3)
    times.sort()
    return {
        "mean": statistics.fmean(times),
        "with_adds": statistics.fmean(with_adds),
        "median": statistics.median(times),
        "p99": times[int(0.99 * (len(times) - 1))],
    }


class Driven:
    """A peer's scheduler with the prefill step that `step_ms` begins with."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule_and_update_prefill(self) -> bool:
        schedule = self._scheduler.schedule()
        self._scheduler.update_from_output(schedule, sampled(schedule))
        return bool(schedule.scheduled_new_reqs)


def vllm_scheduler(model: Path, count: int) -> Driven:
    config = config_for(model, count)
    manager = StructuredOutputManager(config)
    return Driven(
        Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache(BLOCKS_PER_RANK),
            log_stats=True,
            structured_output_manager=manager,
            block_size=BLOCK,
        )
    )


def dp_scheduler(model: Path, wheel: Path, ranks: int, count: int) -> Driven:
    """tpu-inference's scheduler, without the package's __init__ and `utils`, which want a TPU."""
    if "tpu_inference" not in sys.modules:
        package = types.ModuleType("tpu_inference")
        package.__path__ = [str(wheel / "tpu_inference")]
        utils = types.ModuleType("tpu_inference.utils")
        utils.time_function = lambda function: function  # type: ignore[attr-defined]
        sys.modules |= {"tpu_inference": package, "tpu_inference.utils": utils}
    from tpu_inference.core.sched.dp_scheduler import DPScheduler

    config = config_for(model, count)
    config.scheduler_config._original_scheduler_cls = Scheduler
    object.__setattr__(config, "sharding_config", types.SimpleNamespace(total_dp_size=ranks))
    manager = StructuredOutputManager(config)
    return Driven(
        DPScheduler(
            vllm_config=config,
            kv_cache_config=kv_cache(BLOCKS_PER_RANK * ranks),
            structured_output_manager=manager,
            block_size=BLOCK,
            log_stats=True,
        )
    )


def measure_dp(model: Path, wheel: Path, steps: int) -> Iterator[tuple[str, Any]]:
    for ranks, count in SIZES:
        scheduler = dp_scheduler(model, wheel, ranks, count)
        begin = time.perf_counter()
        for number in range(ranks * count):
            scheduler.add_request(new_request(number, 2000))
        add_us = (time.perf_counter() - begin) / (ranks * count) * 1e6
        figures = step_ms(scheduler, steps if count < 1024 else steps // 3)
        schedule = scheduler.schedule()
        output = sampled(schedule)
        scheduler.update_from_output(schedule, output)
        size = {"down": len(cloudpickle.dumps(schedule)) / ranks, "up": len(cloudpickle.dumps(output)) / ranks}
        scheduler.shutdown()
        yield f"{ranks}x{count}", figures | {"add_us": add_us, "wire_bytes_per_rank_step": size}
    ranks, count = 2, 256
    scheduler = dp_scheduler(model, wheel, ranks, count)
    total = ranks * count
    for number in range(total):
        scheduler.add_request(new_request(number, 1 + number % CHURN_TOKENS))
    added = [total]

    def refill(ended: int) -> None:
        for _ in range(ended):
            scheduler.add_request(new_request(added[0], CHURN_TOKENS))
            added[0] += 1

    yield "churn 2x256", step_ms(scheduler, steps, refill)
    scheduler.shutdown()
    scheduler = dp_scheduler(model, wheel, 2, 16)
    begin = time.perf_counter()
    for number in range(16):
        scheduler.add_request(new_request(number, 10, 4096 - 16))
    yield "add 4096", {"add_us": (time.perf_counter() - begin) / 16 * 1e6}
    scheduler.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tpu-inference", type=Path, required=True, help="the unpacked wheel")
    parser.add_argument("--steps", type=int, default=96)
    arguments = parser.parse_args()
    vllm: dict[str, Any] = {}
    for count in (16, 64, 256):
        scheduler = vllm_scheduler(arguments.model, count)
        for number in range(count):
            scheduler.add_request(new_request(number, 2000))
        vllm[str(count)] = step_ms(scheduler, arguments.steps)
    dp = dict(measure_dp(arguments.model, arguments.tpu_inference, arguments.steps))
    print(json.dumps({"vllm": vllm, "dpscheduler": dp}))


if __name__ == "__main__":
    main()
