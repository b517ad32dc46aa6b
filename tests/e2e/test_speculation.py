"""The embedded model with speculation and without: the same tokens, and fewer steps."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from bench.speculation import answers, code, extraction
from frontend.client import AsyncClient
from tests.compiler import as_served
from tests.e2e.conftest import CACHE, metrics, start
from tests.engine import Engine

pytestmark = pytest.mark.timeout(500)  # the first test starts the engine, perhaps with nothing compiled


@pytest.fixture(scope="module")
def speculating(embedded_model: Path) -> Iterator[Engine]:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 1024}
    with as_served():  # as the engine that it is compared with
        engine = Engine(embedded_model, CACHE, num_blocks=512, speculation="ngram", **settings)
    with engine:
        start(engine)
        yield engine


def test_tokens_are_those_without(engine: Engine, speculating: Engine, embedded_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    prompts = [tokenizer.encode(make(number)).ids for number in range(3) for make in (code, extraction)]
    asked: list[tuple[list[int], dict[str, Any]]] = [(prompt, {"temperature": 0.0}) for prompt in prompts]
    asked += [(prompt, {"temperature": 0.7, "seed": seed}) for seed, prompt in enumerate(prompts)]
    kinds = {"presence_penalty": 0.4, "frequency_penalty": 0.2}, {"min_tokens": 25, "top_p": 0.9}
    asked += [(prompt, {"seed": 9, **kind}) for kind in kinds for prompt in prompts[:2]]

    async def ask(engine: Engine) -> list[list[int]]:
        async with AsyncClient(engine.config.client_endpoint(0)) as client:
            return await answers(client, asked)

    assert asyncio.run(ask(speculating)) == asyncio.run(ask(engine))

    def both_had_drafts() -> bool:
        told = metrics(speculating, "rankbus_rank_scheduler_accepted_tokens_total")
        return len(told) == 2 and min(told.values()) > 0

    speculating.wait_until(both_had_drafts, "both ranks had drafts", 10)


def test_text_and_log_probabilities_are_those_without(engine: Engine, speculating: Engine) -> None:
    def ask(engine: Engine) -> Any:
        api = openai.OpenAI(base_url=f"http://{engine.config.host}:{engine.port()}/v1", api_key="none", timeout=120)
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "logprobs": 2, "stop": ["volume of a cone"]}
        return api.completions.create(model=api.models.list().data[0].id, prompt=code(1), **options).choices[0]

    with_drafts, without = ask(speculating), ask(engine)
    assert with_drafts.text == without.text
    assert with_drafts.finish_reason == without.finish_reason
    assert with_drafts.logprobs.tokens == without.logprobs.tokens
    assert with_drafts.logprobs.text_offset == without.logprobs.text_offset
    assert with_drafts.logprobs.token_logprobs == pytest.approx(without.logprobs.token_logprobs, abs=1e-3)
