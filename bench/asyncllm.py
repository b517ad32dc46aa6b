"""Tokens per second that vLLM's AsyncLLM turns over in one process, for 1,024 streams of token ids: the comparison for
the client bus. ``python -m bench.asyncllm``. No HTTP and no engine: every stream is given one token after the other.
"""

import asyncio
import json
import time

from bus import model_files
from bus.config import load
from bus.wire import pack_ints
from frontend.params import ModelLimits
from frontend.seam import AddCall, Call, Deliver, Delivery
from frontend.sight import Histogram, Sight

STREAMS = 1024
STEPS = 60
SKIP = 10


async def measure() -> float:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from frontend import server
    from frontend.engine import BusLLM
    from frontend.metrics import EngineStatus

    config = load()
    source = model_files.resolve(config)
    facts = model_files.read(source.folder)
    limits = ModelLimits(facts.vocab_size, facts.max_positions, facts.eos_token_ids)
    arguments = server._arguments(config, 0, source, limits)
    names: list[str] = []

    def post(call: Call) -> None:
        if isinstance(call, AddCall):
            names.append(call.request_id)

    sight = Sight(0, 2, lambda: (Histogram(), Histogram()))
    engine = BusLLM(
        server._vllm_config(config, arguments),
        post,
        EngineStatus(0),
        log_stats=True,
        ranks=2,
        sight=sight,
        pooling="last",
    )
    received = 0

    async def read(number: int) -> None:
        nonlocal received
        params = SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, params, str(number)):
            received += len(output.outputs[0].token_ids)

    readers = [asyncio.create_task(read(number)) for number in range(STREAMS)]
    while len(names) < STREAMS:
        await asyncio.sleep(0.01)
    token = pack_ints([100])
    begin = 0.0
    for step in range(STEPS):
        if step == SKIP:
            begin = time.perf_counter()
        for rank in range(2):
            outputs = [Delivery(name, token, None, None, None) for name in names[rank::2]]
            engine.client.on_deliver(Deliver(rank, outputs))
        while received < STREAMS * (step + 1):
            await asyncio.sleep(0)
    rate = STREAMS * (STEPS - SKIP) / (time.perf_counter() - begin)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    engine.shutdown()
    return rate


if __name__ == "__main__":
    print(json.dumps({"tokens_per_s": asyncio.run(measure())}))
