"""A step as the fields of vLLM's `SchedulerOutput`, for single-step mode."""

from typing import Any

import msgspec

from ranks.batch import Batch
from ranks.planning import Step
from ranks.request import Request


def render(step: Step, batch: Batch, before: frozenset[int], finished: list[Request]) -> dict[str, Any]:
    """The fields, named as vLLM names them. `before` has the numbers of requests that ran in the step before."""
    rows = step.rows.tolist()
    counts = dict(zip(rows, step.counts.tolist(), strict=True))
    names = {row: batch.request(row).name for row in rows}
    numbers = {row: batch.request(row).number for row in rows}
    requests = [entry.request for entry in step.entered]
    entered = {request.row for request in requests}
    new = [request for request in requests if not request.num_preemptions]
    resumed = [request.row for request in requests if request.num_preemptions]
    cached = [row for row in rows if row not in entered] + resumed
    given: dict[int, list[int]] = {row: batch.blocks_of(row) for row in resumed}
    for row, block in zip(step.block_rows.tolist(), step.block_ids, strict=True):
        given.setdefault(row, []).append(block)
    return {
        "scheduled_new_reqs": [
            {
                "req_id": names[request.row],
                "prompt_token_ids": request.tokens[: request.num_prompt].tolist(),
                "block_ids": [batch.blocks_of(request.row)],
                "num_computed_tokens": int(batch.computed[request.row]) - counts[request.row],
                "mm_features": [msgspec.structs.asdict(feature) for feature in request.features],
            }
            for request in new
        ],
        "scheduled_cached_reqs": {
            "req_ids": [names[row] for row in cached],
            "resumed_req_ids": sorted(names[row] for row in resumed),
            "new_token_ids": [],
            "all_token_ids": {
                names[row]: batch.tokens_of(row).tolist() for row in cached if numbers[row] not in before
            },
            "new_block_ids": [[given[row]] if row in given else None for row in cached],
            "num_computed_tokens": [int(batch.computed[row]) - counts[row] for row in cached],
            "num_output_tokens": [int(batch.known[row]) - batch.request(row).num_prompt for row in cached],
        },
        "num_scheduled_tokens": {names[row]: counts[row] for row in rows},
        "total_num_scheduled_tokens": step.num_tokens,
        "scheduled_spec_decode_tokens": {names[row]: drafts for row, drafts in step.drafts.items()},
        "scheduled_encoder_inputs": {},
        "finished_req_ids": sorted(request.name for request in finished),
        "preempted_req_ids": sorted(request.name for request in step.preempted),
        "free_encoder_mm_hashes": [],
    }
