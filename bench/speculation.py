"""What speculation gives on this CPU, and that it changes no token: ``python -m bench.speculation``.

Two engines with the embedded model, side by side: one without speculation, one with prompt lookup. Each answers the
same 100 prompts greedily and the same 100 with sampling of all kinds, 16 at once, and the tokens have to be the same.
Then they continue repetitive text, code and the extraction of JSON, one request alone and 8 at once, greedily: in
turns, so that each has the machine to itself and both have it in the same moods, and the medians count.

The table is printed; the figures go to bench/results/speculation.json. Ends with 1 if a token differs.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
import urllib.request
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.scheduler import ROOT
from bench.workload import decode_rate
from bus import model_files
from bus.config import Config, load
from frontend.client import AsyncClient
from tests.engine import Engine

RESULTS = ROOT / "bench" / "results" / "speculation.json"
AT_ONCE = 16
COUNTS = (1, 8)
OUTPUT = 32
LONG_OUTPUT = 128
TURNS = 3
NUM_BLOCKS = 2000
START_S = 400.0

Asked = tuple[list[int], dict[str, Any]]
"""A prompt and its parameters."""

NAMES = ("Ann", "Bert", "Clara", "Dora", "Emil", "Frida", "Gustav", "Hanna", "Ivan", "Jutta", "Karl", "Lena")
TOWNS = ("Bonn", "Cork", "Delft", "Essen", "Graz", "Oslo", "Porto", "Riga", "Turin", "Ulm", "Varna", "York")


def code(number: int) -> str:
    """Code in which one function is like the next."""
    shapes = ("circle", "square", "cube", "sphere", "cone", "prism", "torus", "wedge")
    first, name = number % len(shapes), ("area", "volume", "edge", "label")[number % 4]
    return "import math\n\n\n" + "\n\n\n".join(
        f"def {shapes[(first + place) % len(shapes)]}_{name}(size: float, scale: float = 1.0) -> float:\n"
        f'    """The {name} of a {shapes[(first + place) % len(shapes)]}."""\n'
        f"    if size < 0:\n        raise ValueError('size must not be negative')\n"
        f"    return scale * size ** {place + 1}"
        for place in range(3)
    )


def extraction(number: int) -> str:
    """What sentences say as JSON, a line for each: shown for some, and to come for others."""

    def person(place: int) -> tuple[str, str]:
        name, town = NAMES[(number + place) % len(NAMES)], TOWNS[(number + 5 * place) % len(TOWNS)]
        age, street = 20 + (7 * place + number) % 60, f"{place + 1} Mill Road"
        text = f"{name} is {age} years old and lives at {street} in {town}."
        return text, json.dumps({"name": name, "age": age, "address": {"street": street, "town": town}})

    shown, asked = [person(place) for place in range(3)], [person(place) for place in range(3, 8)]
    return "".join(
        f"Text: {' '.join(text for text, _ in people)}\nJSON:\n{''.join(f'{line}{chr(10)}' for line in lines)}"
        for people, lines in ((shown, [line for _, line in shown]), (asked, []))
    )


WORKLOADS = {"code": code, "JSON extraction": extraction}


def questions(tokenizer: Tokenizer) -> dict[str, list[Asked]]:
    """100 prompts of many kinds: to be answered greedily, and with sampling of all kinds."""
    draw = np.random.default_rng(7)
    words = [draw.integers(10, 49_000, int(length)).tolist() for length in draw.integers(1, 64, 40)]
    texts = [tokenizer.encode(make(number)).ids for number in range(30) for make in (code, extraction)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.4, "min_tokens": 20},
        {"temperature": 0.6, "stop_token_ids": [198, 28, 30]},
    ]
    prompts = [*words, *texts]
    return {
        "greedy": [(prompt, {"temperature": 0.0, "ignore_eos": True}) for prompt in prompts],
        "sampled": [(prompt, {"seed": number, **kinds[number % len(kinds)]}) for number, prompt in enumerate(prompts)],
    }


async def answers(client: AsyncClient, asked: list[Asked]) -> list[list[int]]:
    """The output tokens, asked for 16 at once."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int], options: dict[str, Any]) -> list[int]:
        async with places:
            (completion,) = await client.complete(prompt, text_output=False, max_tokens=OUTPUT, **options)
            return completion.token_ids

    return await asyncio.gather(*(one(*item) for item in asked))


