"""Rows that are set up together against rows that are set up one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages import NewRow, Pooling, ResumeRow, Sampling
from bus.sampling import pooled
from bus.wire import pack_ints
from executor.checks import Limits, Refused
from executor.rows import Rows
from executor.setups import Setups
from executor.step import RowSetup

RANKS, ROWS, MAX_LEN, BLOCK, VOCAB = 2, 6, 40, 8, 50
LIMITS = Limits(ROWS, 30, MAX_LEN, VOCAB, blocks_of_rank=[24, 23], first_blocks=[1, 25])
SLOTS = {"A": 1, "B": 2}
SAMPLING = Sampling(seed=1, max_tokens=5)


def subject() -> tuple[Rows, Setups]:
    """A table whose rows have been used before, and what sets rows up in it."""
    rows = Rows(RANKS, ROWS, MAX_LEN, BLOCK)
    for array in (rows.lengths, rows.positions, rows.num_blocks, rows.adapters):
        array[:] = 3
    rows.block_tables[:, :3] = 7
    return rows, Setups(rows, LIMITS, SLOTS)


@st.composite
def items(draw: st.DrawFn, kind: type[NewRow] | type[ResumeRow], row: int) -> NewRow | ResumeRow:
    """A row that can be set up, or one that cannot for one reason or several."""
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN))
    blocks = draw(st.lists(st.integers(0, 22), max_size=MAX_LEN // BLOCK))
    count = len(tokens)
    given = {
        "row": row,
        "num_computed_tokens": draw(st.integers(0, count - 1)),
        "adapter": draw(st.sampled_from(["", *SLOTS])),
        "sampling": SAMPLING,
        "num_output_tokens": draw(st.integers(0, count - 1)),
    }
    wrong = {
        "row": st.sampled_from([-1, ROWS, 2**63]),
        "num_computed_tokens": st.sampled_from([-1, count, 2**64 - 1]),
        "adapter": st.just("C"),
        "sampling": st.sampled_from([replace(SAMPLING, top_p=0.0), pooled(Pooling(kind="mean"))]),
        "num_output_tokens": st.sampled_from([-1, count]),
        "tokens": st.sampled_from([[], [*tokens, VOCAB], [-1], [1] * (MAX_LEN + 1)]),
        "blocks": st.sampled_from([[24], [-1, 2], [1] * 6]),
    }
    faults = draw(st.one_of(st.just([]), st.lists(st.sampled_from(sorted(wrong)), unique=True, max_size=2)))
    given |= {"tokens": tokens, "blocks": blocks} | {name: draw(wrong[name]) for name in faults}
    token_ids, block_ids = pack_ints(given.pop("tokens")), pack_ints(given.pop("blocks"))
    output = given.pop("num_output_tokens")
    if kind is NewRow:
        return NewRow(request_id="r", prompt_token_ids=token_ids, block_ids=block_ids, **given)
    return ResumeRow(request_id="r", token_ids=token_ids, block_ids=block_ids, num_output_tokens=output, **given)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rows_set_up_together_are_as_rows_set_up_one_by_one(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, RANKS - 1))
    chosen = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS))
    news = data.draw(st.integers(0, len(chosen)))
    new = [data.draw(items(NewRow, row)) for row in chosen[:news]]
    resumed = [data.draw(items(ResumeRow, row)) for row in chosen[news:]]
    one_by_one, alone = subject()
    each = [([item], []) for item in new] + [([], [item]) for item in resumed]
    expected, sentence = outcome(alone, rank, each)
    rows, together = subject()
    assert outcome(together, rank, [(new, resumed)]) == (expected, sentence)
    assert_equal(rows, subject()[0] if sentence else one_by_one)


def outcome(setups: Setups, rank: int, calls: list[tuple[list[NewRow], list[ResumeRow]]]) -> tuple[list[object], str]:
    """What the calls, one after the other, tell the device, or nothing and the sentence that refuses one of them."""
    made: list[RowSetup] = []
    try:
        for new, resumed in calls:
            made += setups.begin(rank, new, resumed)
    except Refused as refused:
        return [], str(refused)
    return [(one.row, one.start, one.tokens.tolist(), one.prompt_len, one.sampling, one.adapter) for one in made], ""


def assert_equal(one: Rows, other: Rows) -> None:
    for name in ("lengths", "positions", "num_blocks", "adapters", "block_tables"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def test_a_row_has_its_own_blocks_and_no_others() -> None:
    rows, setups = subject()
    item = NewRow(
        row=2, request_id="r", prompt_token_ids=pack_ints([5, 6]), block_ids=pack_ints([4, 0]), sampling=SAMPLING
    )
    (setup,) = setups.begin(1, [item], [])
    assert (setup.row, setup.tokens.tolist(), setup.prompt_len) == (ROWS + 2, [5, 6], 2)
    assert rows.block_tables[ROWS + 2].tolist() == [29, 25, 0, 0, 0]
    assert (rows.lengths[ROWS + 2], rows.positions[ROWS + 2], rows.num_blocks[ROWS + 2]) == (2, 0, 2)
    assert rows.block_tables[ROWS + 1].tolist() == [7, 7, 7, 0, 0]
