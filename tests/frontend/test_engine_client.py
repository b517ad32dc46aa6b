"""vLLM's engine core client over the seam: what becomes of deliveries and commands."""

import asyncio
import inspect
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

from bus.messages import GetPauseState, LoadAdapter, Pooling, RequestEnded, RequestStarted, ResetPrefixCache, SetPause
from bus.sampling import pooled
from frontend.engine_client import BusClient
from frontend.errors import RequestError
from frontend.seam import AbortCall, AddCall, CommandCall, CommandResult, Deliver, Delivery, Detokenised

NONE = memoryview(b"")


class Seam:
    """A client whose calls are kept, and whose commands are answered by `answer`."""

    def __init__(self, answer: CommandResult | None = None, timed: bool = False) -> None:
        self.calls: list[Any] = []
        self.failed: list[tuple[str, str, int]] = []
        self.answer = answer
        self.client = BusClient(self._post, self._fail, ranks=2, max_model_len=lambda: 100, pooling="mean", timed=timed)

    def _post(self, call: Any) -> None:
        self.calls.append(call)
        if isinstance(call, CommandCall) and self.answer is not None:
            self.client.on_command_result(msgspec.structs.replace(self.answer, call_id=call.call_id))

    def _fail(self, request_id: str, error: Any) -> None:
        self.failed.append((request_id, error.message, error.http_status))

    async def add(self, request_id: str = "a", **params: Any) -> None:
        await self.client.add_request_async(request(request_id, **params))

    async def output(self) -> EngineCoreOutputs:
        return await asyncio.wait_for(self.client.get_output_async(), 5)


def request(request_id: str = "a", **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(**({"max_tokens": 10} | params)),
        pooling_params=None,
        arrival_time=1.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def tokens(*ids: int) -> memoryview:
    return memoryview(np.asarray(ids, "<i4").tobytes())


def delivery(request_id: str, token_ids: memoryview, **given: Any) -> Delivery:
    return Delivery(request_id, token_ids, given.get("logprobs"), given.get("started"), given.get("ended"))


def test_add_and_outputs() -> None:
    async def main() -> None:
        seam = Seam()
        await seam.add("a")
        await seam.add("b")
        call = seam.calls[0]
        assert isinstance(call, AddCall)
        assert (call.request_id, bytes(call.prompt_token_ids), call.arrival_time) == ("a", bytes(tokens(1, 2, 3)), 1.5)
        ended = RequestEnded(handle=1, reason="stop", stop_reason=7)
        seam.client.on_deliver(
            Deliver(1, [delivery("a", tokens(5, 6)), delivery("b", tokens(7), ended=ended), delivery("?", tokens(1))])
        )
        outputs = await seam.output()
        assert outputs.engine_index == 1
        assert [(output.request_id, output.new_token_ids) for output in outputs.outputs] == [("a", [5, 6]), ("b", [7])]
        assert (outputs.outputs[1].finish_reason, outputs.outputs[1].stop_reason) == (FinishReason.STOP, 7)
        assert outputs.outputs[0].finish_reason is None
        assert seam.client.dp_engines_running()

    asyncio.run(main())


def test_a_request_names_its_adapter_and_a_refusal_of_one_has_the_executors_code() -> None:
    async def main() -> None:
        seam = Seam(CommandResult(0, None, [], "/nowhere holds no adapter", "invalid"))
        asked = request("a")
        asked.lora_request = LoRARequest("sql", 1, "/sql")
        await seam.client.add_request_async(asked)
        assert seam.calls[0].adapter == "sql"
        with pytest.raises(RequestError, match="/nowhere holds no adapter") as refused:
            await seam.client.command(LoadAdapter(name="sql", path="/nowhere"))
        assert refused.value.status_code == 400

    asyncio.run(main())


@pytest.mark.parametrize("timed", [True, False])
def test_the_journal_is_told_how_long_a_steps_outputs_took(timed: bool) -> None:
    async def main() -> None:
        seam = Seam(timed=timed)
        await seam.add("a")
        for step in (7, 0, 8):
            seam.client.on_deliver(Deliver(1, [delivery("a", tokens(5))], step))
        begun = time.monotonic()
        for _ in range(3):
            await seam.output()
        told = [call for call in seam.calls if isinstance(call, Detokenised)]
        assert [(call.rank, call.step) for call in told] == ([(1, 7)] if timed else [])  # 8 is still under way
        for call in told:
            assert begun <= call.begun <= call.begun + call.seconds <= time.monotonic()

    asyncio.run(main())


def test_first_output_has_tokens_and_the_prefill() -> None:
    """A request may start steps before its first token: vLLM takes its first output for its first token."""

    async def main() -> None:
        seam = Seam()
        await seam.add("a")
        started = RequestStarted(handle=1, queued_s=0.5, cached_tokens=2)
        seam.client.on_deliver(Deliver(0, [delivery("a", NONE, started=started)]))
        seam.client.on_deliver(Deliver(0, [delivery("a", tokens(5))]))
        (output,) = (await seam.output()).outputs
        assert output.new_token_ids == [5]
        assert output.prefill_stats is not None
        assert (output.prefill_stats.num_cached_tokens, output.prefill_stats.num_computed_tokens) == (2, 1)
        assert output.events is not None
        assert output.events[1].timestamp - output.events[0].timestamp == pytest.approx(0.5)
        seam.client.on_deliver(Deliver(0, [delivery("a", tokens(6))]))
        (output,) = (await seam.output()).outputs
        assert output.events is None

    asyncio.run(main())


@pytest.mark.parametrize("use_activation", [None, True, False])
def test_an_embedding_is_asked_for_as_is_set_and_comes_with_the_end(use_activation: bool | None) -> None:
    async def main() -> None:
        seam = Seam()
        params = PoolingParams(task="embed", use_activation=use_activation)
        asked = msgspec.structs.replace(request(), sampling_params=None, pooling_params=params)
        await seam.client.add_request_async(asked)
        assert seam.calls[0].sampling == pooled(Pooling(kind="mean", normalize=use_activation is not False))
        started = RequestStarted(handle=1, cached_tokens=2)
        seam.client.on_deliver(Deliver(1, [delivery("a", NONE, started=started)]))
        vector = memoryview(np.array([1.5, -2.0], "<f4").tobytes())
        told = delivery("a", NONE, ended=RequestEnded(handle=1, reason="stop"))
        seam.client.on_deliver(Deliver(1, [msgspec.structs.replace(told, vector=vector)]))
        (output,) = (await seam.output()).outputs
        assert output.pooling_output is not None
        assert output.pooling_output.tolist() == [1.5, -2.0]
        assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.STOP)
        shorter = msgspec.structs.replace(asked, pooling_params=PoolingParams(task="embed", dimensions=1))
        with pytest.raises(RequestError, match="`dimensions` is not supported"):
            await seam.client.add_request_async(shorter)

    asyncio.run(main())


