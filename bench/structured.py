"""JSON by ever nastier schemas on the embedded model, and what it costs those beside it: `make bench-structured`.

200 requests over HTTP, 16 at once, on two ranks, at temperature 1: each answer must be JSON that fits its schema. What
unstructured streams beside them lose is measured against the same requests without their schemas: more rows cost time
whatever they draw by. The figures go to bench/results/structured.json.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import jsonschema
from rich.console import Console

from bus import model_files
from bus.config import load
from frontend.client import AsyncClient
from tests.engine import ROOT, Engine

RESULTS = ROOT / "bench" / "results" / "structured.json"
AT_ONCE = 16
NEIGHBOURS = 8
MAX_TOKENS = 500
SOME = 48
"""Of the requests, that are timed."""

WORDS = ("name", "größe", "日本", "🙂", "a b", 'quote"d', "back\\slash", "tab\tbed", "x-1", "_", "Ünïcödé", "id")
"""Names of properties and values of enums."""

PATTERNS = (
    "^[a-z]{2,5}$",
    "^[A-Z][a-z]{1,6}-[0-9]{1,4}$",
    "^(yes|no|perhaps)$",
    "^[0-9]{4}-(0[1-9]|1[0-2])$",
    "^[äöü]{1,3}$",
)


def schema_of(number: int) -> dict[str, Any]:
    """The schema of a request; the higher its number, the nastier. Whatever is drawn by it comes to an end."""
    draw = random.Random(number)
    level = 1 + number // 25
    schema = _object(draw, level, depth=1 + level // 3)
    if level >= 3:
        schema["$defs"] = {"part": _object(draw, 2, depth=1), "kind": {"enum": draw.sample(WORDS, 3)}}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["properties"]["parts"] = {
            "type": "array",
            "items": {"$ref": "#/$defs/kind"},
            "minItems": 1,
            "maxItems": 3,
        }
        schema["required"] = list(schema["properties"])
    # At temperature 1 a model of this size may write white space for ever where it may
    return schema | {"x-guidance": {"whitespace_flexible": False}}


def _object(draw: random.Random, level: int, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, 1 + draw.randrange(1 + min(level, 4)))
    required = [name for name in names if level < 5 or draw.random() < 0.7]
    properties = {name: _value(draw, level, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(draw: random.Random, level: int, depth: int) -> dict[str, Any]:
    kinds = ["text", "number", "flag", "enum", "const", "pattern", "list", "object", "either"][: 3 + level]
    match draw.choice(kinds):
        case "text":
            return {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 12)}
        case "number":
            low = draw.randrange(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 9, 100_000])}
        case "flag":
            return {"type": ["boolean", "null"]}
        case "enum":
            return {"enum": [*draw.sample(WORDS, 2), draw.randrange(99), None, {"a": [1]}]}
        case "const":
            return {"const": draw.choice([1, "x", None, [1, "\u00e9"], {"deep": {"er": True}}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case "list" if depth:
            least = draw.randrange(3)
            item = _value(draw, level, depth - 1)
            return {"type": "array", "items": item, "minItems": least, "maxItems": least + draw.randrange(3)}
        case "object" if depth:
            return _object(draw, level, depth - 1)
        case "either" if depth:
            return {"anyOf": [_value(draw, level, depth - 1), {"type": "null"}]}
    return {"type": "null"}


class Answers(NamedTuple):
    """What came of the requests: how many fit their schemas, what was wrong with others, and their tokens."""

    valid: int
    faults: list[str]
    tokens: int
    seconds: float


def fault_of(text: str, schema: dict[str, Any]) -> str:
    """What is wrong with an answer; empty if nothing is."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}: {text[:200]}"
    return ""


