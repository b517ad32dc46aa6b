"""How close to its limit the engine comes on this CPU, beside vLLM's CPU backend, in one run: ``python -m bench.cpu``.

The same model and prompts throughout: 1, 16 and 64 sequences of 128 tokens in and 64 out, greedy, float32. Ours is
measured by a client, through all processes of the engine with its default limits. Its limit are the matrix products
of a step alone (`bench.products`), in the fastest of three layouts, measured right after it with the engine idle.
vLLM's (`bench.vllm_cpu`) runs eager, in float32 or bfloat16, whichever is faster.

The table is printed; the figures go to bench/results/cpu.json.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from bench.scheduler import ROOT
from bench.workload import OUTPUT, PROMPT, decode_rate, prompt
from bus import model_files
from bus.config import Config, load
from frontend.client import AsyncClient
from tests.engine import Engine

RESULTS = ROOT / "bench" / "results" / "cpu.json"
COUNTS = (1, 16, 64)
PREFILLS = 16
TTFTS = 5


class Products:
    """`bench.products` as a process that is asked."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "bench.products", str(model)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._answer() != "ready":
            raise SystemExit("bench.products did not start")

    def ask(self, rows: int, logits: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "logits": logits}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)


async def run(client: AsyncClient, name: str, count: int, max_tokens: int) -> tuple[float, list[list[float]]]:
    """When `count` requests were sent, and when each of their tokens came."""

    async def one(number: int) -> list[float]:
        times: list[float] = []
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        async for piece in client.generate(prompt(name, number), text_output=False, **options):
            times += [time.perf_counter()] * len(piece.token_ids)
        return times

    begin = time.perf_counter()
    return begin, await asyncio.gather(*map(one, range(count)))


async def ours(config: Config, products: Products) -> dict[str, Any]:
    """Figures of the engine, and the limit of each, measured in turn."""
    decode: dict[str, float] = {}
    bounds: dict[str, dict[str, Any]] = {}
    async with AsyncClient(config.client_endpoint(0)) as client:
        await run(client, "warm", 4, 4)
        firsts = []
        for number in range(TTFTS):
            begin, (times,) = await run(client, f"first{number}", 1, 1)
            firsts.append(times[0] - begin)
        for count in COUNTS:
            decode[str(count)] = decode_rate((await run(client, f"decode{count}", count, OUTPUT))[1])
            bounds[str(count)] = products.ask(count, count)
        begin, stamps = await run(client, "prefill", PREFILLS, 1)
        prefill = PREFILLS * PROMPT / (max(times[0] for times in stamps) - begin)
    rows = config.ranks * config.max_num_batched_tokens
    prefill_bound = products.ask(rows, rows // PROMPT)
    fastest = {name: min(bound["seconds"].values()) for name, bound in bounds.items()}
    return {
        "decode_tok_s": decode,
        "prefill_tok_s": prefill,
        "gemm_bound_tok_s": {name: int(name) / least for name, least in fastest.items()},
        "gemm_bound_prefill_tok_s": rows / min(prefill_bound["seconds"].values()),
        "gemm_gflops": prefill_bound["flops"] / min(prefill_bound["seconds"].values()) / 1e9,
        "ttft_s": statistics.median(firsts),
        "gemm_seconds_by_layout": {
            **{name: bound["seconds"] for name, bound in bounds.items()},
            f"prefill of {rows}": prefill_bound["seconds"],
        },
    }


def vllm(model: Path) -> dict[str, Any]:
    """vLLM's figures, each in its faster type. bfloat16 at 64 only if it is faster at 16: it takes minutes."""

    def measure(dtype: str, *counts: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.vllm_cpu", str(model), dtype, *map(str, counts)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    full, half = measure("float32", *COUNTS), measure("bfloat16", 1, 16)
    if half["decode_tok_s"]["16"] > full["decode_tok_s"]["16"]:
        half = measure("bfloat16", *COUNTS)
    return {
        "vllm_decode_tok_s": {
            name: max(rate, half["decode_tok_s"].get(name, 0.0)) for name, rate in full["decode_tok_s"].items()
        },
        "vllm_prefill_tok_s": max(full["prefill_tok_s"], half["prefill_tok_s"]),
        "vllm_by_type": {"float32": full, "bfloat16": half},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours-only", action="store_true", help="leave vLLM out; nothing is written")
    arguments = parser.parse_args()
    console = Console()
    settings = load()
    model = model_files.resolve(settings).folder
    limits = {"max_num_seqs": Config().max_num_seqs, "max_num_batched_tokens": Config().max_num_batched_tokens}
    with (
        console.status("the engine"),
        Products(model) as products,
        Engine(model, settings.cache_path, num_blocks=None, **limits) as engine,
    ):
        engine.start()
        engine.wait_ready()
        result = asyncio.run(ours(engine.config, products))
    if not arguments.ours_only:
        with console.status("vLLM"):
            result |= vllm(model)

    table = Table("tokens per second", "engine", "products alone", "of them", "vLLM", "ratio", title="On this CPU")
    peers = result.get("vllm_decode_tok_s", {}) | {"prefill": result.get("vllm_prefill_tok_s")}
    own = result["decode_tok_s"] | {"prefill": result["prefill_tok_s"]}
    bounds = result["gemm_bound_tok_s"] | {"prefill": result["gemm_bound_prefill_tok_s"]}
    for name, rate in own.items():
        peer = peers.get(name)
        told = (f"{peer:.1f}", f"{rate / peer:.1f}") if peer else ("", "")
        label = name if name == "prefill" else f"decode, {name} sequences"
        table.add_row(label, f"{rate:.1f}", f"{bounds[name]:.1f}", f"{rate / bounds[name]:.0%}", *told)
    console.print(table)
    console.print(f"Products at {result['gemm_gflops']:.0f} GFLOP/s; by layout, seconds:")
    console.print(result["gemm_seconds_by_layout"])
    console.print(f"A prompt of {PROMPT} tokens alone has its first token after {result['ttft_s']:.3f} s")
    if not arguments.ours_only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
