"""Many sessions at once, with a KV pool that holds a quarter of them: `make soak`.

Sessions take random inputs, some while a turn runs, some of their turns are stopped, some sessions are aborted, the
others are closed. All have to end as they should and leave nothing behind, and the tokens of greedy ones have to be
those of separate requests for the same kept tokens (the same but for ties: positions whose two best scores lie within
1e-4 of each other, at most 0.1% of them).
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus import model_files
from bus.config import load
from bus.messages import Delta, RequestCounts, TokenCount, TurnFinished
from bus.wire import unpack_floats
from frontend.client import AsyncClient, AsyncTurn, EngineError
from tests.engine import Engine
from tests.tiny_model import write_tiny_llama

CLIENTS = 4
TIE = 1e-4
TIES_ALLOWED = 0.001
CHECKS_AT_ONCE = 32
DEADLINE_S = 170.0


@dataclass
class Plan:
    """What is run: how many sessions and turns, and the longest input and output of a turn, in tokens."""

    sessions: int
    turns: int
    longest_input: int = 10
    longest_output: int = 8
    vocabulary: range = range(10, 250)
    seed: int = 0


@dataclass
class TurnKept:
    """A turn as it ran: all the session held before its output, the output, and with what it was sampled."""

    prompt: list[int]
    output: list[int]
    greedy: bool


@dataclass
class Report:
    """What came of it."""

    ends: Counter[str] = field(default_factory=Counter)
    turn_ends: Counter[str] = field(default_factory=Counter)
    kept: list[TurnKept] = field(default_factory=list)
    largest: int = 0
    """Tokens that all sessions held together at most, each at its largest."""
    output_tokens: int = 0
    checked_tokens: int = 0
    ties: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


async def soak(endpoint: str, plan: Plan) -> Report:
    """Run all sessions of `plan` at once, over some clients, and then what greedy ones said as separate requests."""
    report = Report()
    clients = [AsyncClient(endpoint, timeout_s=DEADLINE_S) for _ in range(CLIENTS)]
    try:
        begun = time.monotonic()
        runs = (run_session(clients[number % CLIENTS], plan, number, report) for number in range(plan.sessions))
        await asyncio.gather(*runs)
        report.seconds["sessions"] = time.monotonic() - begun
        for client in clients:
            assert (await client.command(RequestCounts())).value == [0, 0]
            assert set((await client.command(TokenCount())).value) == {0}
        begun = time.monotonic()
        greedy = [turn for turn in report.kept if turn.greedy and turn.output]
        gate = asyncio.Semaphore(CHECKS_AT_ONCE)
        await asyncio.gather(
            *(check(clients[number % CLIENTS], turn, report, gate) for number, turn in enumerate(greedy))
        )
        report.seconds["check"] = time.monotonic() - begun
        assert report.ties <= max(1, TIES_ALLOWED * report.checked_tokens), f"{report.ties} ties"
        return report
    finally:
        for client in clients:
            await client.close()


async def run_session(client: AsyncClient, plan: Plan, number: int, report: Report) -> None:
    """One session from its opening to its end; every second one is greedy."""
    draw = random.Random(plan.seed * 1_000_000 + number)
    temperature = float(number % 2)
    params = {"temperature": temperature, "max_tokens": plan.longest_output, "ignore_eos": True}
    first = some_tokens(draw, plan)
    session = await client.session(first, text_output=False, rank=None, **params)
    runs = [asyncio.create_task(run_turn(session.first, draw.random(), report))]
    inputs = [first]
    abort_at = draw.randrange(1, plan.turns) if draw.random() < 0.05 else None
    try:
        for turn in range(1, plan.turns):
            if turn == abort_at:
                finished = await session.abort()
                report.ends[finished.reason] += 1
                return
            if draw.random() < 0.8:
                await asyncio.gather(*runs)  # the others are appended while turns run
            inputs.append(some_tokens(draw, plan))
            own = turn_params(draw, plan, temperature)
            runs.append(asyncio.create_task(run_turn(await session.append(inputs[-1], **own), draw.random(), report)))
        finished = await session.close()
        report.ends[finished.reason] += 1
    finally:
        ends = await asyncio.gather(*runs, return_exceptions=True)
        aborted = [end for end in ends if isinstance(end, EngineError) and end.code == "abort"]
        assert not aborted or abort_at is not None
        note(ends[: len(ends) - len(aborted)], inputs, temperature == 0.0, report)


async def run_turn(turn: AsyncTurn, chance: float, report: Report) -> tuple[list[int], TurnFinished]:
    """Read a turn, one in ten only in part, and then stop it; its output and its end."""
    if chance < 0.1:
        async for _ in turn:
            await turn.stop(max(len(turn.token_ids) - 1, 0))
            break
    end = await turn.end()
    report.turn_ends[end.reason] += 1
    report.output_tokens += end.output_tokens
    return turn.token_ids, end


def note(turns: Any, inputs: list[list[int]], greedy: bool, report: Report) -> None:
    """Follow what a session held, and see that it says the same."""
    context: list[int] = []
    for number, (one, tokens) in enumerate(zip(turns, inputs, strict=False), 1):
        if isinstance(one, BaseException):
            raise one
        output, end = one
        context = [*context, *tokens]
        assert (end.turn, end.prompt_tokens, end.output_tokens) == (number, len(context), len(output))
        report.kept.append(TurnKept(context, output, greedy))
        assert end.kept_tokens <= max(len(output) - (end.reason in ("stop", "length")), 0)
        context = [*context, *output[: end.kept_tokens]]
        assert end.context_tokens == len(context)
    report.largest += len(context)


async def check(client: AsyncClient, turn: TurnKept, report: Report, gate: asyncio.Semaphore) -> None:
    """Run a turn as a request of its own: the tokens have to be the same, but for ties."""
    done = 0
    async with gate:
        while done < len(turn.output):
            prompt, wanted = [*turn.prompt, *turn.output[:done]], turn.output[done:]
            params = {"temperature": 0.0, "max_tokens": len(wanted), "ignore_eos": True, "text_output": False}
            (completion,) = await client.complete(prompt, **params)
            pairs = enumerate(zip(completion.token_ids, wanted, strict=True))
            same = next((place for place, (one, other) in pairs if one != other), None)
            if same is None:
                break
            await assert_tie(client, [*prompt, *wanted[:same]], wanted[same], completion.token_ids[same])
            report.ties += 1
            done += same + 1
        report.checked_tokens += len(turn.output)


async def assert_tie(client: AsyncClient, prompt: list[int], one: int, other: int) -> None:
    """The two best scores after `prompt` are those of these tokens, and as good as equal."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 2, "text_output": False}
    pieces = [piece async for piece in client.generate(prompt, **params)]
    delta = next(piece.delta for piece in pieces if isinstance(piece.delta, Delta))
    assert delta.logprobs is not None
    values = sorted(unpack_floats(delta.logprobs.values).tolist(), reverse=True)
    assert values[0] - values[2] <= TIE, f"tokens {one} and {other} after {prompt} differ, and are no tie: {values}"


