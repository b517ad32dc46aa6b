"""vLLM's own CPU backend on the same prompts, eager: ``python -m bench.vllm_cpu MODEL_FOLDER DTYPE SEQUENCES…``.

Prints, as JSON, decode tokens per second by number of sequences, and prefill tokens per second.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["VLLM_PLUGINS"] = ""  # its own platform, not ours
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bench.workload import OUTPUT, PROMPT, decode_rate, prompt


def run(engine: Any, name: str, count: int, max_tokens: int) -> tuple[float, list[list[float]]]:
    """When `count` requests were sent, and when each of their tokens came."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    times: dict[str, list[float]] = {f"{name}-{number}": [] for number in range(count)}
    begin = time.perf_counter()
    for number, request in enumerate(times):
        engine.add_request(request, {"prompt_token_ids": prompt(name, number)}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times[output.request_id] += [now] * len(output.outputs[0].token_ids)
    return begin, list(times.values())


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    model, dtype, *counts = sys.argv[1:]
    arguments = EngineArgs(
        model=model, dtype=dtype, enforce_eager=True, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048
    )
    engine = LLMEngine.from_engine_args(arguments)
    run(engine, "warm", 2, 4)
    decode = {count: decode_rate(run(engine, f"decode{count}", int(count), OUTPUT)[1]) for count in counts}
    begin, times = run(engine, "prefill", 16, 1)
    prefill = 16 * PROMPT / (max(stamps[0] for stamps in times) - begin)
    print(json.dumps({"decode_tok_s": decode, "prefill_tok_s": prefill}))


if __name__ == "__main__":
    main()
