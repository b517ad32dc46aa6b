"""vLLM's `SchedulerOutput` as plain data, for single-step mode."""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput


def render(output: SchedulerOutput, name: Callable[[str], str]) -> dict[str, Any]:
    """The fields of a schedule, named as vLLM names them; `name` turns its request ids into ours."""
    cached = output.scheduled_cached_reqs
    return {
        "scheduled_new_reqs": [
            {
                "req_id": name(data.req_id),
                "prompt_token_ids": list(data.prompt_token_ids),
                "block_ids": [list(group) for group in data.block_ids],
                "num_computed_tokens": data.num_computed_tokens,
            }
            for data in output.scheduled_new_reqs
        ],
        "scheduled_cached_reqs": {
            "req_ids": [name(request_id) for request_id in cached.req_ids],
            "resumed_req_ids": sorted(name(request_id) for request_id in cached.resumed_req_ids),
            "new_token_ids": cached.new_token_ids,
            "all_token_ids": {name(request_id): list(tokens) for request_id, tokens in cached.all_token_ids.items()},
            "new_block_ids": [blocks and [list(group) for group in blocks] for blocks in cached.new_block_ids],
            "num_computed_tokens": cached.num_computed_tokens,
            "num_output_tokens": cached.num_output_tokens,
        },
        "num_scheduled_tokens": {name(request_id): n for request_id, n in output.num_scheduled_tokens.items()},
        "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
        "scheduled_spec_decode_tokens": {
            name(request_id): list(tokens) for request_id, tokens in output.scheduled_spec_decode_tokens.items()
        },
        "scheduled_encoder_inputs": {
            name(request_id): list(inputs) for request_id, inputs in output.scheduled_encoder_inputs.items()
        },
        "finished_req_ids": sorted(name(request_id) for request_id in output.finished_req_ids),
        "preempted_req_ids": sorted(name(request_id) for request_id in output.preempted_req_ids or ()),
        "free_encoder_mm_hashes": list(output.free_encoder_mm_hashes),
    }
