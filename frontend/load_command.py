"""``rankbus replay load``: send a journal's requests to a live engine, with their timing, and compare latencies."""

import argparse
import random
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from bus.config import Config, load, split_flags
from bus.journal.reader import JournalError, find
from bus.links import Identity
from bus.shell import Shell
from frontend.workload import Latencies, LoadCore, Workload, read

CONNECT_S = 10.0
PATIENCE_S = 120.0


def main(arguments: list[str]) -> int:
    """Run ``rankbus replay load``; returns 0, 1 if requests were not answered, 2 if there is nothing to send.

    Raises:
        ConfigError: a setting among the arguments cannot be used.
    """
    flags, rest = split_flags(arguments)
    parser = argparse.ArgumentParser(prog="rankbus replay load", description=__doc__)
    parser.add_argument(
        "journals", nargs="+", metavar="J", help="files, folders of them, or names of frontends' starts"
    )
    parser.add_argument("--speed", type=_positive, default=1.0, help="2 sends twice as fast as it was (default: 1)")
    parser.add_argument("--endpoint", help="client bus to send to (default: the one of frontend 0 in run_dir)")
    options = parser.parse_args(rest)
    config = load(flags)
    try:
        journals = [journal for journal in find(options.journals) if journal.process.startswith("frontend-")]
        workload = read(journals)
        if not workload.arrivals:
            raise JournalError("there is no request in these journals; a frontend's journal has them")
        core = send(workload, options.speed, config, options.endpoint or config.client_endpoint(0))
    except JournalError as error:
        print(f"rankbus: {error}", file=sys.stderr)
        return 2
    for name, damage in workload.damage:
        print(f"{name}: {damage}", file=sys.stderr)
    _tell(workload, core, options.speed, Console(soft_wrap=True))
    return 1 if core.latencies.unanswered or workload.damage else 0


def send(workload: Workload, speed: float, config: Config, endpoint: str) -> LoadCore:
    """Send a workload to the frontend at `endpoint`; what was heard.

    Raises:
        JournalError: there is no frontend.
    """
    core = LoadCore(workload.arrivals, speed, time.monotonic, CONNECT_S, PATIENCE_S)
    me = Identity("client", random.randrange(2**31), time.time_ns())
    shell = Shell(me, config, core, lambda effect: None)
    shell.connect("client", endpoint)
    reason = shell.run()
    if core.begun is None:
        raise JournalError(f"{reason} at {endpoint}; is the engine running?")
    if core.latencies.unanswered:
        print(f"rankbus: {core.latencies.unanswered} requests were not answered: {reason}", file=sys.stderr)
    return core


def _tell(workload: Workload, core: LoadCore, speed: float, console: Console) -> None:
    now, before = core.latencies, workload.recorded
    console.print(
        f"{now.asked_for} requests in {core.seconds:.1f} s, {speed:g} times as fast as recorded; "
        f"{now.tokens} tokens, {now.tokens / max(core.seconds, 1e-9):.1f} per second; "
        f"sent at most {core.behind_s * 1000:.0f} ms late"
    )
    for name, one in (("recorded", before), ("now", now)):
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(one.ends.items()))
        console.print(f"  {name}: {one.tokens} tokens; ended: {ends or 'none'}; not answered: {one.unanswered}")
    table = Table("ms", "", "p50", "p90", "p99", "max")
    for column in table.columns[2:]:
        column.justify = "right"
    for what, name in (("time to first token", "first"), ("between tokens", "between"), ("until the end", "total")):
        table.add_row(what, "recorded", *_percentiles(before, name))
        table.add_row("", "now", *_percentiles(now, name), end_section=True)
    console.print(table)


def _percentiles(latencies: Latencies, name: str) -> list[str]:
    values = getattr(latencies, name)
    if not values:
        return ["–"] * 4
    return [f"{1000 * value:.1f}" for value in np.percentile(values, [50, 90, 99, 100])]


def _positive(given: str) -> float:
    value = float(given)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{given} is not allowed; it must be more than 0")
    return value
