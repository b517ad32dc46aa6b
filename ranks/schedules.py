"""A planned step as the executor is told of it."""

import numpy as np

from bus.messages import EMPTY, ContinueRow, Ints, NewRow, PartialSchedule, ResumeRow
from bus.wire import pack_ints
from ranks.batch import Batch, Rows
from ranks.logprobs import sampling_for_row
from ranks.planning import Step
from ranks.request import Request, Session


def again(plan: Step, more: bool) -> PartialSchedule:
    """A step of the same rows as the one before, one token each."""
    blocks = (pack_ints(plan.block_rows), pack_ints(plan.block_ids)) if plan.block_ids else (EMPTY, EMPTY)
    return PartialSchedule(step=plan.number, again=True, block_rows=blocks[0], block_ids=blocks[1], more=more)


def of_plan(plan: Step, batch: Batch, *, with_drafts: bool, more: bool) -> PartialSchedule:
    """Any step. `with_drafts` sends the draft tokens along; if not so, the executor draws them itself."""
    new, resumed, continued = [], [], []
    for request, blocks, cached, _ in plan.entered:
        session = request.session
        if session is not None and session.row == request.row:
            continued.append(_continue_row(request, session))
        elif request.num_preemptions or request.tokens.size > request.num_prompt:
            resumed.append(_resume_row(request, pack_ints(blocks), cached))
        else:
            new.append(_new_row(request, pack_ints(blocks), cached))
    constrained = batch.constrained[plan.rows]
    mask_rows, masks = EMPTY, EMPTY
    if np.count_nonzero(constrained):
        mask_rows, masks = _masks(plan, batch, plan.rows[constrained & plan.samples])
    return PartialSchedule(
        step=plan.number,
        rows=pack_ints(plan.rows),
        num_tokens=pack_ints(plan.counts) if np.count_nonzero(plan.counts != 1) else EMPTY,
        num_drafts=pack_ints(plan.num_drafts) if plan.drafts else EMPTY,
        drafts=pack_ints(plan.tried) if plan.drafts and with_drafts else EMPTY,
        block_rows=pack_ints(plan.block_rows) if plan.block_ids else EMPTY,
        block_ids=pack_ints(plan.block_ids) if plan.block_ids else EMPTY,
        new=new,
        resumed=resumed,
        continued=continued,
        more=more,
        mask_rows=mask_rows,
        masks=masks,
    )


def _masks(plan: Step, batch: Batch, rows: Rows) -> tuple[Ints, Ints]:
    """Those of `rows`, which draw by a grammar, one for each token that they draw, and what that may be."""
    named: list[int] = []
    masks: list[bytes] = []
    for row in rows.tolist():
        matcher = batch.request(row).matcher
        assert matcher is not None
        own = matcher.masks(plan.drafts.get(row, []))
        named += [row] * len(own)
        masks += own
    return pack_ints(named), memoryview(b"".join(masks))


def _new_row(request: Request, blocks: Ints, cached: int) -> NewRow:
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        prompt_token_ids=pack_ints(request.tokens),
        block_ids=blocks,
        sampling=request.sampling,
        num_computed_tokens=cached,
        adapter=request.adapter,
    )


def _resume_row(request: Request, blocks: Ints, cached: int) -> ResumeRow:
    return ResumeRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=pack_ints(request.tokens),
        num_output_tokens=request.tokens.size - request.num_prompt,
        block_ids=blocks,
        sampling=sampling_for_row(request.sampling, request.prompt_report),
        num_computed_tokens=cached,
        adapter=request.adapter,
    )


def _continue_row(request: Request, session: Session) -> ContinueRow:
    return ContinueRow(
        row=request.row,
        token_ids=pack_ints(request.tokens[session.row_kept :]),
        drop=session.row_tokens - session.row_kept,
        sampling=request.sampling,
    )
