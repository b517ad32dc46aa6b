"""``rankbus journal``: show what a process recorded, and where two recordings part."""

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from bus.journal import text
from bus.journal.blocks import Damaged
from bus.journal.items import Item, Tracker, items, matches, step_of
from bus.journal.reader import Journal, JournalError, Record, find, find_one

QUIET = ("Drained", "Tick", "State")
"""Events that are not shown unless something came of them, or they are asked for."""
CONTEXT = 5
"""Records that are shown before the first difference."""


def main(arguments: list[str]) -> int:
    """Run ``rankbus journal show`` or ``rankbus journal diff``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rankbus journal", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print records")
    show.add_argument("journals", nargs="+", metavar="J", help="files, folders of them, or names of process starts")
    show.add_argument("--step", help="only this step, or a range of steps: 10:20")
    show.add_argument("--request", metavar="ID", help="only what is about this request")
    show.add_argument("--type", help="only these types of messages or events, with commas between")
    show.add_argument("--since", metavar="TIME", help="seconds from the journal's start, or a wall-clock time (UTC)")
    show.add_argument("--until", metavar="TIME", help="likewise")
    show.add_argument("--all", action="store_true", help="show ticks and the like even when nothing came of them")
    show.add_argument("--json", action="store_true", help="one JSON object per record")
    show.set_defaults(run=_show)
    diff = commands.add_parser("diff", help="print the first difference between two journals")
    diff.add_argument("a", metavar="A", help="a file, or the name of a process's start")
    diff.add_argument("b", metavar="B", help="likewise")
    diff.set_defaults(run=_diff)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except JournalError as error:
        print(f"rankbus: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has seen enough
        sys.stderr.close()
        return 0


# show


class _Filter(NamedTuple):
    """What is to be shown; times are wall-clock seconds."""

    steps: range | None
    request: str | None
    types: frozenset[str]
    since: float
    until: float
    all: bool

    def wants(self, record: Record, said: list[Item], tracker: Tracker) -> bool:
        about = [one for item in said for one in tracker.requests(item)] if self.request else ()
        if not self.since <= record.turn.wall <= self.until:
            return False
        if self.request and not matches(self.request, about):
            return False
        if self.types and not any(item.type in self.types for item in said):
            return False
        if self.steps and not any(step in self.steps for item in said if (step := step_of(item)) is not None):
            return False
        narrowed = self.all or self.types or self.steps or self.request
        return bool(narrowed or len(said) > 1 or said[0].type not in QUIET)


def _show(options: argparse.Namespace) -> int:
    damaged = 0
    for journal in find(options.journals):
        header = journal.header()
        if not options.json:
            print(
                f"{header.role}/{header.index}, incarnation {header.incarnation}, code {header.code}, "
                f"model {header.model or 'unknown'}, begun {datetime.fromtimestamp(header.wall, UTC).isoformat()}"
            )
        wanted = _Filter(
            _steps(options.step),
            options.request,
            frozenset((options.type or "").split(",")) - {""},
            time_of(options.since, header.wall, float("-inf")),
            time_of(options.until, header.wall, float("inf")),
            options.all,
        )
        tracker = Tracker()
        for record in journal.records():
            if isinstance(record, Damaged):
                print(f"{journal.name}: {record}", file=sys.stderr)
                damaged += 1
                continue
            said = items(record.turn)
            if not wanted.wants(record, said, tracker):
                continue
            if options.json:
                print(text.json_line(record, said))
            else:
                print(*text.lines(record, said, header.monotonic), sep="\n")
    return 1 if damaged else 0


def _steps(given: str | None) -> range | None:
    if given is None:
        return None
    first, colon, last = given.partition(":")
    try:
        if colon:
            return range(int(first or 0), int(last) + 1 if last else sys.maxsize)
        return range(int(first), int(first) + 1)
    except ValueError:
        raise JournalError(f"--step: {given} is not allowed; it must be a step, or two with a colon between") from None


def time_of(given: str | None, begun: float, default: float) -> float:
    """The wall-clock time that an option names: seconds from `begun`, or a time of day or date and time (UTC).

    Raises:
        JournalError: it is none of these.
    """
    if given is None:
        return default
    try:
        return begun + float(given)
    except ValueError:
        pass
    try:
        if "T" not in given and "-" not in given:
            given = f"{datetime.fromtimestamp(begun, UTC).date()}T{given}"
        time = datetime.fromisoformat(given)
    except ValueError:
        raise JournalError(f"{given} is no time; give seconds, 12:34:56.789, or 2030-01-31T12:34:56") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# diff


def _diff(options: argparse.Namespace) -> int:
    """Compare what two processes were given and answered; times, incarnations and idle events aside."""
    a, b = (find_one([path]) for path in (options.a, options.b))
    before: deque[tuple[Record, list[Item]]] = deque(maxlen=CONTEXT)
    begun = a.header().monotonic
    streams = _told(a), _told(b)
    while True:
        one, other = next(streams[0], None), next(streams[1], None)
        if one is None and other is None:
            print(f"no difference in what {a.name} and {b.name} have")
            return 0
        found = _first_difference(one, other)
        if found:
            for record, said in before:
                print(*text.lines(record, said, begun), sep="\n")
            for sign, side in (("A", one), ("B", other)):
                if side is None:
                    print(f"{sign} ends here")
                else:
                    print(*(f"{sign} {line}" for line in text.lines(side[0], side[1], begun)), sep="\n")
            print(*found, sep="\n")
            return 1
        assert one is not None
        before.append(one)


def _told(journal: Journal) -> Iterator[tuple[Record, list[Item]]]:
    """Records that are not idle. Damage is told on standard error and passed over."""
    for record in journal.records():
        if isinstance(record, Damaged):
            print(f"{journal.name}: {record}", file=sys.stderr)
            continue
        said = items(record.turn)
        if len(said) > 1 or said[0].type not in QUIET:
            yield record, said


def _first_difference(one: tuple[Record, list[Item]] | None, other: tuple[Record, list[Item]] | None) -> Sequence[str]:
    if one is None or other is None:
        return ["one has more records than the other"]
    mine, theirs = (
        [(item.type, str(item.peer), {} if item.type in QUIET else item.fields) for item in side[1]]
        for side in (one, other)
    )
    for place, (item, counterpart) in enumerate(zip(one[1], other[1], strict=False)):
        if mine[place] != theirs[place]:
            where = "the event" if place == 0 else f"effect {place}"
            return [f"{where} differs:", *(f"  {line}" for line in text.differences(item, counterpart))]
    if len(mine) != len(theirs):
        return [f"A has {len(mine) - 1} effects here, B has {len(theirs) - 1}"]
    return []