def test_abort_is_of_known_requests_and_silences_them() -> None:
    async def main() -> None:
        seam = Seam()
        await seam.add("a")
        await seam.client.abort_requests_async(["a", "x"])
        await seam.client.abort_requests_async(["a"])
        assert [call for call in seam.calls if isinstance(call, AbortCall)] == [AbortCall(request_ids=["a"])]
        seam.client.on_deliver(Deliver(0, [delivery("a", tokens(5))]))
        assert seam.client._outputs.empty()
        assert not seam.client.dp_engines_running()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "status"), [("invalid", 400), ("unsupported", 400), ("unavailable", 503), ("internal", 500), ("", 500)]
)
def test_errors_go_past_vllms_outputs(code: str, status: int) -> None:
    async def main() -> None:
        seam = Seam()
        await seam.add("a")
        ended = RequestEnded(handle=1, reason="error", code=code, message="a sentence")
        seam.client.on_deliver(Deliver(0, [delivery("a", tokens(5), ended=ended)]))
        assert seam.failed == [("a", "a sentence", status)]
        assert seam.client._outputs.empty()
        assert not seam.client.dp_engines_running()

    asyncio.run(main())


def test_seeds() -> None:
    """Unseeded children of `n` share one SamplingParams: it must not be changed."""

    async def main() -> None:
        seam = Seam()
        shared = request()
        for number in range(3):
            shared.request_id = str(number)
            await seam.client.add_request_async(shared)
        seeds = {call.sampling.seed for call in seam.calls}
        assert len(seeds) == 3
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert shared.sampling_params is not None
        assert shared.sampling_params.seed is None
        await seam.add(seed=-3)
        assert seam.calls[-1].sampling.seed == 2**63 - 3

    asyncio.run(main())


def test_output_is_limited_to_the_context() -> None:
    async def main() -> None:
        seam = Seam()
        await seam.add(max_tokens=1000)
        assert seam.calls[0].sampling.max_tokens == 97

    asyncio.run(main())


def test_commands() -> None:
    async def main() -> None:
        seam = Seam(CommandResult(0, True, [], ""))
        assert await seam.client.reset_prefix_cache_async(reset_running_requests=True) is True
        assert seam.calls[-1].body == ResetPrefixCache(reset_running_requests=True)
        await seam.client.pause_scheduler_async("wait", clear_cache=True)
        assert [call.body for call in seam.calls[-2:]] == [SetPause(mode="wait"), ResetPrefixCache()]
        assert len({call.call_id for call in seam.calls}) == len(seam.calls)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (CommandResult(0, None, [], "rank 1 has no such command"), "rank 1 has no such command"),
        (CommandResult(0, True, [0, 1], ""), "no answer in time from ranks 0, 1"),
    ],
)
def test_failed_commands_raise(answer: CommandResult, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        asyncio.run(Seam(answer).client.reset_encoder_cache_async())


@pytest.mark.parametrize(("state", "paused"), [("unpaused", False), ("paused_new", True), ("paused_all", True)])
def test_pause_state(state: str, paused: bool) -> None:
    async def main() -> None:
        seam = Seam(CommandResult(0, state, [], ""))
        assert await seam.client.is_scheduler_paused_async() is paused
        assert seam.calls[-1].body == GetPauseState()

    asyncio.run(main())


def test_differing_pause_states_are_told() -> None:
    answer = CommandResult(0, ["unpaused", "paused_all"], [], "")
    with pytest.raises(RequestError, match="unpaused, paused_all"):
        asyncio.run(Seam(answer).client.is_scheduler_paused_async())


def _interface() -> list[str]:
    """All methods vLLM may call: those of the interface, and those AsyncLLM uses beyond it."""
    names = {name for name, _ in inspect.getmembers(EngineCoreClient, inspect.isfunction)}
    names |= {name for name, _ in inspect.getmembers(AsyncMPClient, inspect.iscoroutinefunction)}
    inner = ("call_utility", "get_kv_event_sources", "make_", "_")
    return sorted(name for name in names if not name.startswith(inner))


@pytest.mark.parametrize("name", _interface())
def test_every_method_works_or_is_refused_with_a_sentence(name: str) -> None:
    method = getattr(BusClient, name)
    assert method.__qualname__.startswith(("BusClient", "_refuser")), "this one is vLLM's"
    if not method.__qualname__.startswith("_refuser"):
        return
    with pytest.raises(RequestError, match="is not supported by this engine") as caught:
        method(Seam().client)
    assert caught.value.http_status == 400
