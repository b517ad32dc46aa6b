"""What a request may ask for does what it says: on every way in, and with either scheduler, of which each rank has one.

Tokens are compared with the plain definition on transformers' logits of the same model.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bus.messages import Sampling
from frontend.client import AsyncClient, Client
from tests.e2e.conftest import metrics, wait_for_blocks
from tests.engine import Engine
from tests.executor.definition import plain_adjust, sampling_of
from tests.tiny_model import EOS

DEADLINE_S = 120.0
START_S = 300.0
COUNT = 12
PROMPT = [*range(70, 90), 75, 80, 75]
LETTERS = list(range(68, 94))
"""Tokens that are printable characters."""

pytestmark = pytest.mark.timeout(400)  # the first test starts what all of them use


@pytest.fixture(scope="module")
def engine(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "num_blocks": 2000}
    with Engine(tiny_model, engine_cache, tool_call_parser="hermes", **limits) as engine:
        engine.start("executor-0", "rank-0", "frontend-0")
        engine.start("rank-1", scheduler="vllm")
        engine.wait_ready(START_S)
        engine["rank-1"].wait_for_log("rank ready", START_S, scheduler="vllm")
        wait_for_blocks(engine, DEADLINE_S)
        with Client(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as client:
            assert client.complete(PROMPT, text_output=False, max_tokens=1, rank=1)
        yield engine
        engine.check_running()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def post(engine: Engine, path: str, body: dict[str, Any], rank: int | None = None) -> Any:
    url = f"http://{engine.config.host}:{engine.port()}{path}"
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    response = httpx.post(url, json={"model": "tiny-llama"} | body, headers=headers, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


def complete(engine: Engine, rank: int | None = None, **options: Any) -> Any:
    """The first choice of a completion over HTTP, greedy unless said otherwise."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, "return_token_ids": True} | options
    return post(engine, "/v1/completions", body, rank)["choices"][0]