def some_tokens(draw: random.Random, plan: Plan) -> list[int]:
    """A random input, sometimes of no token."""
    length = draw.randint(1, plan.longest_input) if draw.random() < 0.95 else 0
    return [draw.choice(plan.vocabulary) for _ in range(length)]


def turn_params(draw: random.Random, plan: Plan, temperature: float) -> dict[str, Any]:
    """Sometimes those of the session, sometimes others, with stop tokens that come early."""
    if draw.random() < 0.5:
        return {}
    stops = draw.sample(plan.vocabulary, len(plan.vocabulary) // 6) if draw.random() < 0.5 else []
    longest = draw.randint(1, plan.longest_output)
    return {"temperature": temperature, "max_tokens": longest, "ignore_eos": True, "stop_token_ids": stops}


def used_blocks(engine: Engine) -> float:
    """KV blocks in use on all ranks, as /metrics of frontend 0 has them."""
    with urllib.request.urlopen(f"http://{engine.config.host}:{engine.port()}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^rankbus_rank_used_blocks\{.*\} (\S+)$", text, re.MULTILINE)))


def run(engine: Engine, plan: Plan) -> Report:
    """`soak`, and no block is left in use after it."""
    report = asyncio.run(soak(engine.config.client_endpoint(0), plan))
    engine.wait_until(lambda: used_blocks(engine) == 0, "all blocks are free", 10.0)
    engine.check_running()
    return report


def show(name: str, plan: Plan, blocks: int, report: Report) -> None:
    """Print what came of it."""
    needed = report.largest / 16
    seconds = report.seconds["sessions"]
    print(
        f"{name}: {plan.sessions} sessions of {plan.turns} turns in {seconds:.1f} s, "
        f"{report.output_tokens} tokens ({report.output_tokens / seconds:.0f} a second); {blocks} KV blocks, "
        f"{blocks / needed:.0%} of the {needed:.0f} that all need together\n"
        f"  sessions ended: {dict(report.ends)}; turns: {dict(report.turn_ends)}\n"
        f"  {report.checked_tokens} greedy tokens equal to those of separate requests but for {report.ties} ties "
        f"({report.seconds['check']:.1f} s); all blocks free"
    )


def main() -> int:
    """Soak the tiny model, then with `--embedded` the embedded one; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=544, help="KV blocks of both ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-embedded", action="store_true", help="leave the embedded model out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "tiny-llama")
        plan = Plan(options.sessions, options.turns, seed=options.seed)
        with Engine(model, load().cache_path, max_num_seqs=16, max_model_len=512, num_blocks=options.blocks) as engine:
            engine.start()
            engine.wait_ready(400.0)
            show("two random layers", plan, options.blocks, run(engine, plan))
    if not options.no_embedded:
        embedded = model_files.resolve(load({"model": "embedded"})).folder
        plan = Plan(8, 5, longest_input=24, longest_output=16, vocabulary=range(100, 40_000), seed=options.seed)
        with Engine(embedded, load().cache_path, max_num_seqs=8, max_model_len=256, num_blocks=64) as engine:
            engine.start()
            engine.wait_ready(400.0)
            show("embedded model", plan, 64, run(engine, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
