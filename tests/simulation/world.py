"""A whole engine in one thread: the real cores over a simulated network and device, in an order drawn from a seed.

The device keeps KV as prefix hashes per block and checks at every step that each sequence finds its own in its blocks,
so that a wrong position, block, row or prefix-cache hit shows at once, and not only in the tokens.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bus.config import Config
from bus.core import Core, Drained, Event, Peer, PeerDown, PeerUp, Posted, Received, Send, Stop, Tick, WakeAt
from bus.counters import Counters
from bus.messages import PROTOCOL_MINOR, KvPool, Message, RequestEnded, Role, Sampling
from bus.wire import pack_ints, unpack_ints
from executor.checks import Limits
from executor.core import ExecutorCore, RunStep, StepDone
from executor.drafts import judge
from executor.step import Drafts, MergedStep, SampledStep
from frontend.core import FrontendCore
from frontend.params import ModelLimits
from frontend.seam import AbortCall, AddCall, Deliver, StatusUpdate
from ranks.core import RankCore
from ranks.native import NativeScheduler
from ranks.scheduler import Scheduler

VOCAB = 97
TICK_S = 0.1
Name = tuple[Role, int]


def chain(before: int, token: int) -> int:
    """Hash of a prefix from the hash of the one a token shorter."""
    return (before * 31 + token + 1) % 1_000_003


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """What the simulated model answers to a prompt."""
    prefix, answer = 0, []
    for token in prompt:
        prefix = chain(prefix, token)
    for _ in range(count):
        answer.append(prefix % VOCAB)
        prefix = chain(prefix, answer[-1])
    return answer


def limits_of(config: Config) -> Limits:
    """What the simulated executor allows; `num_blocks` and `max_model_len` are set."""
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    blocks = [config.num_blocks // config.ranks] * config.ranks
    limits = config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
    return Limits(*limits, VOCAB, blocks, most_drafts=config.most_drafts)


def load_native(config: Config, counters: Counters) -> Callable[[KvPool], Scheduler]:
    """Our own scheduler, as `ranks.vllm_loading.load` loads vLLM's."""
    return lambda pool: NativeScheduler(config, pool, counters)


