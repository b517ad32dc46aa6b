"""Random traces, and whether what they are meant to bring about does come about."""

import random
from collections import Counter
from typing import Any

from tests.ranks.decisions import (
    VOCAB,
    Abort,
    Action,
    Add,
    Append,
    Decision,
    Pause,
    Reset,
    Settings,
    State,
    Trace,
    Turn,
)

NUM_TURNS = 110
NUM_REQUESTS = 22


def draw_trace(seed: int) -> Trace:
    """A trace of at least 100 steps and 20 requests. Even seeds have drafts, every fourth has sessions.

    Traces with sessions keep away from what vLLM's do wrong or otherwise: drafts, resets, no room, a prefill limit that
    looks at sessions that wait for input.
    """
    draw = random.Random(seed)
    settings = draw_settings(draw)
    sessions = seed % 4 == 1
    if sessions:
        settings = settings._replace(long_prefill_token_threshold=0, num_blocks=settings.num_blocks + 40)
    adds = [draw_add(draw, settings) for _ in range(NUM_REQUESTS)]
    if sessions:
        adds = [add._replace(session=draw.random() < 0.6, prompt=add.prompt[:10]) for add in adds]
        adds = [add._replace(prompt_logprobs=None) if add.session else add for add in adds]
    places = sorted(draw.randrange(NUM_TURNS * 2 // 3) for _ in adds)
    turns = []
    added = 0
    paused = False
    most_drafts = draw.choice([1, 2, 4]) if seed % 2 == 0 else 0
    for number in range(NUM_TURNS):
        before: list[Action] = []
        while added < len(adds) and places[added] <= number:
            before.append(adds[added])
            added += 1
        during: list[Action] = []
        if added and draw.random() < 0.04:
            (before if draw.random() < 0.5 else during).append(Abort(draw.randrange(added)))
        while sessions and added and draw.random() < 0.6:
            size = draw.choice([0, 1, 1, 2, 3, 5])
            tokens = tuple(draw.randrange(VOCAB) for _ in range(size))
            (before if draw.random() < 0.7 else during).append(Append(draw.randrange(added), tokens))
        if not sessions and draw.random() < 0.01:
            (before if draw.random() < 0.7 else during).append(Reset(draw.random() < 0.5))
        if paused or draw.random() < 0.01:
            paused = not paused
            before.append(Pause(draw.choice(["paused_new", "paused_all"]) if paused else "unpaused"))
        draw.shuffle(before)
        turns.append(Turn(tuple(before), tuple(during), most_drafts if draw.random() < 0.7 else 0))
    return Trace(settings, tuple(turns), seed)


def draw_settings(draw: random.Random) -> Settings:
    block_size = draw.choice([4, 8])
    max_model_len = draw.choice([24, 48, 64])
    least = -(-max_model_len // block_size)
    return Settings(
        policy=draw.choice(["fcfs", "priority"]),
        block_size=block_size,
        num_blocks=least + draw.choice([0, 1, 2, 3, 4, 6, 10, 16]),
        max_model_len=max_model_len,
        max_num_seqs=draw.choice([1, 2, 4, 4, 8, 8]),
        max_num_batched_tokens=draw.choice([3, 8, 16, 16, 32, 64]),
        long_prefill_token_threshold=draw.choice([0, 0, 2, 5, 12]),
        enable_prefix_caching=draw.random() < 0.9,
    )


def draw_add(draw: random.Random, settings: Settings) -> Add:
    family = draw.randrange(3)
    stream = family if draw.random() < 0.7 else draw.randrange(100)
    shared = [(family + i * i) % VOCAB for i in range(draw.randrange(settings.max_model_len * 3 // 4))]
    own = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 0, 1, 3, 9]))]
    prompt = (shared + own or [1])[: settings.max_model_len - 3]
    output = [draw.randrange(VOCAB) for _ in range(draw.choice([0] * 9 + [2]))]
    return Add(
        prompt=tuple(prompt),
        stream=stream,
        max_tokens=len(output) + draw.choice([1, 2, 5, 12, 20, 40]),
        stop=tuple(draw.sample(range(VOCAB), draw.choice([0] * 6 + [1, 2, 2, 5]))),
        eos=draw.choice([None, None, 3]),
        priority=draw.choice([0, 0, 0, 1, -1, 5]),
        arrival=draw.choice([0.0, draw.random()]),
        salt=draw.choice(["", "", "", "", "pepper"]),
        output=tuple(output),
        prompt_logprobs=draw.choice([None] * 12 + [1]),
    )


def seen(trace: Trace, history: list[list[Any]]) -> Counter[str]:
    """Which of the things that traces are for happened in this one, once each."""
    happened: Counter[str] = Counter()
    names: frozenset[bytes] = frozenset()
    for turn, did in zip(trace.turns, history, strict=False):  # it may have been over before its end
        decision, emitted, state = next(item for item in did if isinstance(item, Decision)), did[-2], did[-1]
        assert isinstance(state, State)
        happened["preemption"] |= bool(decision.preempted or decision.resumed)
        reset = any(isinstance(action, Reset) for action in (*turn.before, *turn.during))
        happened["eviction"] |= not reset and not names <= state.names
        names = state.names
        happened["prefix hit"] |= any(item.num_computed for item in (*decision.new, *decision.resumed))
        got = {item.number: item for item in emitted}
        happened["chunk"] |= any(number not in got for number, _ in decision.scheduled)
        drafts = dict(decision.drafts)
        happened["draft reject"] |= any(
            number in got and got[number].reason is None and len(got[number].tokens) < 1 + len(tokens)
            for number, tokens in drafts.items()
        )
        happened["draft accept"] |= any(number in got and len(got[number].tokens) > 1 for number in drafts)
        happened["stop token"] |= any(item.reason == "stop" for item in emitted)
        happened["length"] |= any(item.reason == "length" for item in emitted)
        for action in (*turn.before, *turn.during):
            happened["abort"] |= isinstance(action, Abort)
            happened["session"] |= isinstance(action, Append)
    happened["priority"] |= trace.settings.policy == "priority"
    return happened
