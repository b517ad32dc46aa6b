"""``rankbus trace``: where the time of a run's steps went, as a trace for Perfetto and in a few words."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bus.journal.command import time_of
from bus.journal.reader import JournalError, find
from bus.trace import chrome
from bus.trace.coverage import Coverage, Pieces, coverage
from bus.trace.timeline import Timeline, read


def main(arguments: list[str]) -> int:
    """Run ``rankbus trace``; returns 0, 1 if parts of the journals cannot be read, 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(prog="rankbus trace", description=__doc__)
    parser.add_argument("journals", nargs="+", metavar="J", help="files, folders of them, or names of process starts")
    parser.add_argument("-o", dest="output", metavar="FILE", required=True, help="open it at ui.perfetto.dev")
    parser.add_argument("--request", metavar="ID", action="append", default=[], help="a lane for this request; again")
    parser.add_argument("--since", metavar="TIME", help="seconds from the first start, or a wall-clock time (UTC)")
    parser.add_argument("--until", metavar="TIME", help="likewise")
    options = parser.parse_args(arguments)
    try:
        journals = find(options.journals)
        begun = min(journal.header().wall for journal in journals)
        since = time_of(options.since, begun, float("-inf"))
        until = time_of(options.until, begun, float("inf"))
        timeline = read(journals, options.request, since, until)
        if not timeline.steps:
            raise JournalError("there is no step in these journals; a trace needs those of ranks and executor")
        with Path(options.output).open("w") as file:
            count = chrome.write(timeline, file)
    except JournalError as error:
        print(f"rankbus: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rankbus: {options.output} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    for name, damage in timeline.damage:
        print(f"{name}: {damage}", file=sys.stderr)
    for name in options.request:
        if not timeline.requests[name]:
            print(f"request {name} is not in these journals", file=sys.stderr)
    taken = Pieces(timeline)
    _tell(timeline, coverage(map(taken.of, timeline.steps.values())), Console(soft_wrap=True))
    print(f"{count} events in {options.output}")
    return 1 if timeline.damage else 0


def _tell(timeline: Timeline, found: Coverage, console: Console) -> None:
    console.print(
        f"{len(timeline.steps)} steps of ranks, {found.steps} of them seen from beginning to end; "
        f"{found.percent:.1f}% of their time is accounted for"
    )
    if not found.steps:
        return
    table = Table("phase", "ms per step", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, seconds in sorted(found.phases.items(), key=lambda item: -item[1]):
        table.add_row(phase, f"{1000 * seconds / found.steps:.3f}", f"{100 * seconds / found.total:.1f}%")
    console.print(table)
