"""``rankbus top``: the engine in a terminal, live: what each rank, the executor and the frontend do."""

import argparse
import contextlib
import http.client
import os
import queue
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bus.config import load, split_flags
from bus.messages import AnyCommand, Drain, Resume, SetPause
from frontend.client import Client, EngineError
from frontend.sight import ExecutorSight, RankSight, Snapshot, decode, quantile

EVENTS = "/dashboard/events"
CONNECT_S = 5.0
WINDOW = 5
"""Rates are over this many snapshots, about as many seconds."""
COMMANDS: dict[str, tuple[str, Callable[[int], AnyCommand]]] = {
    "p": ("pause", lambda rank: SetPause(mode="keep")),
    "r": ("resume", lambda rank: Resume()),
    "d": ("drain", lambda rank: Drain(rank=rank)),
}
"""What a key does to the selected rank."""
STATE_STYLE = {"up": "green", "paused": "yellow", "draining": "yellow"}
KEYS = "↑ ↓ select a rank   p pause   r resume   d drain   q quit"


def main(arguments: list[str]) -> int:
    """Run ``rankbus top`` until q is pressed; returns 0, or 1 if the frontend cannot be reached.

    Raises:
        ConfigError: a setting among the arguments cannot be used.
    """
    flags, rest = split_flags(arguments)
    parser = argparse.ArgumentParser(
        prog="rankbus top",
        description=__doc__,
        epilog="Settings of the engine (--run-dir, --port and so on) are taken as well; `rankbus config` lists them.",
    )
    parser.add_argument("--frontend", type=int, default=0, metavar="N", help="whose view to show (default: 0)")
    parser.add_argument("--once", action="store_true", help="print what there is now, and end")
    options = parser.parse_args(rest)
    config = load(flags)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    feed = Feed(host, config.port + options.frontend)
    console = Console()
    if options.once:
        if not feed.wait(CONNECT_S):
            print(f"rankbus: {feed.trouble}", file=sys.stderr)
            return 1
        console.print(Screen(feed.view()).render())
        return 0
    with Operator(config.client_endpoint(options.frontend)) as operator, _keys() as key:
        _watch(feed, operator, key, console)
    return 0


class View(NamedTuple):
    """What is shown: two snapshots that rates are made of (the same one if there is only one), and what went wrong."""

    before: Snapshot
    now: Snapshot
    trouble: str = ""


class Feed:
    """Reads a frontend's stream of snapshots on a thread, and connects again when it ends."""

    RETRY_S = 1.0

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._shots: deque[Snapshot] = deque(maxlen=WINDOW + 1)
        self._came = threading.Event()
        self.trouble = f"no answer from http://{host}:{port}{EVENTS}"
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to see; whether there is."""
        return self._came.wait(timeout_s)

    def view(self) -> View | None:
        """What is known now."""
        shots = list(self._shots)
        return View(shots[0], shots[-1], self.trouble) if shots else None

    def _run(self) -> None:
        again = threading.Event()
        while True:
            try:
                self._read()
                self.trouble = "the frontend has ended the connection"
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                self.trouble = f"http://{self._host}:{self._port}{EVENTS}: {error or type(error).__name__}"
            again.wait(self.RETRY_S)

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=15)
        with contextlib.closing(connection):
            connection.request("GET", EVENTS)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"status {response.status}")
            self._shots.clear()
            while line := response.readline():
                if line.startswith(b"data: "):
                    self._shots += map(decode, msgspec.json.decode(line[6:], type=list[msgspec.Raw]))
                    self.trouble = ""
                    if self._shots:
                        self._came.set()


class Operator:
    """Gives commands to ranks on a thread, one after the other, and knows what became of the last one."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._orders: queue.SimpleQueue[tuple[str, int, AnyCommand] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.said = ""

    def give(self, key: str, rank: int) -> None:
        """Do to a rank what a key means."""
        name, make = COMMANDS[key]
        self.said = f"{name} rank {rank} …"
        self._orders.put((name, rank, make(rank)))

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            name, rank, body = order
            try:
                with Client(self._endpoint) as client:
                    reply = client.command(body, ranks=[rank])
                self.said = f"{name} rank {rank}: {'no answer in time' if reply.missing else 'done'}"
            except (EngineError, TimeoutError) as error:
                self.said = f"{name} rank {rank}: {error}"

    def __enter__(self) -> "Operator":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)