async def ask(url: str, model: str, count: int, structured: bool, lengths: dict[int, int]) -> Answers:
    """Send the requests, 16 at once. Without their schemas they are as long as `lengths` says."""
    gate = asyncio.Semaphore(AT_ONCE)
    faults: list[str] = []

    async def one(http: httpx.AsyncClient, number: int) -> int:
        schema = schema_of(number)
        question = f"Make up something that fits this JSON schema: {json.dumps(schema)[:300]}"
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": 1.0, "seed": number, "max_tokens": MAX_TOKENS}
        if structured:
            wanted = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        else:
            body |= {"max_tokens": lengths[number], "ignore_eos": True}
        async with gate:
            response = await http.post(f"{url}/v1/chat/completions", json=body)
        answer = response.json()
        if response.status_code != 200:
            faults.append(f"{number}: {response.status_code} {answer}")
            return 0
        if structured and (fault := fault_of(answer["choices"][0]["message"]["content"], schema)):
            faults.append(f"{number}: {answer['choices'][0]['finish_reason']}, {fault}")
        lengths[number] = answer["usage"]["completion_tokens"]
        return lengths[number]

    begin = time.monotonic()
    async with httpx.AsyncClient(timeout=600.0) as http:
        tokens = sum(await asyncio.gather(*(one(http, number) for number in range(count))))
    return Answers(count - len(faults), faults, tokens, time.monotonic() - begin)


class Neighbours:
    """Unstructured streams that run all the time; `times` are those between the tokens of each, in seconds."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.times: list[float] = []
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(NEIGHBOURS)]

    async def _stream(self, number: int) -> None:
        while True:
            last = None
            params: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True, "text_output": False, "rank": number % 2}
            async for piece in self._client.generate([100 + number] * 8, **params):
                now = time.monotonic()
                if last is not None and len(piece.token_ids) == 1:
                    self.times.append(now - last)
                last = now

    async def end(self) -> float:
        """Stop them; the mean time between tokens."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return statistics.fmean(self.times)


async def measure(engine: Engine, count: int, rounds: int) -> dict[str, Any]:
    """Run all of it."""
    url = f"http://{engine.config.host}:{engine.port()}"
    lengths: dict[int, int] = {}
    async with AsyncClient(engine.config.client_endpoint(0), 600.0) as client:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        answers = await ask(url, model, count, True, lengths)
        last = await ask(url, model, min(count, SOME), True, lengths)
        plain = await ask(url, model, min(count, SOME), False, lengths)
        times: dict[str, list[float]] = {"alone": [], "plain": [], "structured": []}
        for _ in range(rounds):
            for name in times:
                neighbours = Neighbours(client)
                if name == "alone":
                    await asyncio.sleep(10.0)
                else:
                    await ask(url, model, min(count, SOME), name == "structured", lengths)
                times[name].append(await neighbours.end())
    growth = statistics.median(b / a - 1 for a, b in zip(times["plain"], times["structured"], strict=True))
    return {
        "requests": count,
        "valid": answers.valid,
        "faults": answers.faults,
        "tokens": answers.tokens,
        "tokens_per_s": last.tokens / last.seconds,
        "plain_tokens_per_s": plain.tokens / plain.seconds,
        **{f"ms_per_token_{name}": 1000 * statistics.median(values) for name, values in times.items()},
        "growth_percent": 100 * growth,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="how often neighbours are timed")
    options = parser.parse_args(arguments)
    console = Console()
    settings = load()
    model: Path = model_files.resolve(settings).folder
    limits: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 2048,
        "num_blocks": None,
    }
    with Engine(model, settings.cache_path, **limits) as engine:
        engine.start()
        engine.wait_ready(600.0)  # all programs may have to be compiled
        figures = asyncio.run(measure(engine, options.requests, options.rounds))
        engine.check_running()
    for fault in figures["faults"]:
        console.print(fault, style="red", markup=False)
    console.print(f"{figures['valid']} of {figures['requests']} answers fit their schemas")
    rates = f"{figures['tokens_per_s']:.0f} tokens a second; without schemas {figures['plain_tokens_per_s']:.0f}"
    console.print(f"By themselves they take {rates}")
    for name, what in (("alone", "alone"), ("plain", "beside 16 others"), ("structured", "beside 16 with schemas")):
        console.print(f"Unstructured streams take {figures[f'ms_per_token_{name}']:.1f} ms per token {what}")
    console.print(f"Schemas add {figures['growth_percent']:.1f}%")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Written to {RESULTS.relative_to(ROOT)}")
    return int(figures["valid"] < figures["requests"])


if __name__ == "__main__":
    raise SystemExit(main())
