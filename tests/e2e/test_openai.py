"""The OpenAI API on the embedded model, through the `openai` client: what is asked for is what comes back."""

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

from bus.messages import UnfinishedRequests
from frontend.client import Client
from tests.e2e.conftest import Reference, metrics
from tests.engine import Engine

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The three primary colours are"


class Api:
    """The API of frontend 0, with the model filled in."""

    def __init__(self, engine: Engine) -> None:
        self.url = f"http://{engine.config.host}:{engine.port()}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt: Any = PROMPT, **options: Any) -> Any:
        """A greedy completion of 12 tokens, unless `options` say otherwise."""
        known = {"temperature": 0.0, "max_tokens": 12} | options
        extra = {name: known.pop(name) for name in list(known) if name in EXTRA}
        return self.client.completions.create(model=self.model, prompt=prompt, extra_body=extra, **known)

    def tokens(self, text: str) -> list[int]:
        answer = httpx.post(f"{self.url}/tokenize", json={"prompt": text}).json()
        return list(answer["tokens"])


EXTRA = {
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "priority",
    "repetition_penalty",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop_token_ids",
    "top_k",
    "use_beam_search",
}


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    return Api(engine)


def text_of(stream: Iterator[Any]) -> tuple[str, str]:
    """The text of a stream of chat or completion chunks, and why it ended."""
    text, reason = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_streams_give_what_whole_answers_give(api: Api) -> None:
    whole = api.complete(max_tokens=30).choices[0]
    assert text_of(api.complete(max_tokens=30, stream=True)) == (whole.text, whole.finish_reason)
    chat = api.client.chat.completions
    whole = chat.create(model=api.model, messages=FRANCE, temperature=0, max_tokens=30).choices[0]
    stream = chat.create(model=api.model, messages=FRANCE, temperature=0, max_tokens=30, stream=True)
    assert text_of(stream) == (whole.message.content, whole.finish_reason)
    assert "Paris" in whole.message.content


def test_usage(api: Api) -> None:
    stream = api.complete(stream=True, stream_options={"include_usage": True}, ignore_eos=True)
    usage = [chunk.usage for chunk in stream if chunk.usage][-1]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(api.tokens(PROMPT)), 12)


def test_responses_and_messages_answer(api: Api) -> None:
    answer = api.client.responses.create(
        model=api.model, input=FRANCE[0]["content"], temperature=0, max_output_tokens=30
    )
    assert "Paris" in answer.output_text
    body = {"model": api.model, "messages": FRANCE, "temperature": 0, "max_tokens": 30}
    message = httpx.post(f"{api.url}/v1/messages", json=body, timeout=60).json()
    assert "Paris" in message["content"][0]["text"]


