"""A rank as the executor sees one: a peer on the step bus that sends what a test tells it to."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq

from bus.config import Config
from bus.messages import (
    EXECUTOR_TO_RANK,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Adapters,
    AdaptersHeld,
    Goodbye,
    Heartbeat,
    Hello,
    KvPool,
    Logprobs,
    Message,
    NewRow,
    PartialSchedule,
    Pooled,
    ResumeRow,
    Sampling,
    StepResult,
    Welcome,
)
from bus.wire import Codec, pack_ints, routing_id, unpack_ints

DEADLINE_S = 60.0
GREEDY = Sampling(seed=1, max_tokens=1000, temperature=0.0)


class WireRank:
    """One start of a rank. Row r of it has the blocks r × `blocks_per_row` and on; use it in a `with` block."""

    def __init__(self, config: Config, index: int, incarnation: int, blocks_per_row: int = 16) -> None:
        self.prompt_logprobs: list[Logprobs] = []
        self.pooled: list[Pooled] = []
        """Of all results so far."""
        self.adapters: list[str] = []
        """The identities of those that rows may have."""
        self._codec = Codec(EXECUTOR_TO_RANK, config.max_message_bytes)
        self._index = index
        self._incarnation = incarnation
        self._blocks_per_row = blocks_per_row
        self._executor = 0
        self._step = 0
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, routing_id("rank", index, incarnation))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(config.step_endpoint())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.send(Goodbye(reason="the test is over"))
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.close()

    def send(self, message: Message) -> None:
        """Send a message as this start of the rank to the start of the executor that it knows."""
        self.socket.send_multipart(self._codec.encode(self._incarnation, self._executor, message))

    def receive(self, deadline_s: float = DEADLINE_S) -> Message:
        """The next message that is no heartbeat, and not about adapters; the test fails if none comes."""
        until = time.monotonic() + deadline_s
        while self.socket.poll(max(0, round(1000 * (until - time.monotonic())))):
            frame = self._codec.decode(self.socket.recv_multipart())
            if isinstance(frame.message, Welcome):
                self._executor = frame.sender
            if isinstance(frame.message, Adapters):
                self.adapters = frame.message.identities
                self.send(AdaptersHeld(number=frame.message.number))
            elif not isinstance(frame.message, Heartbeat):
                return frame.message
        raise AssertionError(f"rank {self._index} got nothing for {deadline_s:g} s")

    def meet(self) -> KvPool:
        """Say Hello; returns what this rank may use."""
        self.send(
            Hello(
                role="rank",
                index=self._index,
                incarnation=self._incarnation,
                major=PROTOCOL_MAJOR,
                minor=PROTOCOL_MINOR,
            )
        )
        assert isinstance(self.receive(), Welcome)
        pool = self.receive()
        assert isinstance(pool, KvPool)
        return pool

    def new_row(self, row: int, prompt: Sequence[int], sampling: Sampling = GREEDY, adapter: str = "") -> NewRow:
        """A request that enters `row`, with all the blocks of it."""
        return NewRow(
            row=row,
            request_id=f"r{row}",
            prompt_token_ids=pack_ints(list(prompt)),
            block_ids=self._blocks(row),
            sampling=sampling,
            adapter=adapter,
        )

    def resume_row(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> ResumeRow:
        """A request that enters `row` again, with nothing computed."""
        return ResumeRow(
            row=row,
            request_id=f"r{row}",
            token_ids=pack_ints([*prompt, *output]),
            num_output_tokens=len(output),
            block_ids=self._blocks(row),
            sampling=GREEDY,
        )

    def schedule(self, counts: dict[int, int], **setups: Any) -> int:
        """Send a schedule that runs `counts` tokens of each row; returns its number."""
        self._step += 1
        self.send(
            PartialSchedule(
                step=self._step,
                rows=pack_ints(list(counts)),
                num_tokens=pack_ints(list(counts.values())),
                more=True,
                **setups,
            )
        )
        return self._step

    def result(self) -> list[int]:
        """The tokens of the next step result, which must be what comes next."""
        message = self.receive()
        assert isinstance(message, StepResult), message
        self.pooled += message.pooled
        self.prompt_logprobs += [found for found in message.logprobs if found.prompt_position]
        return [int(token) for token in unpack_ints(message.tokens)]

    def decode(self, rows: Sequence[int], steps: int) -> dict[int, list[int]]:
        """Run `rows`, whose last tokens are drawn or being drawn, for `steps` steps, two at a time in flight."""
        drawn: dict[int, list[int]] = {row: [] for row in rows}
        self.schedule(dict.fromkeys(rows, 1))
        for step in range(steps):
            if step + 1 < steps:
                self.schedule(dict.fromkeys(rows, 1))
            for row, token in zip(rows, self.result(), strict=True):
                drawn[row].append(token)
        return drawn

    def _blocks(self, row: int) -> memoryview:
        first = row * self._blocks_per_row
        return pack_ints(np.arange(first, first + self._blocks_per_row, dtype=np.int32))
