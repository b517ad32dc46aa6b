"""Whole engines from a seed, with either scheduler in the ranks: right tokens, right KV, and nothing left over."""

import random
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from bus.config import Config
from bus.messages import Message, Recall, StandingSchedule
from tests.simulation.world import VOCAB, World, generate, load_native


@pytest.fixture(scope="module", params=["native", "vllm"])
def load_scheduler(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        return load_native
    from ranks.vllm_loading import load

    return load


def settings(draw: random.Random) -> Config:
    return Config(
        ranks=draw.choice([1, 2, 2, 3]),
        max_num_seqs=draw.choice([2, 4]),
        max_num_batched_tokens=draw.choice([8, 24, 64]),
        max_model_len=96,
        block_size=8,
        num_blocks=draw.choice([45, 90]),
        async_depth=draw.choice([1, 2, 2]),
        standing_steps=draw.choice([0, 1, 5, 16, 32]),
        batching_window_ms=draw.choice([0.0, 2.0]),
        enable_prefix_caching=draw.random() < 0.8,
        speculation=draw.choice(["off", "ngram"]),
        num_speculative_tokens=3,
        prompt_lookup_min=1,
    )


def requests(draw: random.Random, count: int) -> dict[str, tuple[list[int], int]]:
    """Prompts by request id, half of them with a shared start, and how many tokens to answer."""
    shared = [draw.randrange(VOCAB) for _ in range(30)]
    made = {}
    for number in range(count):
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 35))]
        prompt = shared[: draw.randint(8, 30)] + own if draw.random() < 0.5 else own
        made[f"r{number}"] = prompt, draw.randint(1, 25)
    return made


def check_nothing_is_left(world: World) -> None:
    def all_quiet() -> bool:
        assert world.status is not None
        idle = all(load == (0, 0, 0) for load in world.rank_loads())
        return world.ready and idle and world.status.counters["unfinished_requests"] == 0

    world.run_until(all_quiet)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_is_answered_as_if_it_were_alone(load_scheduler: Any, seed: int) -> None:
    draw = random.Random(seed)
    world = World(seed, settings(draw), load_scheduler)
    world.run_until(lambda: world.ready)
    made = requests(draw, 14)
    aborted = set()
    for name, (prompt, count) in made.items():
        world.add(name, prompt, count)
        for _ in range(draw.randint(0, 40)):
            world.turn()
        if draw.random() < 0.15:
            world.abort(name)
            aborted.add(name)
    world.run_until(lambda: all(world.answers[name].ended for name in made if name not in aborted))
    for name, (prompt, count) in made.items():
        answer, expected = world.answers[name], generate(prompt, count)
        if name in aborted:
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.ended is not None
            assert (answer.ended.reason, answer.tokens) == ("length", expected)
    check_nothing_is_left(world)


def test_steps_stand_and_are_taken_back_at_any_time() -> None:
    """Requests are long and stop at tokens, come late and are aborted, so that much of what stands is void."""
    sent: Counter[type[Message]] = Counter()
    for seed in range(40):
        sent += _sent_with_stops(seed, random.Random(2000 + seed))
    assert sent[StandingSchedule] > 400
    assert sent[Recall] > 30


def _sent_with_stops(seed: int, draw: random.Random) -> Counter[type[Message]]:
    config = structs.replace(settings(draw), speculation="off", standing_steps=draw.choice([1, 2, 5, 32]))
    world = World(seed, config, load_native)
    world.run_until(lambda: world.ready)
    expected = {}
    for name, (prompt, _) in requests(draw, 8).items():
        stops = draw.sample(range(VOCAB), draw.choice([0, 1, 3, 6]))
        expected[name] = until_stop(generate(prompt, 30), stops)
        world.add(name, prompt, 30, stops)
        for _ in range(draw.choice([5, 60, 400])):
            world.turn()
        if draw.random() < 0.2:
            world.abort(name)
            expected.pop(name)
    for name, tokens in expected.items():
        world.run_until(lambda answer=world.answers[name]: answer.ended is not None)
        assert world.answers[name].tokens == tokens, f"{name} of seed {seed}"
    check_nothing_is_left(world)
    return world.sent


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """All up to the first that is a stop, and that."""
    last = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: last + 1]


@pytest.mark.parametrize("seed", range(12))
def test_after_any_restart_requests_end_and_new_ones_are_served(load_scheduler: Any, seed: int) -> None:
    draw = random.Random(1000 + seed)
    world = World(seed, settings(draw), load_scheduler)
    world.run_until(lambda: world.ready)
    for round_number in range(3):
        made = requests(draw, 6)
        for name, (prompt, count) in made.items():
            world.add(f"{name} of {round_number}", prompt, count)
            for _ in range(draw.randint(0, 30)):
                world.turn()
        world.start(draw.choice([("executor", 0), *world.ranks]))
        for name, (prompt, count) in made.items():
            answer = world.answers[f"{name} of {round_number}"]
            world.run_until(lambda answer=answer: answer.ended is not None)
            assert answer.ended is not None
            expected = generate(prompt, count)
            if answer.ended.reason == "length":
                assert answer.tokens == expected
            else:
                assert (answer.ended.reason, answer.ended.code) == ("error", "unavailable")
                assert answer.tokens == expected[: len(answer.tokens)]
        check_nothing_is_left(world)
    world.add("last", [1, 2, 3], 5)
    world.run_until(lambda: world.answers["last"].ended is not None)
    assert world.answers["last"].tokens == generate([1, 2, 3], 5)
