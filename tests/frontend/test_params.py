"""Sampling parameters that are made from those of the request before."""

from hypothesis import given
from hypothesis import strategies as st

from bus.messages import GenerateParams, Sampling
from frontend.params import BadRequest, ModelLimits, Samplings, sampling_for

LIMITS = [ModelLimits(100, 16, (2,)), ModelLimits(100, 12, (2, 3)), ModelLimits(50, 16, ())]

asked = st.builds(
    GenerateParams,
    n=st.integers(0, 2),
    max_tokens=st.none() | st.integers(0, 14),
    min_tokens=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0, -1.0]),
    stop_token_ids=st.sampled_from([[], [7], [70]]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([[], ["."]]),
)


@given(st.lists(asked, min_size=1, max_size=3), st.data())
def test_a_request_gets_what_it_would_get_alone_whatever_was_asked_for_before(
    kinds: list[GenerateParams], data: st.DataObject
) -> None:
    samplings = Samplings()
    for _ in range(data.draw(st.integers(2, 8))):
        params, limits = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(LIMITS))
        prompt_tokens, seed = data.draw(st.integers(1, 11)), data.draw(st.integers(0, 2**63 - 1))
        expected: Sampling | str
        try:
            expected = sampling_for(params, prompt_tokens, limits, seed)
        except BadRequest as error:
            expected = str(error)
        try:
            assert samplings.make(params, prompt_tokens, limits, seed) == expected
        except BadRequest as error:
            assert str(error) == expected  # noqa: PT017
