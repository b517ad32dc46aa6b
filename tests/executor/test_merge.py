"""Rows, merge and split against a plain model: what a rank thinks its rows hold is what the device computes with."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from bus.messages import ContinueRow, NewRow, PartialSchedule, Pooling, ResumeRow, Sampling
from bus.sampling import pooled
from bus.wire import pack_ints, unpack_floats, unpack_ints
from executor.checks import Limits, Refused
from executor.drafts import judge
from executor.merge import Merger
from executor.rows import Rows
from executor.split import split
from executor.step import Drafts, MergedStep, Part, Pooled, PromptLogprobs, SampledStep

RANKS, ROWS, MAX_LEN, BLOCK, VOCAB, BATCHED = 3, 4, 40, 8, 50, 30
DRAFTS = 3
LIMITS = Limits(ROWS, BATCHED, MAX_LEN, VOCAB, blocks_of_rank=[24, 23, 22], most_drafts=DRAFTS)
SAMPLING = Sampling(seed=1, max_tokens=100)


SLOTS = {"": 0, "A": 1, "B": 2}
"""Of adapters, and of none."""


def merger() -> Merger:
    return Merger(Rows(RANKS, ROWS, MAX_LEN, BLOCK), LIMITS, SLOTS)


def drawn(row: int, position: int) -> int:
    """The token the test's device draws for a position of a global row."""
    return (7 * row + 3 * position) % VOCAB


def masks_of(rank: int, rows: list[int], step: int) -> list[list[int]]:
    """Masks, one for each of `rows`, that no other rank or step has: two words, for 50 tokens."""
    return [[100 * step + place, rank * ROWS + row] for place, row in enumerate(rows)]


@dataclass
class RankRow:
    """A row as its rank sees it. A drawn token is known to the rank at once: it knows the device's rule."""

    tokens: list[int]
    output_from: int
    computed: int
    blocks: list[int]
    adapter: str = ""


