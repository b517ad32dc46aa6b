"""The native scheduler decides as vLLM's does, step by step, block by block; a long run of it is `make fuzz`."""

from typing import Any

import pytest

from bus.prefix import block_hashes
from bus.wire import pack_ints
from tests.ranks.decisions import Add, Mismatch, Settings, State, Trace, Turn, compare
from tests.ranks.fuzz import HAS_TO_HAPPEN, LEAST_SHARE, check, load_oracle, play
from tests.ranks.native_side import NativeSingleStep, make_native

NUM_TRACES = 40

LITTLE = Settings(
    policy="priority",
    block_size=4,
    num_blocks=4,
    max_model_len=16,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    long_prefill_token_threshold=0,
    enable_prefix_caching=True,
)


@pytest.fixture(scope="module")
def oracles(vllm_loaded: Any) -> Any:
    return load_oracle()


def native(trace: Trace) -> NativeSingleStep:
    return NativeSingleStep(make_native(trace.settings, single_step=True))


def test_the_same_decisions_on_random_traces(oracles: Any) -> None:
    counts = check(oracles, range(NUM_TRACES))
    assert counts["traces"] == NUM_TRACES
    rare = {what: counts[what] for what in HAS_TO_HAPPEN if counts[what] < LEAST_SHARE * NUM_TRACES}
    assert not rare


def test_what_a_preempted_request_did_not_compute_is_not_found(oracles: Any) -> None:
    """A chunk of request 0 is planned when request 1 needs a block, and so does not run after all."""
    settings = LITTLE._replace(
        num_blocks=8, max_model_len=32, max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    prompt = [i * i % 11 for i in range(28)]
    first = Add(tuple(prompt), stream=0, max_tokens=2, priority=1)
    second = Add((5, 5, 5, 5), stream=1, max_tokens=2, priority=0)
    trace = Trace(settings, (Turn(before=(first,)), Turn(before=(second,)), Turn()))
    state: State = play(oracles, trace)[-1][-1]
    with pytest.raises(Mismatch) as theirs:
        compare(trace, native(trace), oracles.make(settings, corrected=False))
    assert theirs.value.turn == 2
    never_computed = theirs.value.right[-1].names - state.names
    assert never_computed == {block_hashes(pack_ints(prompt[:24]), 4)[-16:]}


def test_of_requests_that_came_at_the_same_time_the_last_makes_room(oracles: Any) -> None:
    """Two requests have the same priority and time of arrival; one of them has to go."""
    first = Add((1, 2, 3, 4, 5, 6, 7, 8), stream=0, max_tokens=8)
    second = Add((8, 8, 8, 8, 9, 9, 9), stream=1, max_tokens=8)
    trace = Trace(LITTLE, (Turn(before=(first, second)), Turn()))
    assert play(oracles, trace)[-1][0].preempted == (1,)
    with pytest.raises(Mismatch) as theirs:
        compare(trace, native(trace), oracles.make(LITTLE, corrected=False))
    assert theirs.value.right[0].preempted == (0,)


def test_a_block_filled_by_drafts_is_named_when_its_request_runs_again(oracles: Any) -> None:
    """Request 1 has all its drafts accepted, and then no token is left for it in the next step."""
    settings = LITTLE._replace(num_blocks=12, max_model_len=24, max_num_batched_tokens=3, policy="fcfs")
    first = Add((1, 2, 3), stream=0, max_tokens=20)
    second = Add((2, 3, 6, 11, 6, 3), stream=2, max_tokens=20)
    play(oracles, Trace(settings, (Turn(before=(first, second)), *[Turn(drafts=2)] * 20), seed=5))
