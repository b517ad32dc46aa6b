"""vLLM's HTTP server on a stand-in for all that lies below the seam; a program of its own, scripted by its caller.

Lines on standard input are JSON objects that tell what the core is to do; every call it gets is a JSON line on standard
output. What a request is answered with follows from its prompt: greedy ones get it echoed, others get letters that
follow from their seed. Its priority says what happens then:

    0  it ends with reason stop
    1  it fails after two tokens
    2  after two tokens nothing comes any more
    3  it is refused
"""

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bus import log
from bus.config import Config
from bus.core import Peer
from bus.messages import Delta, ExecutorStatus, Generate, Load, Logprobs, RequestEnded, RequestStarted, Sampling
from bus.model_files import ModelSource
from frontend.bridge import Bridge
from frontend.params import ModelLimits
from frontend.seam import (
    AbortText,
    AddCall,
    CommandCall,
    CommandResult,
    Deliver,
    Delivery,
    RenderText,
    StatusUpdate,
    TextOutput,
)
from frontend.server import serve
from tests.tiny_model import EOS, MAX_POSITIONS

NORMAL, FAILS, STALLS, REFUSED = range(4)
VOCAB_SIZE = 259
FIRST_LETTER = 70
"""Some token id of the tiny model's tokenizer that is a printable character, as are the 20 after it."""
CLIENT = Peer("client", "client", 0, 1)


class ToyCore:
    """Answers calls on the thread that posts them: AsyncLLM's own."""

    def __init__(self, bridge: Bridge) -> None:
        self._deliver = bridge.deliver
        self._loads = {
            rank: Load(
                number=1,
                acknowledged=0,
                running=rank,
                waiting=3,
                pending_prefill_tokens=0,
                used_blocks=5,
                num_blocks=50,
                counters={
                    "scheduler_prompt_tokens": 100.0,
                    "scheduler_cached_prompt_tokens": 40.0,
                    "scheduler_preemptions": 7.0,
                    "scheduler_drafts": 5.0,
                    "scheduler_draft_tokens": 20.0,
                    "scheduler_accepted_tokens": 15.0,
                    "scheduler_accepted_tokens_per_pos/0": 9.0,
                    "scheduler_accepted_tokens_per_pos/1": 6.0,
                },
            )
            for rank in range(2)
        }

    def post(self, call: Any) -> None:
        print(json.dumps({"call": type(call).__name__, **msgspec.to_builtins(_without_prompt(call))}), flush=True)
        if isinstance(call, AddCall):
            for delivery in _answer(call):
                self._deliver(Deliver(call.rank or 0, [delivery]))
        elif isinstance(call, CommandCall):
            self._deliver(CommandResult(call.call_id, True, [], ""))

    def obey(self, line: str) -> None:
        """Take a line of standard input."""
        order = json.loads(line)
        if "ready" in order:
            executor = ExecutorStatus(model="tiny", max_model_len=MAX_POSITIONS, num_blocks=100, block_size=16)
            counters = {"bus_rejected_frames/client/invalid": 2.0, "unfinished_requests": 1.0}
            self._deliver(StatusUpdate(order["ready"], self._loads if order["ready"] else {}, executor, counters))
        elif "generate" in order:
            self._deliver(RenderText(CLIENT, msgspec.convert(order["generate"], Generate)))
        else:
            self._deliver(AbortText(CLIENT, order["abort"]))


def _answer(call: AddCall) -> Iterator[Delivery]:
    if call.priority == REFUSED:
        ended = RequestEnded(handle=0, reason="error", code="invalid", message="the toy refuses this")
        yield Delivery(call.request_id, memoryview(b""), None, None, ended)
        return
    prompt = np.frombuffer(call.prompt_token_ids, "<i4")
    tokens = prompt if call.sampling.temperature == 0 else _letters(call.sampling.seed)
    tokens = np.append(tokens, EOS)[: call.sampling.max_tokens]
    if call.priority != NORMAL:
        tokens = tokens[:2]
    yield Delivery(call.request_id, memoryview(b""), None, RequestStarted(handle=1, cached_tokens=1), None)
    yield from _of_prompt(call, prompt.tolist())
    for position, token in enumerate(tokens.tolist()):
        last = position == len(tokens) - 1 and call.priority == NORMAL
        reason = "length" if position + 1 == call.sampling.max_tokens else "stop"
        ended = RequestEnded(handle=1, reason=reason) if last else None
        yield Delivery(call.request_id, _ints([token]), _logprobs(token, call.sampling), None, ended)
    if call.priority == FAILS:
        ended = RequestEnded(handle=1, reason="error", code="unavailable", message="the toy has lost this")
        yield Delivery(call.request_id, memoryview(b""), None, None, ended)