@dataclass
class RankModel:
    """One rank: what its rows hold by the meaning of the messages, and how it makes schedules that are right."""

    rank: int
    rows: dict[int, RankRow] = field(default_factory=dict)
    step: int = 0
    last: list[int] = field(default_factory=list)
    """The rows of the last schedule, if all of them drew a token."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Those in the last schedule, by row."""

    def schedule(self, data: st.DataObject) -> PartialSchedule:
        draw = data.draw
        self.step += 1
        if self.last and draw(st.booleans()) and all(self.rows[row].computed < MAX_LEN for row in self.last):
            return self.schedule_again(data)
        new, resumed, continued = [], [], []
        touched: set[int] = set()
        for row in draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=2)):
            tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN - 4))
            computed = draw(st.integers(0, len(tokens) - 1))
            output = draw(st.integers(0, len(tokens) - 1))
            blocks = self.draw_blocks(data, computed)
            adapter = draw(st.sampled_from(sorted(SLOTS)))
            if row in self.rows and draw(st.booleans()):
                held = self.rows[row]
                drop = draw(st.integers(0, min(2, len(held.tokens) - 1)))
                tokens = tokens[: MAX_LEN - len(held.tokens) + drop]
                if not tokens:
                    continue
                continued.append(ContinueRow(row=row, token_ids=pack_ints(tokens), drop=drop, sampling=SAMPLING))
                held.tokens = held.tokens[: len(held.tokens) - drop]
                held.computed = min(held.computed, len(held.tokens))
                held.tokens += tokens
                held.output_from = len(held.tokens)
            elif draw(st.booleans()):
                new.append(
                    NewRow(
                        row=row,
                        request_id="r",
                        prompt_token_ids=pack_ints(tokens),
                        block_ids=pack_ints(blocks),
                        sampling=SAMPLING,
                        num_computed_tokens=computed,
                        adapter=adapter,
                    )
                )
                self.rows[row] = RankRow(tokens, len(tokens), computed, blocks, adapter)
            else:
                resumed.append(
                    ResumeRow(
                        row=row,
                        request_id="r",
                        token_ids=pack_ints(tokens),
                        num_output_tokens=output,
                        block_ids=pack_ints(blocks),
                        sampling=SAMPLING,
                        num_computed_tokens=computed,
                        adapter=adapter,
                    )
                )
                self.rows[row] = RankRow(tokens, len(tokens) - output, computed, blocks, adapter)
            touched.add(row)
        runnable = [row for row, held in self.rows.items() if held.computed < min(len(held.tokens), MAX_LEN)]
        if not runnable:
            return PartialSchedule(step=self.step, rows=pack_ints([]), new=new, resumed=resumed, continued=continued)
        rows = draw(st.lists(st.sampled_from(runnable), unique=True, min_size=1))
        counts, block_rows, block_ids, masked = [], [], [], []
        self.drafts = {}
        for row in rows:
            held = self.rows[row]
            most = min(len(held.tokens), MAX_LEN) - held.computed
            counts.append(draw(st.integers(1, min(most, BATCHED // len(rows)))))
            end = held.computed + counts[-1]
            room = min(DRAFTS, MAX_LEN - end, BATCHED // len(rows) - counts[-1])
            if end == len(held.tokens) and room > 0 and draw(st.booleans()):
                right = [drawn(self.rank * ROWS + row, position) for position in range(end, end + room)]
                wrong = draw(st.lists(st.integers(0, VOCAB - 1), max_size=room))
                self.drafts[row] = [*right[: room - len(wrong)], *wrong]
                counts[-1] += room
            while len(held.blocks) * BLOCK < held.computed + counts[-1]:
                block = draw(st.integers(0, LIMITS.blocks_of_rank[self.rank] - 1))
                block_rows.append(row)
                block_ids.append(block)
                held.blocks.append(block)
            if end == len(held.tokens) and draw(st.booleans()):
                masked += [row] * (1 + len(self.drafts.get(row, ())))
        return PartialSchedule(
            step=self.step,
            rows=pack_ints(rows),
            num_tokens=pack_ints([]) if set(counts) == {1} else pack_ints(counts),
            num_drafts=pack_ints([len(self.drafts.get(row, ())) for row in rows] if self.drafts else []),
            drafts=pack_ints([token for row in rows for token in self.drafts.get(row, ())]),
            block_rows=pack_ints(block_rows),
            block_ids=pack_ints(block_ids),
            new=new,
            resumed=resumed,
            continued=continued,
            mask_rows=pack_ints(masked),
            masks=pack_ints([word for mask in masks_of(self.rank, masked, self.step) for word in mask]),
        )

    def schedule_again(self, data: st.DataObject) -> PartialSchedule:
        self.drafts = {}
        block_rows, block_ids = [], []
        others = data.draw(st.lists(st.sampled_from(sorted(self.rows)), max_size=1))
        for row in [*self.last, *others]:
            held = self.rows[row]
            if len(held.blocks) * BLOCK < held.computed + 1 or (row in others and len(held.blocks) * BLOCK < MAX_LEN):
                block_rows.append(row)
                block_ids.append(data.draw(st.integers(0, LIMITS.blocks_of_rank[self.rank] - 1)))
                held.blocks.append(block_ids[-1])
        return PartialSchedule(
            step=self.step, again=True, block_rows=pack_ints(block_rows), block_ids=pack_ints(block_ids)
        )

    def draw_blocks(self, data: st.DataObject, computed: int) -> list[int]:
        count = min(-(-computed // BLOCK) + data.draw(st.integers(0, 1)), MAX_LEN // BLOCK)
        block = st.integers(0, LIMITS.blocks_of_rank[self.rank] - 1)
        return data.draw(st.lists(block, min_size=count, max_size=count))

    def expect(self, schedule: PartialSchedule) -> list[tuple[int, list[int], int, bool, list[int]]]:
        """What the device should see: (row, tokens that run, first position, samples, blocks up to the last one)."""
        seen = []
        rows = self.last if schedule.again else unpack_ints(schedule.rows).tolist()
        for row, count in zip(rows, unpack_ints(schedule.num_tokens).tolist() or [1] * len(rows), strict=True):
            held = self.rows[row]
            drafts = self.drafts.get(row, [])
            first, end = held.computed, held.computed + count
            samples = end == len(held.tokens) + len(drafts)
            seen.append((row, [*held.tokens, *drafts][first:end], first, samples, held.blocks[: -(-end // BLOCK)]))
            held.computed = end - len(drafts)
            if samples:
                for draft in (*drafts, None):
                    held.tokens.append(drawn(self.rank * ROWS + row, len(held.tokens)))
                    if held.tokens[-1] != draft:
                        break
                    held.computed += 1
        self.last = rows if all(samples for _, _, _, samples, _ in seen) else []
        return seen


class DeviceModel:
    """Keeps each row's history from the merged steps alone."""

    def __init__(self) -> None:
        self.history: dict[int, dict[int, int]] = {}
        self.slots: dict[int, int] = {}

    def run(self, step: MergedStep) -> tuple[list[list[int]], SampledStep]:
        for setup in step.setups:
            if setup.start == 0:
                self.history[setup.row] = {}
            self.history[setup.row].update(enumerate(setup.tokens.tolist(), setup.start))
            self.slots[setup.row] = setup.adapter
        drafts = step.drafts or Drafts(np.zeros_like(step.rows), np.zeros(0, np.int32))
        left = drafts.tokens.tolist()
        ran, indices, tokens = [], [], []
        entries = zip(step.rows, step.positions, step.num_tokens, step.samples, drafts.counts, strict=True)
        for index, (row, first, count, samples, tried) in enumerate(entries):
            end = first + count
            self.history[row].update((end - tried + place, left.pop(0)) for place in range(tried))
            ran.append([self.history[row][position] for position in range(first, end)])
            for position in range(end - tried, end + 1) if samples else ():
                self.history[row][position] = drawn(row, position)
                indices.append(index)
                tokens.append(drawn(row, position))
        judged = judge(step.rows.size, drafts, np.array(indices, np.int32), np.array(tokens, np.int32))
        return ran, SampledStep(judged.tokens, counts=judged.counts if step.drafts else None)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_ranks_schedule_is_what_the_device_computes(data: st.DataObject) -> None:
    subject, device = merger(), DeviceModel()
    ranks = [RankModel(rank) for rank in range(RANKS)]
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = [model for model in ranks if data.draw(st.booleans())]
        schedules = [model.schedule(data) for model in chosen]
        merged = subject.again([model.rank for model in chosen], schedules)
        parts: list[Part] = [] if merged is None else merged[0]
        expected: list[tuple[int, int, list[int], int, bool, list[int]]] = []
        masks = []
        for model, schedule in zip(chosen, schedules, strict=True):
            if not schedule.rows.nbytes and not schedule.again:
                assert merged is None
                with pytest.raises(Refused, match="no row runs"):
                    subject.apply(model.rank, schedule)
                model.rows.clear()
                model.last = []
                continue
            if merged is None:
                parts.append(subject.apply(model.rank, schedule))
            expected += [(model.rank, *item) for item in model.expect(schedule)]
            masks += masks_of(model.rank, unpack_ints(schedule.mask_rows).tolist(), model.step)
        if not parts:
            continue
        step = subject.merge(parts) if merged is None else merged[1]
        ran, sampled = device.run(step)
        assert step.ranks.tolist() == [item[0] for item in expected]
        assert step.rows.tolist() == [item[0] * ROWS + item[1] for item in expected]
        assert ran == [item[2] for item in expected]
        assert step.positions.tolist() == [item[3] for item in expected]
        assert step.samples.tolist() == [item[4] for item in expected]
        assert step.masks.words.tolist() == masks
        assert step.rows[step.masks.at].tolist() == [row for _, row in masks]
        assert step.block_tables.shape[1] == max(len(item[5]) for item in expected)
        for line, (rank, row, *_) in zip(step.block_tables, expected, strict=True):
            assert device.slots[rank * ROWS + row] == SLOTS[ranks[rank].rows[row].adapter]
            blocks = ranks[rank].rows[row].blocks[: line.size]
            assert line.tolist() == blocks + [0] * (line.size - len(blocks))
        for array in (step.ranks, step.rows, step.positions, step.num_tokens, step.block_tables):
            assert array.dtype == np.int32
        results = split(parts, sampled, ROWS)
        assert [token for result in results for token in unpack_ints(result.tokens)] == sampled.tokens.tolist()
        for result, part in zip(results, parts, strict=True):
            counts = unpack_ints(result.counts).tolist() or [1] * part.rows.size
            assert (len(counts), sum(counts)) == (part.rows.size, result.tokens.nbytes // 4)
        if sampled.counts is not None:
            subject.judged(parts, sampled.counts)


def new_row(
    row: int = 0, prompt: list[int] | None = None, blocks: list[int] | None = None, **changes: object
) -> NewRow:
    values = {
        "row": row,
        "request_id": "r",
        "prompt_token_ids": pack_ints([1, 2, 3] if prompt is None else prompt),
        "block_ids": pack_ints([0] if blocks is None else blocks),
        "sampling": SAMPLING,
    } | changes
    return NewRow(**values)  # type: ignore[arg-type]


def partial(step: int = 1, rows: list[int] | None = None, **changes: object) -> PartialSchedule:
    return PartialSchedule(step=step, rows=pack_ints([0] if rows is None else rows), **changes)  # type: ignore[arg-type]


THREE = pack_ints([3])
RESUMED = ResumeRow(
    row=0, request_id="r", token_ids=THREE, num_output_tokens=1, block_ids=pack_ints([0]), sampling=SAMPLING
)

ALL = pack_ints([-1, -1])
"""A mask that allows every token."""

REFUSED = {
    "no row runs": partial(rows=[]),
    "it runs the rows of the last schedule again, but there is none": partial(rows=[], again=True),
    "row 4 does not exist; rows are 0 to 3": partial(rows=[4]),
    "row -1 does not exist": partial(rows=[0, -1]),
    "row 9223372036854775807 does not exist": partial(new=[new_row(row=2**63 - 1)]),
    "row 1 runs twice": partial(rows=[1, 0, 1], new=[new_row(0), new_row(1)]),
    "5 rows are set up; there are 4": partial(new=[new_row(row) for row in (0, 1, 2, 3, 3)]),
    "row 2 is set up twice": partial(new=[new_row(2), new_row(2)]),
    "row 2 runs but was never set up": partial(rows=[0, 2], new=[new_row(0)]),
    "row 0 has 3 tokens but would be computed up to 4": partial(new=[new_row()], num_tokens=pack_ints([4])),
    "row 0 runs 0 tokens": partial(new=[new_row()], num_tokens=pack_ints([0])),
    "row 0 runs -2147483648 tokens": partial(new=[new_row()], num_tokens=pack_ints([-(2**31)])),
    "2147483647 tokens are more than max_num_batched_tokens 30": partial(
        new=[new_row()], num_tokens=pack_ints([2**31 - 1])
    ),
    "row 0 has 4 drafts; a row may have from 0 to 3": partial(
        new=[new_row()], num_tokens=pack_ints([7]), num_drafts=pack_ints([4]), drafts=pack_ints([1, 1, 1, 1])
    ),
    "there are 1 drafts; the counts of the rows make 2": partial(
        new=[new_row()], num_tokens=pack_ints([5]), num_drafts=pack_ints([2]), drafts=pack_ints([1])
    ),
    "row 0: token 50 does not exist": partial(
        new=[new_row()], num_tokens=pack_ints([4]), num_drafts=pack_ints([1]), drafts=pack_ints([50])
    ),
    "row 0 has drafts but does not run up to the last of them": partial(
        new=[new_row()], num_tokens=pack_ints([3]), num_drafts=pack_ints([1]), drafts=pack_ints([1])
    ),
    "row 0 has no block for position 0": partial(new=[new_row(blocks=[])]),
    "row 0 has no block for position 8": partial(new=[new_row(prompt=[1] * 9)], num_tokens=pack_ints([9])),
    "block 24 does not exist; blocks are 0 to 23": partial(new=[new_row(blocks=[24])]),
    "block -1 does not exist": partial(new=[new_row()], block_rows=pack_ints([0]), block_ids=pack_ints([-1])),
    "row 0: 6 blocks are more than the 5 a row can use": partial(new=[new_row(blocks=[0] * 6)]),
    "row 0 gets more than the 5 blocks": partial(
        new=[new_row()], block_rows=pack_ints([0] * 5), block_ids=pack_ints([1] * 5)
    ),
    "row 1 gets blocks but was never set up": partial(
        new=[new_row()], block_rows=pack_ints([1]), block_ids=pack_ints([1])
    ),
    "row 5 does not exist": partial(new=[new_row()], block_rows=pack_ints([5]), block_ids=pack_ints([1])),
    "row 0 gets no tokens": partial(new=[new_row(prompt=[])]),
    "token 50 does not exist; tokens are 0 to 49": partial(new=[new_row(prompt=[1, 50])]),
    "token -1 does not exist": partial(new=[new_row(prompt=[-1, 1])]),
    "41 tokens are more than max_model_len 40": partial(new=[new_row(prompt=[1] * 41)]),
    "3 of 3 tokens cannot be computed already": partial(new=[new_row(num_computed_tokens=3)]),
    "-1 of 3 tokens cannot be computed already": partial(new=[new_row(num_computed_tokens=-1)]),
    "1 of 1 tokens cannot be output": partial(resumed=[RESUMED]),
    "row 0: prompt_logprobs and pooling are only for a row that is set up": partial(
        new=[new_row()],
        continued=[ContinueRow(row=0, token_ids=THREE, drop=0, sampling=replace_struct(SAMPLING, prompt_logprobs=1))],
    ),
    "and pooling are only for a row that is set up with all its tokens": partial(
        new=[new_row()],
        continued=[ContinueRow(row=0, token_ids=THREE, drop=0, sampling=pooled(Pooling(kind="last")))],
    ),
    "row 0: 1 tokens are computed already; a mean needs all": partial(
        new=[new_row(num_computed_tokens=1, sampling=pooled(Pooling(kind="mean")))]
    ),
    "row 0 is continued but was never set up": partial(
        continued=[ContinueRow(row=0, token_ids=THREE, drop=0, sampling=SAMPLING)]
    ),
    "row 1 has 1 masks but draws 0 tokens": partial(new=[new_row()], mask_rows=pack_ints([1]), masks=ALL),
    "row 0 has 1 masks but draws 0 tokens": partial(
        new=[new_row()], num_tokens=pack_ints([2]), mask_rows=pack_ints([0]), masks=ALL
    ),
    "row 4 does not exist": partial(new=[new_row()], mask_rows=pack_ints([4]), masks=ALL),
    "row 0 has 2 masks but draws 1 tokens": partial(
        new=[new_row()], num_tokens=THREE, mask_rows=pack_ints([0, 0]), masks=pack_ints([-1] * 4)
    ),
    "1 masks have 4 bytes; 8 each are needed": partial(
        new=[new_row()], num_tokens=THREE, mask_rows=pack_ints([0]), masks=pack_ints([-1])
    ),
    "row 0: temperature nan is not allowed": partial(
        new=[new_row(sampling=Sampling(seed=1, max_tokens=1, temperature=float("nan")))]
    ),
    "row 0: logit_bias names token 50": partial(
        new=[new_row(sampling=Sampling(seed=1, max_tokens=1, logit_bias={50: 1.0}))]
    ),
}


@pytest.mark.parametrize(("sentence", "schedule"), REFUSED.items(), ids=list(REFUSED))
def test_a_schedule_that_cannot_be_run_is_refused_and_hurts_no_other_rank(
    sentence: str, schedule: PartialSchedule
) -> None:
    subject = merger()
    subject.apply(1, partial(new=[new_row()], num_tokens=THREE))
    with pytest.raises(Refused) as refused:
        subject.apply(0, schedule)
    assert sentence in str(refused.value)
    with pytest.raises(Refused, match="row 0 runs but was never set up"):
        subject.apply(0, partial(step=2))
    step = subject.merge([subject.apply(1, partial(step=2))])
    assert (step.rows.tolist(), step.positions.tolist(), step.samples.tolist()) == ([ROWS], [3], [True])


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (ContinueRow(row=0, token_ids=THREE, drop=5, sampling=SAMPLING), "row 0 has 4 tokens, 5 cannot be dropped"),
        (ContinueRow(row=0, token_ids=THREE, drop=-1, sampling=SAMPLING), "-1 cannot be dropped"),
        (
            ContinueRow(row=0, token_ids=pack_ints([1] * 38), drop=1, sampling=SAMPLING),
            "3 \\+ 38 tokens are more than max_model_len 40",
        ),
        (ContinueRow(row=0, token_ids=pack_ints([]), drop=1, sampling=SAMPLING), "row 0 gets no tokens"),
    ],
)
def test_a_turn_that_does_not_fit_is_refused(item: ContinueRow, sentence: str) -> None:
    subject = merger()
    subject.apply(0, partial(new=[new_row()], num_tokens=THREE))
    with pytest.raises(Refused, match=sentence):
        subject.apply(0, partial(step=2, continued=[item]))


def test_a_row_is_not_computed_past_max_model_len() -> None:
    subject = merger()
    full = new_row(prompt=[1] * MAX_LEN, blocks=[0, 1, 2, 3, 4], num_computed_tokens=MAX_LEN - 1)
    assert subject.apply(0, partial(new=[full])).samples.tolist() == [True]
    with pytest.raises(Refused, match="past max_model_len 40"):
        subject.apply(0, partial(step=2))


def test_ranks_that_run_the_same_rows_again_are_merged_as_they_were() -> None:
    subject, device = merger(), DeviceModel()
    both = [partial(rows=[1, 0], new=[new_row(0), new_row(1)], num_tokens=pack_ints([3, 3])) for _ in (0, 1)]
    device.run(subject.merge([subject.apply(rank, schedule) for rank, schedule in enumerate(both)]))
    again = partial(step=2, rows=[], again=True)
    assert subject.again([0, 1], [again, again]) is None
    device.run(subject.merge([subject.apply(rank, again) for rank in (0, 1)]))
    for step in range(3, 3 + BLOCK):
        begun: dict[str, Any] = {}
        if step == BLOCK - 1:
            begun = {"block_rows": pack_ints([0, 1]), "block_ids": pack_ints([5, 6])}
        merged = subject.again([0, 1], [partial(step=step, rows=[], again=True, **begun)] * 2)
        assert merged is not None
        parts, whole = merged
        assert [(part.rank, part.step, part.rows.tolist()) for part in parts] == [
            (0, step, [1, 0]),
            (1, step, [ROWS + 1, ROWS]),
        ]
        assert whole.positions.tolist() == [step + 1] * 4
        ran, _ = device.run(whole)
        assert ran == [[drawn(row, step + 1)] for row in whole.rows.tolist()]
    assert subject.again([0], [partial(step=99, rows=[], again=True)]) is None


def test_ranks_that_ran_apart_in_between_run_together_again() -> None:
    subject, device = merger(), DeviceModel()
    both = [partial(new=[new_row()], num_tokens=THREE) for _ in (0, 1)]
    device.run(subject.merge([subject.apply(rank, schedule) for rank, schedule in enumerate(both)]))
    again = partial(step=2, rows=[], again=True)
    first = subject.merge([subject.apply(rank, again) for rank in (0, 1)])
    device.run(first)
    device.run(subject.merge([subject.apply(1, again)]))
    merged = subject.again([0, 1], [again, again])
    assert merged is not None
    parts, step = merged
    assert (step.positions.tolist(), step.rows is first.rows) == ([4, 5], True)
    assert [part.ends.tolist() for part in parts] == [[5], [6]]
    ran, _ = device.run(step)
    assert ran == [[drawn(0, 4)], [drawn(ROWS, 5)]]
    device.run(subject.merge([subject.apply(1, partial(step=9))]))  # not the same rows again, but the same rows
    assert subject.again([0, 1], [again, again]) is None


WRONG = {
    "a block that does not exist": {"block_rows": pack_ints([0]), "block_ids": pack_ints([24])},
    "a row that does not exist": {"block_rows": pack_ints([ROWS]), "block_ids": pack_ints([1])},
    "a row that does not run": {"block_rows": pack_ints([3]), "block_ids": pack_ints([1])},
    "too many blocks": {"block_rows": pack_ints([0] * 5), "block_ids": pack_ints([1] * 5)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_in_rows_that_run_again_is_left_to_the_rank_it_is_of(wrong: dict[str, Any]) -> None:
    subject = merger()
    for rank in (0, 1):
        subject.apply(rank, partial(new=[new_row()], num_tokens=THREE))
    again = partial(step=2, rows=[], again=True)
    subject.merge([subject.apply(rank, again) for rank in (0, 1)])
    assert subject.again([0, 1], [again, partial(step=3, rows=[], again=True, **wrong)]) is None
    assert subject.again([0, 1], [again, again]) is not None
    with pytest.raises(Refused):
        subject.apply(1, partial(step=4, rows=[], again=True, **wrong))
    assert subject.again([0, 1], [again, again]) is None
    assert subject.apply(0, again).rows.tolist() == [0]


def test_only_rows_that_drew_a_token_run_again() -> None:
    subject = merger()
    subject.apply(0, partial(rows=[1, 0], new=[new_row(0), new_row(1)], num_tokens=pack_ints([3, 2])))
    with pytest.raises(Refused, match="row 0 did not come to its last token"):
        subject.apply(0, partial(step=2, rows=[], again=True))
    with pytest.raises(Refused, match="but there is none"):
        subject.apply(0, partial(step=3, rows=[], again=True))


def test_rows_that_run_again_stop_at_the_end_of_their_blocks_and_of_the_model() -> None:
    again = {"rows": [], "again": True}
    subject = merger()
    subject.apply(0, partial(new=[new_row(prompt=[1] * BLOCK)], num_tokens=pack_ints([BLOCK])))
    with pytest.raises(Refused, match=f"row 0 has no block for position {BLOCK}"):
        subject.apply(0, partial(step=2, **again))
    full = new_row(prompt=[1] * MAX_LEN, blocks=[0, 1, 2, 3, 4], num_computed_tokens=MAX_LEN - 1)
    subject.apply(0, partial(step=3, new=[full]))
    with pytest.raises(Refused, match=f"row 0 would be computed up to {MAX_LEN + 1}, past max_model_len {MAX_LEN}"):
        subject.apply(0, partial(step=4, **again))


def test_vectors_go_to_the_rank_and_row_they_are_of() -> None:
    subject = merger()
    parts = [
        subject.apply(0, partial(step=7, rows=[3, 1], new=[new_row(3), new_row(1)], num_tokens=pack_ints([3, 3]))),
        subject.apply(2, partial(step=9, rows=[2], new=[new_row(2)], num_tokens=THREE)),
    ]
    vectors = [np.array([entry, 0.5], np.float32) for entry in (1, 2)]
    found = [Pooled(1, vectors[0]), Pooled(2, vectors[1])]
    first, second = split(parts, SampledStep(tokens=np.array([5, -3, -3], np.int32), pooled=found), ROWS)
    assert [(item.owner, unpack_floats(item.vector).tolist()) for item in first.pooled] == [(1, [1.0, 0.5])]
    assert [(item.owner, unpack_floats(item.vector).tolist()) for item in second.pooled] == [(2, [2.0, 0.5])]


def test_logprobs_go_to_the_rank_and_row_they_are_of() -> None:
    subject = merger()
    parts = [
        subject.apply(0, partial(step=7, rows=[3, 1], new=[new_row(3), new_row(1)], num_tokens=pack_ints([3, 3]))),
        subject.apply(2, partial(step=9, rows=[2], new=[new_row(2)], num_tokens=THREE)),
    ]
    sampled = SampledStep(
        tokens=np.array([5, -2, 6], np.int32),
        logprobs={
            2: [(np.array([6, 8], np.int32), np.array([-0.5, -1.5], np.float32), 1)],
            0: [(np.array([5], np.int32), np.array([-0.25], np.float32), 4)],
        },
        prompt_logprobs=[
            PromptLogprobs(
                2,
                4,
                np.array([1, 2, 3, 4], np.int32),
                np.array([-1, -2, -3, -4], np.float32),
                np.array([7, 8], np.int32),
            )
        ],
    )
    first, second = split(parts, sampled, ROWS)
    assert (first.step, unpack_ints(first.tokens).tolist()) == (7, [5, -2])
    assert (second.step, unpack_ints(second.tokens).tolist()) == (9, [6])
    assert [(item.owner, item.positions) for item in first.logprobs] == [(3, 1)]
    assert unpack_ints(first.logprobs[0].ranks).tolist() == [4]
    prompt, drawn = second.logprobs
    assert (prompt.owner, prompt.positions, prompt.prompt_position) == (2, 2, 4)
    assert unpack_ints(prompt.token_ids).tolist() == [1, 2, 3, 4]
    assert unpack_floats(prompt.values).tolist() == [-1, -2, -3, -4]
    assert (drawn.owner, drawn.prompt_position) == (2, 0)
    assert unpack_ints(drawn.token_ids).tolist() == [6, 8]
    assert unpack_floats(drawn.values).tolist() == [-0.5, -1.5]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_schedule_however_wrong_raises_anything_but_refused(data: st.DataObject) -> None:
    number = st.one_of(st.integers(-2, 60), st.sampled_from([-(2**31), 2**31 - 1]))
    ints = st.lists(number, max_size=8).map(pack_ints)
    big = st.one_of(number, st.sampled_from([2**63, -(2**63), 2**64 - 1]))
    rows = st.one_of(st.integers(0, ROWS - 1), big)
    blocks = st.one_of(st.just([0, 1, 2, 3]).map(pack_ints), ints)
    sampling = st.just(SAMPLING)
    new = st.builds(
        NewRow, row=rows, request_id=st.just(""), prompt_token_ids=ints, block_ids=blocks, sampling=sampling,
        num_computed_tokens=big,
    )  # fmt: skip
    resumed = st.builds(
        ResumeRow, row=rows, request_id=st.just(""), token_ids=ints, num_output_tokens=big, block_ids=blocks,
        sampling=sampling, num_computed_tokens=big,
    )  # fmt: skip
    continued = st.builds(ContinueRow, row=rows, token_ids=ints, drop=big, sampling=sampling)
    subject = merger()
    for step in range(1, 5):
        run = data.draw(st.lists(st.one_of(st.integers(0, ROWS - 1), number), max_size=4))
        appended = data.draw(st.lists(st.tuples(number, number), max_size=8))
        schedule = PartialSchedule(
            step=step,
            rows=pack_ints(run),
            num_tokens=pack_ints(data.draw(st.one_of(st.just([]), st.just([1] * len(run))))),
            block_rows=pack_ints([row for row, _ in appended]),
            block_ids=pack_ints([block for _, block in appended]),
            new=data.draw(st.lists(new, max_size=2)),
            resumed=data.draw(st.lists(resumed, max_size=2)),
            continued=data.draw(st.lists(continued, max_size=2)),
            mask_rows=data.draw(ints),
            masks=ALL if data.draw(st.booleans()) else data.draw(ints),
        )
        with suppress(Refused):
            subject.merge([subject.apply(data.draw(st.integers(0, RANKS - 1)), schedule)])


TRIED = partial(step=1, new=[new_row()], num_tokens=pack_ints([5]), num_drafts=pack_ints([2]), drafts=pack_ints([7, 8]))


@pytest.mark.parametrize(
    "early",
    [
        partial(step=2),
        partial(step=2, rows=[], again=True),
        partial(step=2, continued=[ContinueRow(row=0, token_ids=pack_ints([1]), drop=0, sampling=SAMPLING)]),
    ],
)
def test_a_row_waits_until_its_drafts_are_judged(early: PartialSchedule) -> None:
    subject = merger()
    part = subject.apply(1, TRIED)
    with pytest.raises(Refused, match="before its drafts are judged"):
        subject.apply(1, early)
    subject.judged([part], np.array([3], np.int32))  # too late: the row is void
    with pytest.raises(Refused, match="never set up"):
        subject.apply(1, partial(step=3))


def test_a_row_that_is_set_up_anew_does_not_get_what_became_of_its_old_drafts() -> None:
    subject = merger()
    part = subject.apply(1, TRIED)
    subject.apply(1, partial(step=2, new=[new_row()], num_tokens=THREE))
    subject.judged([part], np.array([3], np.int32))
    assert subject.apply(1, partial(step=3)).ends.tolist() == [4]


def test_drafts_are_kept_up_to_the_first_that_was_not_drawn() -> None:
    counts = np.array([2, 0, 0, 2, 1], np.int32)
    drafts = Drafts(counts, np.array([5, 6, 7, 8, 9], np.int32))
    indices = np.array([0, 0, 0, 1, 3, 3, 3, 4, 4], np.int32)  # the third does not draw
    judged = judge(5, drafts, indices, np.array([5, 6, 1, 2, 3, 8, 4, 9, -2], np.int32))
    assert judged.counts.tolist() == [3, 1, 1, 1, 1]
    assert judged.tokens.tolist() == [5, 6, 1, 2, -1, 3, -2]
    assert judged.lines.tolist() == [0, 1, 2, 3, 4, 8]


def test_drafts_of_the_draft_model_have_no_tokens_yet() -> None:
    subject = Merger(Rows(RANKS, ROWS, MAX_LEN, BLOCK), replace(LIMITS, draws_drafts=True))
    subject.apply(1, partial(new=[new_row()], num_tokens=THREE))
    part = subject.apply(1, partial(step=2, num_tokens=pack_ints([3]), num_drafts=pack_ints([2])))
    drafts = subject.merge([part]).drafts
    assert drafts is not None
    assert (drafts.counts.tolist(), drafts.tokens.tolist()) == ([2], [])
    subject.judged([part], np.array([2], np.int32))
    for wrong in (
        partial(step=3, num_tokens=pack_ints([3]), num_drafts=pack_ints([2]), drafts=pack_ints([1, 2])),
        partial(step=3, new=[new_row()], num_tokens=pack_ints([4]), num_drafts=pack_ints([1])),
    ):
        with pytest.raises(Refused, match="the draft model draws the drafts"):
            subject.apply(1, wrong)
        subject.apply(1, partial(step=4, new=[new_row()], num_tokens=THREE))
