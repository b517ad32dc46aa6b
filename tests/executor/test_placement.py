"""Where things lie in the device's arrays: what is remembered of the step before must not show."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.placement import Placement
from executor.step import MergedStep

ROWS = 5


@st.composite
def steps(draw: st.DrawFn, shards: int) -> list[MergedStep]:
    """Steps of which some have the arrays of the one before, some have others of the same size."""
    made: list[MergedStep] = []
    for _ in range(draw(st.integers(1, 5))):
        rows = np.array(sorted(draw(st.sets(st.integers(0, shards * ROWS - 1), min_size=1))), np.int32)
        count = rows.size
        samples = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
        if made and draw(st.booleans()):
            rows, count = made[-1].rows, made[-1].rows.size
            samples = made[-1].samples if draw(st.booleans()) else ~made[-1].samples
        positions = np.array(draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)), np.int32)
        tables = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
        made.append(MergedStep([], rows // ROWS, rows, positions, np.ones_like(rows), samples, tables))
    return made


@pytest.mark.parametrize("shards", [1, 3])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_lie_where_they_would_if_they_were_the_first(shards: int, data: st.DataObject) -> None:
    used = Placement(shards, 1, ROWS)
    for step in data.draw(steps(shards)):
        packed = []
        for placement in (used, Placement(shards, 1, ROWS)):
            places = placement.place(step.rows)
            indices, drawn = placement.draws(step, places)
            picks = placement.pack_picks(step, places, indices, drawn, ROWS)
            packed.append((indices, drawn.rows, drawn.shards, placement.pack_batch(step, places, ROWS, 3), picks))
            assert placement.most_tokens(step, places) == places.most
        for one, other in zip(*packed, strict=True):
            np.testing.assert_array_equal(one, other)
        *_, batch, picks = packed[0]
        for entry in range(step.rows.size):
            shard, row = divmod(int(step.rows[entry]), ROWS)
            (line,) = np.flatnonzero(batch[shard, :, 0] == row)
            assert batch[shard, line].tolist() == [row, step.positions[entry], 1, *step.block_tables[entry], 0]
            drawn_at = np.flatnonzero(picks[shard, :, 1] == row)
            expected = [[line, row, step.positions[entry] + 1]] if step.samples[entry] else []
            assert picks[shard, drawn_at].tolist() == expected