def _of_prompt(call: AddCall, prompt: list[int]) -> Iterator[Delivery]:
    """Log-probabilities of a prompt, in parts: the value of a token is its place, and so on in halves."""
    most = call.sampling.prompt_logprobs
    for begin in range(1, len(prompt), 4) if most is not None else ():
        tokens = prompt[begin : begin + 4]
        values = [[-place - other / 2 for other in range(1 + most)] for place in range(begin, begin + len(tokens))]
        found = Logprobs(
            owner=1,
            positions=len(tokens),
            token_ids=_ints([token + other for token in tokens for other in range(1 + most)]),
            values=memoryview(np.asarray(values, "<f4").tobytes()),
            ranks=_ints([1] * len(tokens)),
            prompt_position=begin,
        )
        yield Delivery(call.request_id, memoryview(b""), prompt_logprobs=found)


def _letters(seed: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.random.default_rng(seed).integers(FIRST_LETTER, FIRST_LETTER + 20, 12).astype("<i4")


def _logprobs(token: int, sampling: Sampling) -> Logprobs | None:
    if sampling.logprobs is None:
        return None
    others = [token + 1 + place for place in range(sampling.logprobs)]
    values = [-2.5, *(-3.0 - place for place in range(sampling.logprobs))]
    return Logprobs(
        owner=1,
        positions=1,
        token_ids=_ints([token, *others]),
        values=memoryview(np.asarray(values, "<f4").tobytes()),
        ranks=_ints([1]),
    )


def _ints(values: list[int]) -> memoryview:
    return memoryview(np.asarray(values, "<i4").tobytes())


def _shown(logprobs: Logprobs | None) -> Any:
    if logprobs is None:
        return None
    shape = (logprobs.positions, -1)
    ids, values = np.frombuffer(logprobs.token_ids, "<i4"), np.frombuffer(logprobs.values, "<f4")
    return logprobs.prompt_position, ids.reshape(shape).tolist(), values.reshape(shape).tolist()


def _without_prompt(call: Any) -> Any:
    """The call as it is logged: arrays as lists."""
    if isinstance(call, AddCall):
        prompt = np.frombuffer(call.prompt_token_ids, "<i4").tolist()
        return {**msgspec.structs.asdict(call), "prompt_token_ids": prompt}
    if isinstance(call, TextOutput):
        message = msgspec.structs.asdict(call.message)
        if isinstance(call.message, Delta):
            message["token_ids"] = np.frombuffer(message["token_ids"], "<i4").tolist()
            message["logprobs"] = _shown(call.message.logprobs)
        return {"message": message}
    return call


def main() -> None:
    model, port = Path(sys.argv[1]), int(sys.argv[2])
    log.configure("frontend", 0, 1, "info")
    bridge = Bridge()
    core = ToyCore(bridge)
    threading.Thread(target=lambda: [core.obey(line) for line in sys.stdin], daemon=True).start()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    source = ModelSource("tiny", model, gguf=None, prepared=False)
    limits = ModelLimits(VOCAB_SIZE, MAX_POSITIONS, (EOS,))
    settings = json.loads(os.environ.get("TOY_SETTINGS", "{}"))
    config = Config(port=port, otlp_traces_endpoint=os.environ["TOY_TRACES"], **settings)
    asyncio.run(serve(config, 0, source, limits, sock, bridge, core.post))


if __name__ == "__main__":
    main()
