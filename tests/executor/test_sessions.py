"""Sessions from the rank's scheduler to the device: a turn gives what a request with all its prompt would give."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import AddRequest, AppendInput, KvPool, PartialSchedule, Sampling, StepResult, StopTurn
from bus.wire import pack_ints, unpack_ints
from executor.checks import Limits
from executor.merge import Merger
from executor.rows import Rows
from executor.runner import Handle, Runner
from ranks.native import NativeScheduler

NUM_SESSIONS = 3
NUM_TURNS = 4


class Engine:
    """A rank's scheduler, the executor's host side and a runner, two steps in flight, without buses between them."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.config = config = Config(
            ranks=1,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            block_size=8,
            max_model_len=256,
            num_blocks=40,
            cache_dir=str(cache),
            enable_prefix_caching=False,
        )
        self.runner = Runner(config, model, lambda *_: None)
        blocks = [self.runner.blocks_of_rank(0)]
        first = self.runner.first_blocks
        limits = Limits(2, 16, 256, self.runner.vocab_size, blocks, first)
        self.merger = Merger(Rows(1, 2, 256, 8), limits)
        pool = KvPool(num_blocks=blocks[0], block_size=8, max_model_len=256, vocab_size=self.runner.vocab_size)
        self.counters = Counters()
        self.scheduler = NativeScheduler(config, pool, self.counters)
        self.flying: deque[tuple[int, Handle]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.contexts: dict[int, int] = {}
        self.step = 0
        self.continued = 0

    def add(self, handle: int, prompt: list[int], sampling: Sampling, resumable: bool) -> None:
        request = AddRequest(
            handle=handle,
            sequence=1,
            request_id=str(handle),
            prompt_token_ids=pack_ints(prompt),
            sampling=sampling,
            resumable=resumable,
        )
        self.scheduler.add(0, request, 0.0)
        self.tokens[handle] = []

    def move(self) -> bool:
        while len(self.flying) < 2 and (schedule := self.scheduler.schedule(self.step, 0.0)) is not None:
            self.step += 1
            self._send(schedule)
        if not self.flying:
            return False
        number, handle = self.flying.popleft()
        drawn = self.runner.collect(handle)
        for _, outputs in self.scheduler.update(StepResult(step=number, tokens=pack_ints(drawn.tokens))):
            pairs = zip(unpack_ints(outputs.handles).tolist(), unpack_ints(outputs.tokens).tolist(), strict=True)
            for request, token in pairs:
                self.tokens[request].append(token)
            self.contexts |= {turn.handle: turn.context_tokens for turn in outputs.turns}
        return True

    def _send(self, schedule: PartialSchedule) -> None:
        self.continued += len(schedule.continued)
        merged = self.merger.merge([self.merger.apply(0, schedule)])
        self.flying.append((schedule.step, self.runner.dispatch(merged)))

    def run_on(self) -> None:
        while self.move():
            pass


@pytest.fixture(scope="module")
def engine(tiny_model: Path, engine_cache: Path) -> Engine:
    return Engine(tiny_model, engine_cache)


def parameters(number: int, turn: int) -> Sampling:
    """Other ones in each turn, all with something that counts a turn's output."""
    return Sampling(
        seed=10 * number + turn,
        max_tokens=4 + turn,
        min_tokens=3,
        temperature=(number + turn) % 2 * 1.0,
        stop_token_ids=list(range(40)),
        presence_penalty=1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
    )


def test_turns_give_what_requests_of_their_own_would(engine: Engine) -> None:
    """More sessions than rows, and no prefix cache; every second turn of one is stopped."""
    draw = np.random.default_rng(1)
    texts: dict[int, list[int]] = {}
    turns: list[tuple[list[int], Sampling, list[int]]] = []
    sampling = {number: parameters(number, 0) for number in range(NUM_SESSIONS)}
    for turn in range(NUM_TURNS):
        for number in range(NUM_SESSIONS):
            new = draw.integers(0, engine.runner.vocab_size, int(draw.integers(1, 30))).tolist()
            sampling[number] = parameters(number, turn)
            if turn == 0:
                engine.add(number, new, sampling[number], resumable=True)
            else:
                message = AppendInput(
                    handle=number, sequence=1, prompt_token_ids=pack_ints(new), sampling=sampling[number]
                )
                engine.scheduler.append(0, message, 0.0)
            texts[number] = texts.get(number, []) + new
            engine.tokens[number] = []
        stopped = -1
        if turn % 2:
            while len(engine.tokens[0]) < 2:
                assert engine.move()
            stopped = len(engine.tokens[0]) - 1
            engine.scheduler.stop_turn(0, StopTurn(handle=0, sequence=1, turn=turn + 1, n=stopped))
            engine.scheduler.take_turns()
        engine.run_on()
        for number in range(NUM_SESSIONS):
            turns.append((list(texts[number]), sampling[number], engine.tokens[number]))
            kept = stopped if number == 0 and stopped >= 0 else len(engine.tokens[number]) - 1
            texts[number] += engine.tokens[number][:kept]
        assert all(engine.contexts[number] == len(texts[number]) for number in range(NUM_SESSIONS) if stopped < 0)
    assert engine.continued >= NUM_TURNS - 1
    assert engine.scheduler.finish(0, None, "abort")
    for place, (prompt, asked, tokens) in enumerate(turns):
        engine.add(100 + place, prompt, asked, resumable=False)
        engine.run_on()
        assert engine.tokens[100 + place][: len(tokens)] == tokens