async def rate(client: AsyncClient, prompts: list[list[int]]) -> float:
    """Tokens per second while all of the `prompts` are continued at once."""

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": LONG_OUTPUT, "ignore_eos": True}
        async for piece in client.generate(prompt, text_output=False, **options):
            times += [time.perf_counter()] * len(piece.token_ids)
        return times

    return decode_rate(await asyncio.gather(*map(one, prompts)))


async def all_answers(engine: Engine, asked: dict[str, list[Asked]]) -> dict[str, list[list[int]]]:
    """What an engine answers to all that is asked."""
    async with AsyncClient(engine.config.client_endpoint(0)) as client:
        return {name: await answers(client, items) for name, items in asked.items()}


async def rates(engines: dict[str, Engine], prompts: list[list[int]]) -> dict[str, float]:
    """The median rate of each engine, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(TURNS):
        for name, engine in engines.items():
            async with AsyncClient(engine.config.client_endpoint(0)) as client:
                found[name].append(await rate(client, prompts))
    return {name: statistics.median(values) for name, values in found.items()}


def drafts(engine: Engine) -> dict[str, float]:
    """What /metrics says of drafts, all ranks together."""
    time.sleep(1.5)  # ranks tell their counts once a second
    with urllib.request.urlopen(f"http://{engine.config.host}:{engine.port()}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        name: sum(map(float, re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }


def different(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Which answers are not the same."""
    return [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates-only", action="store_true", help="leave the answers out; nothing is written")
    arguments = parser.parse_args()
    console = Console()
    settings = load()
    model = model_files.resolve(settings).folder
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked = {} if arguments.rates_only else questions(tokenizer)
    limits = {"max_num_seqs": Config().max_num_seqs, "max_num_batched_tokens": Config().max_num_batched_tokens}
    measured: dict[str, dict[str, dict[str, float]]] = {}
    right: dict[str, float] = {}
    with (
        Engine(model, settings.cache_path, num_blocks=NUM_BLOCKS, **limits) as off,
        Engine(model, settings.cache_path, num_blocks=NUM_BLOCKS, **limits, speculation="ngram") as on,
    ):
        for engine in (off, on):
            engine.start()
            engine.wait_ready(START_S)
        tokens = [asyncio.run(all_answers(engine, asked)) for engine in (off, on)]
        told = drafts(on)
        for name, make in WORKLOADS.items():
            before = drafts(on)
            measured[name] = {}
            for count in COUNTS:
                prompts = [tokenizer.encode(make(100 + number)).ids for number in range(count)]
                measured[name][str(count)] = asyncio.run(rates({"without": off, "with": on}, prompts))
            after = drafts(on)
            right[name] = (after["accepted_tokens"] - before["accepted_tokens"]) / max(
                after["draft_tokens"] - before["draft_tokens"], 1
            )
    table = Table("tokens per second", "without", "with", "ratio", "drafts right", title="Repetitive text on this CPU")
    for name, of_counts in measured.items():
        for count, of in of_counts.items():
            ratio = f"{of['with'] / of['without']:.2f}"
            label = f"{name}, {count} at once"
            table.add_row(label, f"{of['without']:.1f}", f"{of['with']:.1f}", ratio, f"{right[name]:.0%}")
    console.print(table)
    differing = {name: different(tokens[0][name], tokens[1][name]) for name in asked}
    for name, places in differing.items():
        console.print(f"{name}: {len(asked[name]) - len(places)} of {len(asked[name])} answers are the same")
    if asked:
        console.print(f"for these, {told['accepted_tokens']:.0f} of {told['draft_tokens']:.0f} drafts were right")
        figures = {
            "tok_s": measured,
            "drafts_right": right,
            "asked": {name: len(items) for name, items in asked.items()},
            "different": differing,
            **told,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(1 if any(differing.values()) else 0)


if __name__ == "__main__":
    main()
