"""What followers hear is what executor 0 runs, however little of it is said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import messages
from bus.buses import BUSES
from bus.wire import Codec, pack_ints
from executor.step import MergedStep
from executor.telling import Listener, Teller
from tests.executor.test_merge import BLOCK, RANKS, ROWS, DeviceModel, RankModel, merger, new_row, partial

CODEC = Codec(BUSES["follower"].down, 1 << 20)


class Ear:
    """A teller, the wire, and a listener, which must hear what is said."""

    def __init__(self) -> None:
        self._teller, self._listener = Teller(), Listener(ROWS)
        self._number = 0

    def hear(self, step: MergedStep) -> messages.MergedStep:
        self._number += 1
        message = self._teller.tell(self._number, step)
        read = CODEC.read(CODEC.write(message))
        assert isinstance(read, messages.MergedStep)
        heard = self._listener.hear(read)
        assert len(heard.setups) == len(step.setups)
        for setup, told in zip(heard.setups, step.setups, strict=True):
            assert setup.tokens.tolist() == told.tokens.tolist()
            assert (setup.row, setup.start, setup.prompt_len) == (told.row, told.start, told.prompt_len)
            assert (setup.sampling, setup.adapter) == (told.sampling, told.adapter)
        assert (heard.drafts is None) == (step.drafts is None)
        if heard.drafts is not None and step.drafts is not None:
            assert heard.drafts.counts.tolist() == step.drafts.counts.tolist()
            assert heard.drafts.tokens.tolist() == step.drafts.tokens.tolist()
        assert heard.masks.at.tolist() == step.masks.at.tolist()
        assert heard.masks.words.tolist() == step.masks.words.tolist()
        for name in ("ranks", "rows", "positions", "num_tokens", "samples", "block_tables"):
            array, expected = getattr(heard, name), getattr(step, name)
            assert array.dtype == expected.dtype, name
            assert np.array_equal(array, expected), name
        return message


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_steps_are_heard_as_they_are(data: st.DataObject) -> None:
    subject, device, ear = merger(), DeviceModel(), Ear()
    ranks = [RankModel(rank) for rank in range(RANKS)]
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = [model for model in ranks if data.draw(st.booleans())]
        pairs = [(model, model.schedule(data)) for model in chosen]
        runs = [(model, schedule) for model, schedule in pairs if schedule.rows.nbytes or schedule.again]
        for model in chosen:
            if model not in [one for one, _ in runs]:  # a schedule without rows is refused
                subject.void(model.rank)
                model.rows.clear()
                model.last = []
        for model, schedule in runs:
            model.expect(schedule)
        merged = subject.again([model.rank for model, _ in runs], [schedule for _, schedule in runs])
        parts = merged[0] if merged else [subject.apply(model.rank, schedule) for model, schedule in runs]
        if not parts:
            continue
        step = merged[1] if merged else subject.merge(parts)
        ear.hear(step)
        _, sampled = device.run(step)
        if sampled.counts is not None:
            subject.judged(parts, sampled.counts)


def test_of_rows_that_run_again_only_the_blocks_they_begin_are_told() -> None:
    subject, ear = merger(), Ear()
    both = [partial(rows=[1, 0], new=[new_row(0), new_row(1)], num_tokens=pack_ints([3, 3])) for _ in (0, 1)]
    assert not ear.hear(subject.merge([subject.apply(rank, schedule) for rank, schedule in enumerate(both)])).again
    again = partial(step=2, rows=[], again=True)
    ear.hear(subject.merge([subject.apply(rank, again) for rank in (0, 1)]))
    for step in range(3, 3 + BLOCK):
        begins = step == BLOCK - 1
        blocks = {"block_rows": pack_ints([0, 1]), "block_ids": pack_ints([5, 6])} if begins else {}
        merged = subject.again([0, 1], [partial(step=step, rows=[], again=True, **blocks)] * 2)
        assert merged is not None
        told = ear.hear(merged[1])
        assert (told.again, told.block_ids.nbytes) == (True, 16 if begins else 0)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (messages.MergedStep(number=2, table_width=1), "step 2 was told after step 0"),
        (messages.MergedStep(number=1, table_width=1, again=True), "no step before it"),
    ],
)
def test_a_step_that_does_not_follow_is_not_run(message: messages.MergedStep, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Listener(ROWS).hear(message)