class Screen:
    """What one look at the engine shows."""

    def __init__(self, view: View | None, selected: int | None = None, said: str = "") -> None:
        self._view = view
        self._selected = selected
        self._said = said

    def render(self) -> RenderableType:
        """All of it."""
        if self._view is None:
            return Text(self._said or "waiting for the frontend")
        before, now, trouble = self._view
        parts: list[RenderableType] = [self._head(now, trouble), self._ranks(before, now), self._others(before, now)]
        if now.errors:
            parts.append(Text("\n".join(f"{at[11:19]} {text}" for at, _, text in now.errors[-4:]), "yellow"))
        if self._selected is not None:
            parts.append(Text(f"{KEYS}   {self._said}", "dim"))
        return Group(*parts)

    def _head(self, now: Snapshot, trouble: str) -> Text:
        clock = time.strftime("%H:%M:%S", time.localtime(now.at))
        head = Text(f"rankbus  {now.model or 'no executor'}  {clock}  ")
        head.append("ready" if now.ready else "not ready", "green" if now.ready else "red")
        if trouble:
            head.append(f"  {trouble}", "red")
        return head

    def _ranks(self, before: Snapshot, now: Snapshot) -> Table:
        table = Table(expand=False, pad_edge=False, box=None, header_style="dim")
        table.add_column("")
        table.add_column("rank")
        table.add_column("state")
        for name in (
            "running",
            "waiting",
            "idle sess.",
            "KV",
            "hits",
            "tokens/s",
            "preempted",
            "drafts right",
            "steps/s",
            "ms/step",
            "schedule",
            "update",
            "in flight",
        ):
            table.add_column(name, justify="right")
        for index, rank in enumerate(now.ranks):
            old = before.ranks[index] if index < len(before.ranks) else rank
            mark = "▸" if index == self._selected else ""
            state = Text(rank.state, STATE_STYLE.get(rank.state, "red"))
            table.add_row(mark, str(rank.rank), state, *_rank_cells(old, rank, now.at - before.at))
        return table

    def _others(self, before: Snapshot, now: Snapshot) -> Text:
        lines = [f"imbalance  {imbalance(now.ranks)}"]
        if now.executor is None:
            lines.append("executor   down")
        else:
            lines.append(
                f"executor   {_executor_line(before.executor or now.executor, now.executor, now.at - before.at)}"
            )
        first, between = (
            " ".join(
                f"{name} {_seconds(quantile(fraction, old, new))}" for name, fraction in (("p50", 0.5), ("p99", 0.99))
            )
            for old, new in ((before.first, now.first), (before.between, now.between))
        )
        ended = sum(now.ended.values()) - sum(before.ended.values())
        lines.append(
            f"frontend {now.frontend} {now.unfinished} unfinished, {_per_s(ended, now.at - before.at)} ended/s, "
            f"{now.refused} refused, {now.rejected_frames} frames rejected; first token {first}; between {between}"
        )
        return Text("\n".join(lines))


def imbalance(ranks: Sequence[RankSight]) -> str:
    """How far the busiest rank is above the mean of those that are up, by running and waiting requests."""
    loads = [rank.running + rank.waiting for rank in ranks if rank.up]
    if not sum(loads):
        return "–"
    return f"{100 * (max(loads) * len(loads) / sum(loads) - 1):.0f}%"


def _rank_cells(old: RankSight, rank: RankSight, seconds: float) -> Iterator[str]:
    if not rank.up:
        return
    steps = rank.steps - old.steps
    prompt = rank.prompt_tokens - old.prompt_tokens
    cached = rank.cached_tokens - old.cached_tokens
    yield str(rank.running)
    yield str(rank.waiting)
    yield str(rank.idle_sessions)
    yield f"{100 * rank.used_blocks / rank.num_blocks:.0f}%" if rank.num_blocks else "–"
    total = (cached, prompt) if prompt > 0 <= cached else (rank.cached_tokens, rank.prompt_tokens)
    yield f"{100 * total[0] / total[1]:.0f}%" if total[1] else "–"
    yield _per_s(rank.tokens - old.tokens, seconds)
    yield str(rank.preemptions)
    drafts, right = rank.draft_tokens - old.draft_tokens, rank.accepted_tokens - old.accepted_tokens
    yield f"{100 * right / drafts:.0f}%" if drafts > 0 <= right else "–"
    yield _per_s(steps, seconds)
    yield _ms(seconds, steps)
    yield _ms(rank.schedule_s - old.schedule_s, steps)
    yield _ms(rank.update_s - old.update_s, steps)
    yield str(rank.in_flight)


def _executor_line(old: ExecutorSight, new: ExecutorSight, seconds: float) -> str:
    steps = new.steps - old.steps
    parts = [
        f"{name} {_ms(getattr(new, field) - getattr(old, field), steps)}"
        for name, field in (
            ("device", "device_s"),
            ("dispatch", "dispatch_s"),
            ("wait", "merge_wait_s"),
            ("merge", "merge_s"),
            ("split", "split_s"),
        )
    ]
    wide = f"{(new.sequences - old.sequences) / steps:.1f}" if steps > 0 else "–"
    return (
        f"{_per_s(steps, seconds)} steps/s of {wide} sequences; ms per step: {', '.join(parts)}; "
        f"{new.in_flight} in flight; ranks missed {new.missed} times"
    )


def _per_s(change: float, seconds: float) -> str:
    return f"{change / seconds:.1f}" if seconds > 0 <= change else "–"


def _ms(seconds: float, steps: int) -> str:
    return f"{1000 * seconds / steps:.2f}" if steps > 0 <= seconds else "–"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.0f} ms"


def _watch(feed: Feed, operator: Operator, key: Callable[[float], str], console: Console) -> None:
    """Show the engine until q is pressed."""
    selected = 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            view = feed.view()
            live.update(Screen(view, selected, operator.said if view else feed.trouble).render(), refresh=True)
            pressed = key(0.25)
            ranks = len(view.now.ranks) if view else 1
            if pressed == "q":
                return
            if pressed in ("up", "k"):
                selected = (selected - 1) % ranks
            elif pressed in ("down", "j"):
                selected = (selected + 1) % ranks
            elif pressed in COMMANDS and view is not None:
                operator.give(pressed, selected)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or nothing; q when there is no more input."""
    names = {"\x1b[A": "up", "\x1b[B": "down", "\x03": "q", "": "q"}

    def key(timeout_s: float) -> str:
        if not select.select([sys.stdin], [], [], timeout_s)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 8).decode(errors="replace")
        return names.get(pressed, pressed)

    if not sys.stdin.isatty():
        yield key
        return
    before: list[Any] = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