def greedy(model: Any, asked: Sampling, count: int = COUNT) -> list[int]:
    """What the definition says comes after the prompt."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].numpy()
        tokens.append(int(plain_adjust(logits, tokens, len(PROMPT), asked).argmax()))
        if tokens[-1] in (asked.eos_token_id, *asked.stop_token_ids):
            break
    return tokens[len(PROMPT) :]


GREEDY: dict[str, dict[str, Any]] = {
    "nothing": {"ignore_eos": True},
    "presence": {"presence_penalty": 1.7, "ignore_eos": True},
    "frequency": {"frequency_penalty": 1.3, "allowed_token_ids": LETTERS[:3]},
    "repetition": {"repetition_penalty": 1.9, "allowed_token_ids": LETTERS},
    "bias": {"logit_bias": {"71": 9.0, "80": -100.0}},
    "allowed": {"allowed_token_ids": LETTERS[:5]},
    "the end, later": {"min_tokens": 5, "logit_bias": {str(EOS): 100}},
    "stop tokens, later": {"min_tokens": 3, "stop_token_ids": LETTERS[4:], "allowed_token_ids": LETTERS},
    "together": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {"70": 2.0},
        "allowed_token_ids": LETTERS[:9],
        "min_tokens": 4,
        "stop_token_ids": LETTERS[2:4],
    },
}


def test_greedy_tokens_are_those_of_the_definition(engine: Engine, client: Client, reference: Any) -> None:
    for name, options in GREEDY.items():
        known = {key: value for key, value in options.items() if key != "ignore_eos"}
        bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
        eos = None if options.get("ignore_eos") else EOS
        expected = greedy(reference, sampling_of(**known | {"logit_bias": bias, "eos_token_id": eos}))
        on_bus = options | ({"logit_bias": bias} if bias else {})
        for rank in (0, 1):
            assert complete(engine, rank, **options)["token_ids"] == expected, (name, rank)
            for text_output in (False, True):
                limits = {"temperature": 0.0, "max_tokens": COUNT, "rank": rank, "text_output": text_output}
                (done,) = client.complete(PROMPT, **limits, **on_bus)
                assert done.token_ids == expected, (name, rank, text_output)


def test_words_that_must_not_come_are_those_of_the_definition(engine: Engine, client: Client, reference: Any) -> None:
    """A word of two tokens, as it is and after a space."""
    free = greedy(reference, sampling_of(allowed_token_ids=LETTERS))
    options: dict[str, Any] = {"allowed_token_ids": LETTERS, "ignore_eos": True}
    word = complete(engine, **options)["text"][3:5]
    tokens = [post(engine, "/tokenize", {"prompt": text})["tokens"] for text in (word, f" {word}")]
    assert tokens[0] == free[3:5]
    expected = greedy(reference, sampling_of(allowed_token_ids=LETTERS, bad_words_token_ids=tokens))
    assert expected != free
    for rank in (0, 1):
        assert complete(engine, rank, bad_words=[word], **options)["token_ids"] == expected
        (done,) = client.complete(PROMPT, temperature=0.0, max_tokens=COUNT, rank=rank, bad_words=[word], **options)
        assert done.token_ids == expected


def test_texts_stop_where_a_string_spans_tokens(engine: Engine, client: Client) -> None:
    options: dict[str, Any] = {"allowed_token_ids": LETTERS, "ignore_eos": True}
    text = complete(engine, **options)["text"]
    assert len(text) == COUNT
    stop = text[4:7]
    before = text[: text.index(stop)]
    for rank in (0, 1):
        for included, wanted in ((False, before), (True, before + stop)):
            asked = options | {"stop": [stop], "include_stop_str_in_output": included}
            choice = complete(engine, rank, **asked)
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (wanted, "stop", stop)
            (done,) = client.complete(PROMPT, temperature=0.0, max_tokens=COUNT, rank=rank, **asked)
            assert (done.text, done.finished.reason, done.finished.stop_reason) == (wanted, "stop", stop)


def test_a_seed_draws_the_same_on_every_way_in_and_among_64(engine: Engine, client: Client) -> None:
    drawn: dict[str, Any] = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.3}
    drawn |= {"ignore_eos": True, "max_tokens": 40}
    alone = complete(engine, 0, seed=9, **drawn)["token_ids"]
    for rank in (0, 1):
        children = post(
            engine, "/v1/completions", {"prompt": PROMPT, "return_token_ids": True, "n": 3, "seed": 8} | drawn, rank
        )
        found = {choice["index"]: choice["token_ids"] for choice in children["choices"]}
        assert found[1] == alone, "the children of a seed draw with it, and with those after it"
        assert len(set(map(tuple, found.values()))) == 3
        for text_output in (False, True):
            done = client.complete(PROMPT, rank=rank, n=3, seed=8, text_output=text_output, **drawn)
            assert {index: one.token_ids for index, one in enumerate(done)} == found

    async def together(rank: int) -> list[list[int]]:
        async with AsyncClient(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as bus:
            asked = [{"seed": 100 + place, "text_output": False} for place in range(64)]
            asked[37]["seed"] = 9
            prompts = [PROMPT if place == 37 else PROMPT[place % 20 :] for place in range(64)]
            several = (
                bus.complete(prompt, rank=rank, **one, **drawn) for prompt, one in zip(prompts, asked, strict=True)
            )
            return [completions[0].token_ids for completions in await asyncio.gather(*several)]

    for rank in (0, 1):
        assert asyncio.run(together(rank))[37] == alone


def test_prompts_are_cut_at_the_side_that_is_asked_for(engine: Engine) -> None:
    for asked, wanted in (
        ({"truncate_prompt_tokens": 5}, PROMPT[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, PROMPT[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, PROMPT[:5]),
        ({"truncate_prompt_tokens": -1}, PROMPT),
    ):
        choice = complete(engine, **asked)
        assert choice["prompt_token_ids"] == wanted
        assert choice["token_ids"] == complete(engine, prompt=wanted)["token_ids"]


def test_a_salt_parts_the_prefix_cache(engine: Engine, client: Client) -> None:
    prompt = [*range(100, 164), 5]
    for rank in (0, 1):

        def cached(salt: str, rank: int = rank) -> int:
            (done,) = client.complete(prompt, text_output=False, max_tokens=1, cache_salt=salt, rank=rank)
            return done.finished.cached_tokens

        complete(engine, rank, prompt=prompt, cache_salt="salt")
        assert [cached("salt"), cached(""), cached("pepper"), cached("")] == [64, 0, 0, 64]


def test_beams_are_those_of_transformers(engine: Engine, reference: Any) -> None:
    """The beams of one search run on both ranks, whose schedulers are different ones."""
    before = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    beams: dict[str, Any] = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True, "max_tokens": 8}

    def expected(prompt: list[int], width: int) -> list[list[int]]:
        config = GenerationConfig(
            num_beams=width, num_return_sequences=width, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        ids = torch.tensor([prompt])
        found = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return [line[len(prompt) :] for line in found.tolist()]

    for width in (2, 5):
        body = {"prompt": [PROMPT, PROMPT[:4]], "n": width} | beams
        choices = post(engine, "/v1/completions", body)["choices"]
        found = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
        assert found == expected(PROMPT, width) + expected(PROMPT[:4], width)
    chat = post(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3} | beams)
    assert [choice["token_ids"] for choice in chat["choices"]] == expected(chat["prompt_token_ids"], 3)
    after = metrics(engine, "rankbus_rank_scheduler_scheduled_tokens_total")
    assert len(after) == 2
    assert all(after[rank] > before.get(rank, 0) for rank in after)


def test_beams_may_end_before_others(engine: Engine, reference: Any) -> None:
    """Where the end is among what is likely, a beam that took it is judged beside those that go on."""
    width, count = 4, 3
    with torch.no_grad():
        after_one = reference(torch.arange(3, 259)[:, None]).logits[:, 0]
    prompt = [3 + int((after_one[:, EOS] - after_one.max(dim=1).values).argmax())]
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(count):
        grown = []
        for score, tokens in live:
            with torch.no_grad():
                likely = torch.log_softmax(reference(torch.tensor([prompt + tokens])).logits[0, -1], -1)
            for token in likely.topk(2 * width).indices.tolist():
                (done if token == EOS else grown).append((score + float(likely[token]), [*tokens, token]))
        live = sorted(grown, reverse=True)[:width]
    assert done
    best = sorted(done + live, reverse=True)[:width]
    assert {tokens[-1] == EOS for _, tokens in best} == {True, False}
    body = {"prompt": prompt, "use_beam_search": True, "n": width, "max_tokens": count, "length_penalty": 0}
    choices = post(engine, "/v1/completions", body | {"return_token_ids": True})["choices"]
    found = [(choice["token_ids"], choice["finish_reason"]) for choice in choices]
    assert found == [(tokens[:-1], "stop") if tokens[-1] == EOS else (tokens, "length") for _, tokens in best]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": schema}}
    for schema in (
        {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        },
    )
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_calls_that_are_forced_fit_their_schema(engine: Engine, choice: Any, stream: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    spaces, ends = (post(engine, "/tokenize", {"prompt": text})["tokens"] for text in (" \n\t\r", "}]"))
    asked["logit_bias"] = {str(token): -100 for token in spaces} | {str(token): 100 for token in ends}  # or it goes on
    for rank in (0, 1):
        for seed in range(3):
            body = asked | {"seed": seed, "temperature": 1.0}
            if stream:
                calls = streamed_calls(engine, body | {"stream": True}, rank)
            else:
                (answer,) = post(engine, "/v1/chat/completions", body, rank)["choices"]
                calls = [call["function"] for call in answer["message"]["tool_calls"]]
            assert calls
            for call in calls:
                assert call["name"] == "weather"
                jsonschema.validate(json.loads(call["arguments"]), TOOLS[0]["function"]["parameters"])  # type: ignore[index]


def streamed_calls(engine: Engine, body: dict[str, Any], rank: int) -> list[dict[str, str]]:
    """The tool calls of a stream, put together."""
    url = f"http://{engine.config.host}:{engine.port()}/v1/chat/completions"
    headers = {"X-data-parallel-rank": str(rank)}
    calls: dict[int, dict[str, str]] = {}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=DEADLINE_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for part in choice["delta"].get("tool_calls") or []:
                    call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                    for key in call:
                        call[key] += part["function"].get(key) or ""
    return [calls[index] for index in sorted(calls)]


def test_responses_and_messages_answer(engine: Engine) -> None:
    text = complete(engine, prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")["text"]
    response = post(engine, "/v1/responses", {"input": "hi", "temperature": 0, "max_output_tokens": COUNT})
    assert response["output"][0]["content"][0]["text"] == text
    messages = [{"role": "user", "content": "hi"}]
    message = post(engine, "/v1/messages", {"messages": messages, "temperature": 0, "max_tokens": COUNT})
    assert message["content"][0]["text"] == text
    counted = post(engine, "/v1/messages/count_tokens", {"messages": messages})
    assert counted["input_tokens"] == message["usage"]["input_tokens"]