class SimulatedDevice:
    """Histories per row and KV per block, built from merged steps alone."""

    def __init__(self, config: Config) -> None:
        self._block_size = config.block_size
        self._histories: dict[int, dict[int, int]] = {}
        self._kv: dict[tuple[int, int], dict[int, int]] = {}

    def run(self, step: MergedStep) -> SampledStep:
        for setup in step.setups:
            if setup.start == 0:
                self._histories[setup.row] = {}
            self._histories[setup.row].update(enumerate(setup.tokens.tolist(), setup.start))
        drafts = step.drafts or Drafts(np.zeros_like(step.rows), np.empty(0, np.int32))
        known = step.positions + step.num_tokens - drafts.counts
        where = zip(np.repeat(step.rows, drafts.counts), np.repeat(known, drafts.counts) + drafts.places, strict=True)
        for (row, position), token in zip(where, drafts.tokens.tolist(), strict=True):
            self._histories[int(row)][int(position)] = token
        prefixes = [self._write(step, index) for index in range(step.rows.size)]
        for index, hashes in enumerate(prefixes):
            self._check(step, index, hashes)
        indices, tokens = [], []
        for index, hashes in enumerate(prefixes):
            for position in range(int(known[index]), len(hashes) + 1) if step.samples[index] else ():
                token = hashes[position - 1] % VOCAB
                self._histories[int(step.rows[index])][position] = token
                indices.append(index)
                tokens.append(token)
        judged = judge(step.rows.size, drafts, np.array(indices, np.int32), np.array(tokens, np.int32))
        return SampledStep(judged.tokens, counts=None if step.drafts is None else judged.counts)

    def _write(self, step: MergedStep, index: int) -> list[int]:
        """Store the KV of the tokens that run; returns the prefix hashes of all positions up to the last."""
        first = int(step.positions[index])
        history = self._histories[int(step.rows[index])]
        hashes, prefix = [], 0
        for position in range(first + int(step.num_tokens[index])):
            prefix = chain(prefix, history[position])
            hashes.append(prefix)
            if position >= first:
                self._cell(step, index, position)[position % self._block_size] = prefix
        return hashes

    def _check(self, step: MergedStep, index: int, hashes: list[int]) -> None:
        for position, expected in enumerate(hashes):
            found = self._cell(step, index, position).get(position % self._block_size)
            assert found == expected, f"row {step.rows[index]} finds another's KV at position {position}"

    def _cell(self, step: MergedStep, index: int, position: int) -> dict[int, int]:
        block = int(step.block_tables[index, position // self._block_size])
        return self._kv.setdefault((int(step.ranks[index]), block), {})


@dataclass
class Process:
    """One start of a process."""

    name: Name
    incarnation: int
    core: Core
    to_drain: bool = True
    wake_at: float | None = None
    device: SimulatedDevice | None = None
    steps: deque[RunStep] = field(default_factory=deque)


@dataclass
class Answer:
    """What the frontend has delivered for a request."""

    tokens: list[int] = field(default_factory=list)
    ended: RequestEnded | None = None


class World:
    """One frontend, one executor and `config.ranks` ranks.

    `load_scheduler` is `ranks.vllm_loading.load` or its like; `wrap` may put something around each core.
    """

    def __init__(
        self,
        seed: int,
        config: Config,
        load_scheduler: Callable[[Config, Counters], Callable[[KvPool], Scheduler]],
        wrap: Callable[[Process], Core] = lambda process: process.core,
    ) -> None:
        self.draw = random.Random(seed)
        self.config = config
        self.now = 0.0
        self.answers: dict[str, Answer] = {}
        self.status: StatusUpdate | None = None
        self.sent: Counter[type[Message]] = Counter()
        """How many messages of each type were sent."""
        self._next_tick = 0.0
        self._incarnations = 0
        self._load_scheduler = load_scheduler
        self._wrap = wrap
        self._links: dict[tuple[str, Name, Name], deque[tuple[Message, int, int]]] = {}
        self._processes: dict[Name, Process] = {}
        executor: Name = ("executor", 0)
        frontend: Name = ("frontend", 0)
        self.ranks: list[Name] = [("rank", index) for index in range(config.ranks)]
        self._wires = [("command", frontend, executor)]
        self._wires += [("command", frontend, rank) for rank in self.ranks]
        self._wires += [("step", executor, rank) for rank in self.ranks]
        for name in (frontend, executor, *self.ranks):
            self.start(name)

    def start(self, name: Name) -> None:
        """Start a process, or start it anew; its peers notice."""
        self._incarnations += 1
        old = self._processes.get(name)
        process = Process(name, self._incarnations, self._make_core(name))
        process.core = self._wrap(process)
        process.device = SimulatedDevice(self.config) if name[0] == "executor" else None
        for bus, one, other in self._wires:
            if name not in (one, other):
                continue
            there = other if name == one else one
            peer = self._processes.get(there)
            if peer is None:
                continue
            if old is not None:
                self._feed(peer, PeerDown(Peer(bus, *name, old.incarnation), "it was started anew"))
            self._links.pop((bus, name, there), None)
            self._links.pop((bus, there, name), None)
        self._processes[name] = process
        for bus, one, other in self._wires:
            there = other if name == one else one
            if name in (one, other) and there in self._processes:
                peer = self._processes[there]
                self._feed(process, PeerUp(Peer(bus, *there, peer.incarnation), PROTOCOL_MINOR))
                self._feed(peer, PeerUp(Peer(bus, *name, process.incarnation), PROTOCOL_MINOR))

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, stops: Sequence[int] = ()) -> None:
        """Start a request at the frontend."""
        self.answers[request_id] = Answer()
        sampling = Sampling(seed=1, max_tokens=max_tokens, stop_token_ids=list(stops))
        call = AddCall(request_id=request_id, prompt_token_ids=pack_ints(list(prompt)), sampling=sampling)
        self._feed(self._processes["frontend", 0], Posted(call))

    def abort(self, request_id: str) -> None:
        """Abort a request; nothing more is delivered for it."""
        self._feed(self._processes["frontend", 0], Posted(AbortCall(request_ids=[request_id])))

    def turn(self) -> None:
        """Let one thing happen, whichever the seed says."""
        self.now += self.draw.expovariate(5000)
        if self.now >= self._next_tick:
            self._next_tick += TICK_S
            for process in self._processes.values():
                self._feed(process, Tick(self.now, self.now, {}))
        links = [key for key, queue in self._links.items() if queue]
        devices = [process for process in self._processes.values() if process.steps]
        drains = [process for process in self._processes.values() if self._wants_drain(process)]
        choices = [
            *(("link", key) for key in links),
            *(("device", it) for it in devices),
            *(("drain", it) for it in drains),
        ]
        if not choices:
            waking = [process.wake_at for process in self._processes.values() if process.wake_at is not None]
            self.now = min([self._next_tick, *waking])
            return
        kind, chosen = self.draw.choice(choices)
        if kind == "link":
            self._deliver(chosen)
        elif kind == "device":
            run = chosen.steps.popleft()
            self._feed(
                chosen, Posted(StepDone(run.number, chosen.device.run(run.step), self.draw.choice([0.0001, 0.01])))
            )
        else:
            chosen.to_drain, chosen.wake_at = False, None
            self._feed(chosen, Drained(self.now), drains=False)

    def run_until(self, condition: Callable[[], bool], turns: int = 100_000) -> None:
        """Take turns until `condition` holds."""
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError(f"nothing comes of it in {turns} turns: {self.status}")

    def rank_loads(self) -> list[tuple[int, int, int]]:
        """(running, waiting, used blocks) of each rank, as the frontend knows it."""
        assert self.status is not None
        return [(load.running, load.waiting, load.used_blocks) for _, load in sorted(self.status.loads.items())]

    @property
    def ready(self) -> bool:
        """Whether every rank can be sent requests."""
        loads = self.status.loads.values() if self.status is not None else ()
        return len(loads) == len(self.ranks) and all(load.num_blocks > 0 for load in loads)

    def _wants_drain(self, process: Process) -> bool:
        return process.to_drain or (process.wake_at is not None and process.wake_at <= self.now)

    def _make_core(self, name: Name) -> Core:
        config = self.config
        if name[0] == "executor":
            return ExecutorCore(config, "simulated", limits_of(config))
        if name[0] == "rank":
            counters = Counters()
            return RankCore(name[1], config, self._load_scheduler(config, counters), counters)
        model = ModelLimits(VOCAB, limits_of(config).max_model_len, ())
        return FrontendCore(0, config, model, bytes(32))

    def _deliver(self, key: tuple[str, Name, Name]) -> None:
        bus, sender, addressee = key
        message, sent_by, sent_to = self._links[key].popleft()
        process = self._processes[addressee]
        if sent_by == self._processes[sender].incarnation and sent_to == process.incarnation:
            self._feed(process, Received(Peer(bus, *sender, sent_by), message))

    def _feed(self, process: Process, event: Event, drains: bool = True) -> None:
        process.to_drain = process.to_drain or drains
        for effect in process.core.handle(event):
            self._do(process, effect)

    def _do(self, process: Process, effect: Any) -> None:
        match effect:
            case Send(peer, message):
                key = (peer.bus, process.name, (peer.role, peer.index))
                self._links.setdefault(key, deque()).append((message, process.incarnation, peer.incarnation))
                self.sent[type(message)] += 1
            case RunStep():
                process.steps.append(effect)
                assert len(process.steps) <= self.config.async_depth
            case WakeAt(at):
                process.wake_at = at
            case Deliver(_, outputs):
                for output in outputs:
                    answer = self.answers[output.request_id]
                    assert answer.ended is None, f"{output.request_id} goes on after its end"
                    answer.tokens += unpack_ints(output.token_ids).tolist()
                    answer.ended = output.ended
            case StatusUpdate():
                self.status = effect
            case Stop(reason):
                raise AssertionError(f"{process.name} ends: {reason}")
            case _:
                raise AssertionError(f"{process.name} has an effect that is not known here: {effect!r}")
