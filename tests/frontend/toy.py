"""A stand-in for all that is below the seam: a thread that answers calls with canned tokens."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bus.messages import ExecutorStatus, Load, RequestEnded, RequestStarted
from frontend.seam import AddCall, CommandCall, CommandResult, Deliver, Delivery, StatusUpdate


class ToyCore:
    """Gives each request `reply` one token at a time, then ends it."""

    def __init__(self, deliver: Callable[[Any], None], reply: list[int]) -> None:
        self._deliver = deliver
        self._reply = reply
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        status = ExecutorStatus(model="toy", max_model_len=8192, num_blocks=100, block_size=16)
        load = Load(number=1, acknowledged=0, running=0, waiting=0, pending_prefill_tokens=0, num_blocks=50)
        self._deliver(StatusUpdate(True, {0: load, 1: load}, status, {"bus_sent_frames/client": 3.0}))
        self._thread.start()

    def post(self, call: Any) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        handle = 0
        while True:
            call = self._calls.get()
            self.calls.append(call)
            if isinstance(call, AddCall):
                handle += 1
                tokens = self._reply[: call.sampling.max_tokens]
                for number, token in enumerate(tokens):
                    started = RequestStarted(handle=handle) if number == 0 else None
                    last = number == len(tokens) - 1
                    ended = RequestEnded(handle=handle, reason="stop") if last else None
                    token_ids = memoryview(np.asarray([token], "<i4").tobytes())
                    self._deliver(Deliver(0, [Delivery(call.request_id, token_ids, None, started, ended)]))
            elif isinstance(call, CommandCall):
                self._deliver(CommandResult(call.call_id, True, [], ""))
