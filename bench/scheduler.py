"""What a step costs without the model, beside the peers, in one run: ``python -m bench.scheduler``.

Real processes and sockets: ranks with the native scheduler, the executor with its jitted calls replaced
(`bench.stub_executor`), a frontend's core and buses (`bench.bus_frontend`), and clients that read every token
(`bench.streams`). A step's time is that in which every request advances by one token: schedule, send, merge, split,
send, update, on all ranks, outputs to the frontend and load reports included.

The table is printed; the figures go to bench/results/scheduler.json.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.stub_executor import VOCABULARY
from bus import model_files
from bus.config import Config, load, to_toml
from bus.core import Drained, Peer, PeerUp, Received, Tick
from bus.messages import ExecutorStatus, Generate, GenerateParams, Load, Message
from bus.shell import collect_seldom
from bus.wire import Codec, pack_ints
from frontend.core import FrontendCore
from frontend.params import ModelLimits

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "scheduler.json"
PEER = "tpu-inference==0.32.0"
SIZES = ((2, 16), (2, 64), (2, 256), (2, 1024), (8, 32))
SKIP, STEPS = 100, 600
CHURN_TOKENS = 20
CHURN_SPARE = 4
"""For so many rows of a rank there is a request more, so that one waits for each row that becomes free."""
WAITING_STEPS = 760
"""Requests for so many steps wait before the first begins, where they are not to be added meanwhile."""
PIPELINED = "2x256, two in flight"
CHURN, CHURN_WITH_ADDS = "2x256, 5% begin and end", "2x256, the same, added meanwhile"
FULL = 0.9
"""With so large a part of the rows running, steps in which requests begin and end count as full."""
MAX_TOKENS = 3900
READY_S = 30.0


class Step(NamedTuple):
    """What the stub says of a merged step."""

    done: float
    sequences: int
    ranks: int
    """So many took part."""
    begun: int
    """Requests that began with it."""


class Engine:
    """The engine's processes around the stub, ended on leaving the `with` block."""

    def __init__(self, **settings: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rb-"))
        blocks = settings["ranks"] * settings["max_num_seqs"] * 4096 // 16  # nobody is preempted
        limits = {"max_num_batched_tokens": 8192, "max_model_len": 4096, "num_blocks": blocks, "model_on_cpu": False}
        self.config = Config(run_dir=str(self._folder / "run"), **(limits | settings))
        self.config.run_path.mkdir(mode=0o700)
        (self._folder / "config.toml").write_text(to_toml(self.config))
        self._steps = self._folder / "steps.json"
        self._environment = os.environ | {
            "RANKBUS_CONFIG": str(self._folder / "config.toml"),
            "BENCH_STEPS": str(self._steps),
            "PYTHONPATH": str(ROOT),
        }
        modules = [["bench.stub_executor"], ["bench.bus_frontend"]]
        modules += [["ranks", "--index", str(rank)] for rank in range(self.config.ranks)]
        self._log = (self._folder / "log").open("wb")
        self.processes = [self._start(module) for module in modules]

    def _start(self, module: list[str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", *module]
        return subprocess.Popen(command, cwd=ROOT, env=self._environment, stderr=self._log, stdout=self._log)

    def wait_for_ranks(self) -> None:
        """Until every rank has met the executor and the frontend."""
        until = time.monotonic() + READY_S
        while (self._folder / "log").read_bytes().count(b'"peer": "rank/') < 2 * self.config.ranks:
            if time.monotonic() > until or any(process.poll() is not None for process in self.processes):
                raise SystemExit((self._folder / "log").read_text()[-4000:])
            time.sleep(0.05)

    def clients(self, count: int, streams: int, connections: int, *options: str) -> "list[subprocess.Popen[str]]":
        """Start client processes that share `streams` and `connections`."""
        share = ["--connections", str(connections // count), "--streams", str(streams // count)]
        command = [sys.executable, "-m", "bench.streams", self.config.client_endpoint(0), *share, *options]
        command += ["--ranks", str(self.config.ranks)]
        return [
            subprocess.Popen(
                [*command, "--first", str(number * 100)],
                cwd=ROOT,
                env=self._environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def cpu_ms(self) -> dict[str, float]:
        """Milliseconds of CPU that each process has taken so far; of the ranks, the mean."""
        taken = [
            sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
            / 1e6
            for process in self.processes
        ]
        return {"executor": taken[0], "frontend": taken[1], "rank": statistics.fmean(taken[2:])}

    def close(self) -> list[Step]:
        """End the processes; what the stub says of each step."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(10)
        self._log.close()
        steps = [Step(*line) for line in json.loads(self._steps.read_text())]
        shutil.rmtree(self._folder)
        return steps


def figures(times_ms: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float]:
    return {
        "mean": float(times_ms.mean()),
        "median": float(np.median(times_ms)),
        "p99": float(np.percentile(times_ms, 99)),
        "steps": int(times_ms.size),
    }


def step_times(steps: list[Step], total: int, told: str) -> dict[str, float]:
    """Figures of the times in which `total` sequences advance by one token, once all streams have begun.

    With every rank in every merged step, that is the time from one step to the next; if ranks run in turns, it is the
    time of all their turns. `told` is what the client printed. Beside the times there are the mean of the merged steps'
    `sequences`, and how many requests `begun` in such a time.
    """
    client = json.loads(told)
    ends = np.array([step.done for step in steps])
    done = np.cumsum([step.sequences for step in steps]) / total
    within = (ends > client["all_begun"]) & (ends < client["end"])
    whole = np.arange(np.ceil(done[within][0]), np.floor(done[within][-1]))
    times = np.diff(np.interp(whole, done, ends))[SKIP : SKIP + STEPS]
    if times.size < STEPS // 4:
        raise SystemExit(f"only {times.size} steps while all streams were open; let the clients run longer")
    counted = [step for step, counts in zip(steps, within, strict=True) if counts]
    sequences = sum(step.sequences for step in counted)
    return figures(times * 1e3) | {
        "sequences": sequences / len(counted),
        "begun": sum(step.begun for step in counted) / sequences * total,
        "rows_of_rank": sequences / sum(step.ranks for step in counted),
    }


def run_streams(engine: Engine, streams: int, total: int, *options: str) -> dict[str, float]:
    """`step_times` of `streams` that one client has open, and per step the milliseconds of CPU of each process."""
    engine.wait_for_ranks()
    before = engine.cpu_ms()
    (client,) = engine.clients(1, streams, 1, *options)
    told, _ = client.communicate()
    after = engine.cpu_ms()
    steps = engine.close()
    count = sum(step.sequences for step in steps) / total
    return step_times(steps, total, told) | {f"cpu {name}": (after[name] - before[name]) / count for name in after}


def steady(ranks: int, rows: int, depth: int) -> tuple[dict[str, float], dict[str, float]]:
    """Step times in steady decode; and bytes per step and rank on the step bus, each way."""
    engine = Engine(ranks=ranks, max_num_seqs=rows, async_depth=depth)
    total = ranks * rows
    return run_streams(engine, total, total, "--max-tokens", str(MAX_TOKENS)), wire_bytes(rows)


def churn(ranks: int, rows: int) -> dict[str, float]:
    """As `churn_with_adds`, but that all requests wait in the ranks before the first step: a step's own time."""
    engine = Engine(ranks=ranks, max_num_seqs=rows, async_depth=1)
    total = ranks * rows
    streams = total + total * WAITING_STEPS // CHURN_TOKENS
    return run_streams(engine, streams, total, "--max-tokens", str(CHURN_TOKENS), "--rows", str(total))


def churn_with_adds(ranks: int, rows: int) -> dict[str, float]:
    """Step times with 5% of the requests ending in each step, and as many added by a client and beginning.

    Where the frontend has too little CPU to bring requests as fast as they end, rows stand empty however many wait for
    it: `rows_of_rank` says how many ran.
    """
    engine = Engine(ranks=ranks, max_num_seqs=rows, async_depth=1)
    streams = ranks * (rows + rows // CHURN_SPARE)
    options = ("--max-tokens", str(CHURN_TOKENS), "--again", "--seconds", "12")
    return run_streams(engine, streams, ranks * rows, *options)


def client_tokens_per_s() -> float:
    """Tokens per second that 1,024 streams over 16 connections in 2 processes receive, two steps in flight."""
    engine = Engine(ranks=2, max_num_seqs=512, async_depth=2)
    engine.wait_for_ranks()
    clients = engine.clients(2, 1024, 16, "--max-tokens", str(MAX_TOKENS))
    counted = [json.loads(client.communicate()[0])["counts"] for client in clients]
    engine.close()
    begin = max(counts[len(counts) // 5][0] for counts in counted)
    end = min(counts[-len(counts) // 5][0] for counts in counted)
    total = 0.0
    for counts in counted:
        at = np.interp([begin, end], [when for when, _ in counts], [tokens for _, tokens in counts])
        total += (at[1] - at[0]) / (end - begin)
    return total


def wire_bytes(rows: int) -> dict[str, float]:
    """Bytes of the frames of one step of steady decode of one rank, envelopes included, every 16th row a new block.

    What goes up says half of `standing_steps` ahead, and counts in equal parts for each of them.
    """
    from bus.buses import BUSES
    from bus.messages import StandingSchedule, StepResult

    codec = Codec(BUSES["step"].up, 1 << 20)
    steps = Config().standing_steps // 2
    crossing = pack_ints(list(range(0, rows, 16)) * steps)
    ahead = StandingSchedule(
        first_step=10_000,
        num_steps=steps,
        after=9_990,
        num_blocks=pack_ints([len(range(0, rows, 16))] * steps),
        block_rows=crossing,
        block_ids=crossing,
        more=True,
    )
    result = StepResult(step=10_000, tokens=pack_ints([VOCABULARY - 1] * rows))

    def size(message: Message) -> int:
        return sum(map(len, codec.encode(1 << 60, 1 << 60, message)))

    return {"up": size(ahead) / steps, "down": size(result)}


def add_us(prompt_tokens: int) -> float:
    """Microseconds of the frontend's thread for a client's request: decode, check, hash, route, encode."""
    limits = ModelLimits(VOCABULARY, 8192, eos_token_ids=(2,))
    core = FrontendCore(0, Config(), limits, bytes(32))
    client = Peer("client", "client", 1, 1)
    core.handle(Tick(0.0, 0.0, {}))
    for rank in range(2):
        peer = Peer("command", "rank", rank, 1)
        core.handle(PeerUp(peer))
        load = Load(number=1, acknowledged=0, running=0, waiting=0, pending_prefill_tokens=0, num_blocks=100)
        core.handle(Received(peer, load))
    executor = Peer("command", "executor", 0, 1)
    core.handle(PeerUp(executor))
    core.handle(Received(executor, ExecutorStatus(model="m", max_model_len=8192, num_blocks=9, block_size=16)))
    core.handle(PeerUp(client))
    from bus.buses import BUSES

    bus = BUSES["client"]
    codec = Codec(bus.up, 1 << 26)
    params = GenerateParams(max_tokens=10, temperature=0.0)
    frames = [
        codec.encode(
            1,
            1,
            Generate(
                request_id=f"r{number}",
                prompt_token_ids=pack_ints((np.arange(prompt_tokens) + 7 * number) % 30_000),
                params=params,
                text_output=False,
            ),
        )
        for number in range(1000)
    ]
    times = []
    collect_seldom()
    for parts in frames:
        begin = time.perf_counter()
        for event in (Received(client, codec.decode(parts).message), Drained(0.0)):
            for effect in core.handle(event):
                codec.encode(1, 1, effect.message)
        times.append(time.perf_counter() - begin)
    return statistics.fmean(times[100:]) * 1e6


def rank_start() -> tuple[float, float]:
    """Seconds from a rank's start until it says it is ready (median of 5), and what it holds then, in MB.

    The first start, which compiles the modules where no installation has done so, is not counted.
    """
    seconds, megabytes = [], []
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        environment = os.environ | {"RANKBUS_RUN_DIR": f"{folder}/run", "PYTHONPATH": str(ROOT)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        Path(folder, "run").mkdir(mode=0o700)
        for _ in range(6):
            begin = time.monotonic()
            command = [sys.executable, "-m", "ranks", "--index", "0"]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            for line in process.stderr:
                if '"rank ready"' in line:
                    break
            seconds.append(time.monotonic() - begin)
            resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            assert resident is not None
            megabytes.append(int(resident[1]) / 1000)
            process.terminate()
            process.wait(10)
    return statistics.median(seconds[1:]), statistics.median(megabytes[1:])


@contextmanager
def peer_wheel(cache: Path) -> Iterator[Path]:
    """tpu-inference's wheel, unpacked; fetched once, without what it depends on."""
    folder = cache / "peers" / PEER.replace("==", "-")
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download, PEER]
            subprocess.run(command, check=True)
            (wheel,) = Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    yield folder


def measure_peers(model: Path, cache: Path) -> dict[str, Any]:
    with peer_wheel(cache) as wheel:
        command = [sys.executable, "-m", "bench.peers", "--model", str(model), "--tpu-inference", str(wheel)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    peers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return peers


def measure_asyncllm() -> float:
    command = [sys.executable, "-m", "bench.asyncllm"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours-only", action="store_true", help="leave the peers out; nothing is written")
    arguments = parser.parse_args()
    console = Console()
    ours: dict[str, dict[str, float]] = {}
    wire: dict[str, dict[str, float]] = {}
    for ranks, rows in SIZES:
        with console.status(f"{ranks} × {rows}"):
            ours[f"{ranks}x{rows}"], wire[f"{ranks}x{rows}"] = steady(ranks, rows, depth=1)
    with console.status("two steps in flight, requests that begin and end, tokens to clients, adding a request"):
        pipelined, _ = steady(2, 256, depth=2)
        churning, adding = churn(2, 256), churn_with_adds(2, 256)
        tokens_per_s = client_tokens_per_s()
        added = {str(size): add_us(size) for size in (128, 4096)}
        ready_s, rss_mb = rank_start()
    peers: dict[str, Any] = {"vllm": {}, "dpscheduler": {}}
    asyncllm = 0.0
    if not arguments.ours_only:
        with console.status("the peers"):
            settings = load()
            peers = measure_peers(model_files.resolve(settings).folder, settings.cache_path)
            asyncllm = measure_asyncllm()
    dp = peers["dpscheduler"]

    table = Table(
        "ms per step", "mean", "median", "p99", "DPScheduler, mean", "ratio", title="A step without the model"
    )
    beside = {name: dp.get(name, {}).get("mean") for name in ours}
    beside[PIPELINED] = beside["2x256"]
    if dp:
        beside |= {CHURN: dp["churn 2x256"]["mean"], CHURN_WITH_ADDS: dp["churn 2x256"]["with_adds"]}
    for name, own in (ours | {PIPELINED: pipelined, CHURN: churning, CHURN_WITH_ADDS: adding}).items():
        peer = beside.get(name)
        told = [f"{peer:.2f}", f"{peer / own['mean']:.1f}"] if peer else [""] * 2
        table.add_row(name, *(f"{own[key]:.2f}" for key in ("mean", "median", "p99")), *told)
    console.print(table)
    for name, own in (("2x256", ours["2x256"]), (CHURN, churning), (CHURN_WITH_ADDS, adding)):
        console.print(
            f"{name}: {own['sequences']:.0f} sequences in a merged step, {own['rows_of_rank']:.0f} of a rank; "
            f"{own['begun']:.1f} requests begin in a step"
        )
    cpu = ", ".join(f"{key[4:]} {value:.2f}" for key, value in adding.items() if key.startswith("cpu "))
    console.print(f"{CHURN_WITH_ADDS}: ms of CPU per step: {cpu} (each)")
    if adding["rows_of_rank"] < FULL * 256:
        console.print(
            "Rows stood empty, since requests came more slowly than others ended: the time with those added meanwhile "
            "is that in which 512 tokens are drawn, by more than one step."
        )
    for count, figure in peers["vllm"].items():
        console.print(f"vLLM's Scheduler in process, {count} requests: {figure['mean']:.2f} ms per step")
    console.print(f"Adding a request: {added['128']:.0f} µs at 128 tokens, {added['4096']:.0f} µs at 4,096")
    console.print(f"Tokens to clients: {tokens_per_s:,.0f} per second (AsyncLLM: {asyncllm:,.0f})")
    console.print(f"A rank is ready after {ready_s:.2f} s and holds {rss_mb:.0f} MB")
    console.print(f"Bytes per rank and step at 2 × 256: {wire['2x256']}; DPScheduler: {dp.get('2x256', {})}")
    if arguments.ours_only:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    result = {
        "step_ms": {name: own["mean"] for name, own in ours.items()},
        "step_ms_median": {name: own["median"] for name, own in ours.items()},
        "step_ms_p99": {name: own["p99"] for name, own in ours.items()},
        "pipelined_step_ms": {"2x256": pipelined["mean"]},
        "churn_step_ms": {"2x256": churning["mean"]},
        "churn_begun_per_step": {"2x256": churning["begun"]},
        "churn_with_adds_step_ms": {"2x256": adding["mean"]},
        "churn_with_adds_rows_of_rank": {"2x256": adding["rows_of_rank"]},
        "dpscheduler_churn_step_ms": {"2x256": dp["churn 2x256"]["mean"]},
        "dpscheduler_churn_with_adds_step_ms": {"2x256": dp["churn 2x256"]["with_adds"]},
        "dpscheduler_step_ms": {name: dp[name]["mean"] for name in ours},
        "vllm_step_ms": {count: figure["mean"] for count, figure in peers["vllm"].items()},
        "add_us": added["128"],
        "add_4096_us": added["4096"],
        "dpscheduler_add_us": dp["2x256"]["add_us"],
        "dpscheduler_add_4096_us": dp["add 4096"]["add_us"],
        "wire_bytes_per_rank_step": wire["2x256"],
        "dpscheduler_wire_bytes_per_rank_step": dp["2x256"]["wire_bytes_per_rank_step"],
        "client_tokens_per_s": tokens_per_s,
        "asyncllm_tokens_per_s": asyncllm,
        "rank_ready_s": ready_s,
        "rank_rss_mb": rss_mb,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"Written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
