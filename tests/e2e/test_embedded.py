"""The embedded model through the whole engine: the right tokens, the same on every way in, and nothing left behind."""

import asyncio
import random
import subprocess
import sys
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from bus.messages import RequestCounts, TokenCount, UnfinishedRequests
from frontend.client import AsyncClient, Client
from tests.e2e.conftest import Reference, metrics
from tests.engine import ROOT, Engine

pytestmark = pytest.mark.timeout(500)  # the first test starts the engine, perhaps with nothing compiled

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def api(engine: Engine, kind: type = openai.OpenAI) -> Any:
    return kind(base_url=f"http://{engine.config.host}:{engine.port()}/v1", api_key="none", timeout=120, max_retries=0)


def test_paris(engine: Engine) -> None:
    model = api(engine).models.list().data[0].id
    answer = api(engine).chat.completions.create(model=model, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def prompts() -> list[list[int]]:
    """40 prompts: every length that may matter, some with a shared prefix that spans blocks and chunks."""
    draw = np.random.default_rng(5)
    lengths = [1, 2, 3, 5, 8, 15, 16, 17, 20, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 112, 127, 128, 129]
    lengths += [160, 200, 255, 256, 257, 513, 1000]
    plain = [draw.integers(10, 49000, length).tolist() for length in lengths]
    prefix = draw.integers(10, 49000, 130).tolist()
    shared = [prefix + draw.integers(10, 49000, length).tolist() for length in (1, 2, 7, 8, 9, 23, 24, 40)]
    return [*plain, *shared]


async def complete_all(endpoint: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Run prompts, 32 at once; their output tokens."""
    places = asyncio.Semaphore(32)
    async with AsyncClient(endpoint) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with places:
                (completion,) = await client.complete(prompt, text_output=False, **options)
                return completion.token_ids

        return await asyncio.gather(*map(one, prompts))


def test_greedy_tokens_are_those_of_transformers(engine: Engine, reference: Reference) -> None:
    asked = prompts()
    assert len(asked) == 40
    endpoint = engine.config.client_endpoint(0)
    before = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    outputs = asyncio.run(complete_all(endpoint, asked, temperature=0.0, max_tokens=16, ignore_eos=True))
    again = asyncio.run(complete_all(endpoint, asked[-8:], temperature=0.0, max_tokens=16, ignore_eos=True))
    assert {len(output) for output in outputs} == {16}
    changed = [place for place in range(8) if again[place] != outputs[place - 8]]  # only a tie may do that
    repeated = [(asked[place - 8], again[place]) for place in changed]
    reference.check_greedy([*zip(asked, outputs, strict=True), *repeated])
    assert reference.ties <= reference.positions // 1000 + 1
    print(f"{reference.positions} positions, {reference.ties} ties")
    after = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    assert len(after) == 2
    assert all(after[rank] > before.get(rank, 0) for rank in after), "both ranks took part"
    hits = metrics(engine, "vllm:prefix_cache_hits_total")
    assert sum(hits.values()) > 0, "the prefix cache was used"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 42, "top_p": 0.95}])
def test_the_same_request_gives_the_same_tokens_on_every_way_in(
    engine: Engine, client: Client, sampling: dict[str, Any]
) -> None:
    prompt = [504, 3575, 282, 4649, 314]
    model = api(engine).models.list().data[0].id
    http = api(engine).completions.create(
        model=model, prompt=prompt, max_tokens=12, extra_body={"return_token_ids": True}, **sampling
    )
    over_http = http.choices[0].token_ids
    (direct,) = client.complete(prompt, text_output=False, max_tokens=12, **sampling)
    (text,) = client.complete(prompt, max_tokens=12, **sampling)
    assert len(over_http) == 12
    assert direct.token_ids == over_http
    assert text.token_ids == over_http
    assert text.text == http.choices[0].text
    for rank in range(2):
        (pinned,) = client.complete(prompt, text_output=False, max_tokens=12, rank=rank, **sampling)
        assert pinned.token_ids == over_http


@pytest.mark.parametrize("script", ["generate.py", "raw_zmq.py"])
def test_the_example_scripts_answer(engine: Engine, script: str) -> None:
    command = [sys.executable, f"examples/{script}", engine.config.client_endpoint(0)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "8"], None),
        (["chat", "--temperature", "0"], "What is the capital of France?\nAnd of Italy?\n"),
    ],
)
def test_the_command_line_answers(engine: Engine, arguments: list[str], text: str | None) -> None:
    command = [sys.executable, "-m", "frontend.cli", *arguments, "--endpoint", engine.config.client_endpoint(0)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": "."}, input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_streams_that_are_read_cut_off_or_aborted_all_end_and_leave_nothing(engine: Engine) -> None:
    before = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    asyncio.run(mixed_load(engine, random.Random(11)))
    with Client(engine.config.client_endpoint(0)) as client:
        engine.wait_until(lambda: client.command(RequestCounts()).value == [0, 0], "all requests have ended", 30)
        assert client.command(UnfinishedRequests()).value == 0
        assert client.command(TokenCount()).value == [0, 0]
    empty = ("rankbus_rank_used_blocks", "rankbus_frontend_unfinished_requests")
    for name in (*empty, "rankbus_frontend_unfinished_text_requests", "vllm:num_requests_running"):
        engine.wait_until(lambda name=name: set(metrics(engine, name).values()) == {0.0}, f"{name} is 0", 10)
    after = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    done = [after[rank] - before[rank] for rank in sorted(after)]
    assert min(done) > sum(done) / 4, f"both ranks share the work: {done}"


async def mixed_load(engine: Engine, draw: random.Random) -> None:
    """64 streams at once: over HTTP and the client bus; read to the end, cut off by a disconnect, or aborted."""
    model = api(engine).models.list().data[0].id
    http: openai.AsyncOpenAI = api(engine, openai.AsyncOpenAI)
    async with AsyncClient(engine.config.client_endpoint(0)) as client, http:

        async def over_http(prompt: list[int], tokens: int, leave_after: int | None) -> str:
            stream = await http.completions.create(
                model=model, prompt=prompt, max_tokens=tokens, stream=True, temperature=1.0
            )
            count = 0
            async with stream:
                async for chunk in stream:
                    count += 1
                    if count == leave_after:
                        return "left"
                    if chunk.choices and chunk.choices[0].finish_reason:
                        return str(chunk.choices[0].finish_reason)
            raise AssertionError("the stream ended without a finish reason")

        async def over_bus(number: int, prompt: list[int], tokens: int, leave_after: int | None) -> str:
            name, count = f"mixed-{number}", 0
            pieces = client.generate(prompt, request_id=name, text_output=number % 4 == 1, max_tokens=tokens)
            async for piece in pieces:
                if piece.finished is not None:
                    return str(piece.finished.reason)
                count += 1
                if count == leave_after:
                    await client.abort(name)
            raise AssertionError("the stream ended without a Finished")

        def one(number: int) -> Any:
            prompt = [draw.randrange(10, 49000) for _ in range(draw.choice([1, 5, 20, 60, 150]))]
            tokens = draw.randrange(2, 40)
            leave_after = draw.randrange(1, 10) if draw.random() < 0.4 else None
            if number % 2:
                return over_bus(number, prompt, tokens, leave_after)
            return over_http(prompt, tokens, leave_after)

        ends = await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(64))), 110)
    assert set(ends) <= {"stop", "length", "abort", "left"}
    assert ends.count("left") > 3
    assert ends.count("abort") > 3


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [1] * 9000, "max_tokens": 1}, "8192"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 2}, "top_p"),
    ("/v1/completions", {"prompt": [], "max_tokens": 1}, ""),
    ("/v1/completions", {"prompt": [99999], "max_tokens": 1}, ""),
    ("/v1/chat/completions", {"messages": "hello"}, ""),
    ("/v1/chat/completions", {"messages": FRANCE, "structured_outputs": {"regex": "("}}, "the grammar cannot be used"),
]


@pytest.mark.parametrize(("path", "body", "word"), BAD)
def test_bad_requests_get_a_4xx_with_a_sentence(engine: Engine, path: str, body: dict[str, Any], word: str) -> None:
    url = f"http://{engine.config.host}:{engine.port()}{path}"
    response = httpx.post(url, json={"model": api(engine).models.list().data[0].id} | body, timeout=60)
    assert response.status_code in (400, 404, 422), response.text
    assert word in response.text
    assert len(response.json()["error"]["message"]) > 10