def test_stop_strings(api: Api) -> None:
    text = api.complete(max_tokens=40, ignore_eos=True).choices[0].text
    stop = text[10:14]
    where = text.index(stop)
    for stream in (False, True):
        answer = api.complete(max_tokens=40, ignore_eos=True, stop=[stop], stream=stream)
        got = text_of(answer) if stream else (answer.choices[0].text, answer.choices[0].finish_reason)
        assert got == (text[:where], "stop")
    with_stop = api.complete(max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert with_stop.choices[0].text == text[: where + len(stop)]


def test_stop_tokens_and_min_tokens(api: Api) -> None:
    tokens = api.complete(return_token_ids=True, ignore_eos=True).choices[0].token_ids
    stop = tokens[3]
    first = tokens.index(stop)
    choice = api.complete(stop_token_ids=[stop], ignore_eos=True, return_token_ids=True).choices[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (tokens[: first + 1], "stop", stop)
    choice = api.complete(stop_token_ids=[stop], ignore_eos=True, return_token_ids=True, min_tokens=8).choices[0]
    assert len(choice.token_ids) >= 8
    assert stop not in choice.token_ids[:7]


def test_children_differ_and_seeds_repeat(api: Api) -> None:
    options = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    unseeded = api.complete(n=4, **options)
    assert len({choice.text for choice in unseeded.choices}) == 4
    first, second = (api.complete(n=3, seed=77, **options) for _ in range(2))
    texts = [choice.text for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert texts == [choice.text for choice in sorted(second.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 3
    assert api.complete(seed=78, **options).choices[0].text == texts[1]


def test_sampling_parameters_have_their_effect(api: Api) -> None:
    greedy = api.complete(return_token_ids=True, ignore_eos=True).choices[0].token_ids
    for cold in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        options = {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True} | cold
        assert api.complete(**options).choices[0].token_ids == greedy
    biased = api.complete(logit_bias={"5000": 100}, max_tokens=3, return_token_ids=True)
    assert biased.choices[0].token_ids == [5000] * 3
    allowed = api.complete(allowed_token_ids=[7000, 7001], max_tokens=6, temperature=1.0, return_token_ids=True)
    assert set(allowed.choices[0].token_ids) <= {7000, 7001}
    word = api.complete(max_tokens=12).choices[0].text.split()[0].strip(",.:")
    assert word not in api.complete(bad_words=[word], max_tokens=12).choices[0].text.split()
    repeats = [api.complete(repetition_penalty=p, max_tokens=60, return_token_ids=True) for p in (1.0, 1.8)]
    assert len(set(repeats[1].choices[0].token_ids)) > len(set(repeats[0].choices[0].token_ids))
    frequent = api.complete(logit_bias={"5000": 100}, frequency_penalty=2.0, max_tokens=60, return_token_ids=True)
    assert len(set(frequent.choices[0].token_ids)) > 1, "after some 50 times the penalty outweighs the bias"


def test_logprobs_are_those_of_transformers(api: Api, reference: Reference) -> None:
    prompt = api.tokens(PROMPT)
    by_id = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # two tokens may be the same text
    choice = api.complete(prompt, logprobs=5, ignore_eos=True, **by_id).choices[0]
    expected = reference.logprobs(prompt, choice.token_ids)
    for place, value in enumerate(choice.logprobs.token_logprobs):
        assert value == pytest.approx(float(expected[place, choice.token_ids[place]]), abs=1e-3)
        for name, logprob in choice.logprobs.top_logprobs[place].items():
            assert logprob == pytest.approx(float(expected[place, int(name.removeprefix("token_id:"))]), abs=1e-3)
        top = sorted(choice.logprobs.top_logprobs[place].values(), reverse=True)
        best = sorted(expected[place].tolist(), reverse=True)
        assert top[:5] == pytest.approx(best[:5], abs=1e-3)
    sampled = api.complete(prompt, logprobs=0, temperature=1.0, seed=3, ignore_eos=True, return_token_ids=True).choices[
        0
    ]
    expected = reference.logprobs(prompt, sampled.token_ids)
    for place, value in enumerate(sampled.logprobs.token_logprobs):
        assert value == pytest.approx(float(expected[place, sampled.token_ids[place]]), abs=1e-3)


def test_chat_logprobs(api: Api) -> None:
    answer = api.client.chat.completions.create(
        model=api.model, messages=FRANCE, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    for position in answer.choices[0].logprobs.content:
        assert len(position.top_logprobs) == 3
        assert position.logprob == pytest.approx(position.top_logprobs[0].logprob)
        assert math.exp(position.logprob) <= 1.0001


def test_several_prompts_in_one_request(api: Api) -> None:
    prompts = [PROMPT, "Water boils at", "The Earth is"]
    together = api.complete(prompts, ignore_eos=True)
    apart = [api.complete(prompt, ignore_eos=True).choices[0].text for prompt in prompts]
    assert [choice.text for choice in sorted(together.choices, key=lambda choice: choice.index)] == apart


def test_tokenize(api: Api) -> None:
    tokens = api.tokens(PROMPT)
    assert httpx.post(f"{api.url}/detokenize", json={"tokens": tokens}).json()["prompt"] == PROMPT
    chat = httpx.post(f"{api.url}/tokenize", json={"messages": FRANCE}).json()
    assert chat["count"] > len(api.tokens(FRANCE[0]["content"]))
    assert chat["max_model_len"] == 8192


def test_a_disconnect_ends_the_request_in_the_ranks(engine: Engine, api: Api, client: Client) -> None:
    stream = api.complete(max_tokens=4000, ignore_eos=True, stream=True)
    next(iter(stream))
    stream.close()
    engine.wait_until(lambda: client.command(UnfinishedRequests()).value == 0, "the request has ended", 30)


def test_metrics_tell_what_was_done(engine: Engine, api: Api) -> None:
    def total(name: str) -> float:
        return sum(metrics(engine, name).values())

    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [total(name) for name in names]
    prompt = api.tokens(PROMPT)
    api.complete(prompt, ignore_eos=True)
    after = [total(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [12, len(prompt), 1]
    assert httpx.get(f"{api.url}/health").status_code == 200


def test_sixteen_streams_at_once(api: Api) -> None:
    async def main() -> tuple[int, float]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", timeout=120, max_retries=0) as http:

            async def one(number: int) -> int:
                stream = await http.completions.create(
                    model=api.model,
                    prompt=[1000 + number] * 128,
                    max_tokens=64,
                    temperature=1.0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                return [chunk.usage.completion_tokens async for chunk in stream if chunk.usage][-1]

            start = time.monotonic()
            counts = await asyncio.gather(*(one(number) for number in range(16)))
            return sum(counts), time.monotonic() - start

    tokens, seconds = asyncio.run(main())
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    assert tokens == 16 * 64
