"""``rankbus replay``: run a process's core again from its journal, and stop where it does otherwise."""

import argparse
import importlib
import sys
import time
from typing import Any, NamedTuple

import msgspec

from bus import log
from bus.core import Core
from bus.journal import text
from bus.journal.blocks import Damaged
from bus.journal.items import Tracker, items, matches, step_of
from bus.journal.reader import Journal, JournalError, Record, find_one
from bus.journal.recorder import code_version
from bus.journal.records import Header, Turn
from bus.journal.state import StateError, restore
from bus.replay import Difference, Replay, Subject, names_of

SUBJECTS = {
    "frontend": "frontend.replay:subject",
    "rank": "ranks.replay:subject",
    "executor": "executor.replay:with_model",
}
LOAD = "frontend.load_command"
"""What sends a frontend's requests to a live engine."""
WITHOUT_MODEL = "executor.replay:subject"
"""Where the function is that makes a role's `Subject` of a `Header`; imported only when it is replayed."""


class Stops(NamedTuple):
    """Where to hand over to the debugger: at a step, and at whatever is about a request."""

    step: int | None = None
    request: str | None = None


NOWHERE = Stops()


class Outcome(NamedTuple):
    """What a replay came to. `at` is the record with the `difference`."""

    events: int
    frames: int
    at: Record | None = None
    difference: Difference | None = None
    damage: Damaged | None = None
    summary: str = ""


def main(arguments: list[str]) -> int:
    """Run ``rankbus replay``; returns 0 if all was as recorded, 1 if something was not, 2 if there is a gap."""
    if arguments[:1] == ["load"]:
        return int(importlib.import_module(LOAD).main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="rankbus replay", description=__doc__)
    parser.add_argument("role", choices=SUBJECTS, help="whose core; or `load`, which has a command line of its own")
    parser.add_argument("journal", nargs="+", metavar="J", help="files, or the name of a process's start")
    parser.add_argument(
        "--from", metavar="step=N", dest="begin", type=_named("step", int), help="begin at the last state before it"
    )
    parser.add_argument("--until", metavar="step=N", type=_named("step", int), help="stop before this step")
    parser.add_argument(
        "--break", metavar="request=ID", dest="request", type=_named("request", str), help="stop at all about a request"
    )
    parser.add_argument("--model", metavar="DIR", help="where the recorded model is (default: where it was)")
    parser.add_argument("--no-model", action="store_true", help="executor: take what the model drew from the journal")
    options = parser.parse_args(arguments)
    try:
        journal = find_one(options.journal, options.role)
        header = journal.header()
        if options.model:
            header = msgspec.structs.replace(header, config={**header.config, "model": options.model})
        log.configure(header.role, header.index, header.incarnation, "error")  # the rest was said when it happened
        _warn_of_other_code(header)
        began = time.perf_counter()
        stops = Stops(options.until, options.request)
        outcome = replay(journal, header, stops, begin=options.begin, run_model=not options.no_model)
    except JournalError as error:
        print(f"rankbus: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - began
    if outcome.damage is not None:
        print(f"{journal.name}: {outcome.damage}; replayed up to there", file=sys.stderr)
    if outcome.at is not None and outcome.difference is not None:
        print(*_told(outcome.at, outcome.difference, header), sep="\n")
        return 1
    print(f"no difference in {outcome.events} events and {outcome.frames} frames; {seconds:.1f} s")
    if outcome.summary:
        print(outcome.summary)
    return 0 if outcome.damage is None or outcome.damage.last is None else 2


def replay(
    journal: Journal, header: Header, stops: Stops = NOWHERE, *, begin: int | None = None, run_model: bool = True
) -> Outcome:
    """Replay a journal up to its end, the first difference, or damage.

    It begins at the beginning, or with the last recorded state before step `begin`, or where the beginning is missing,
    with the first recorded state.

    Raises:
        JournalError: there is nowhere to begin, or this code cannot replay it.
    """
    subject = subject_of(header, run_model)
    first = _first(journal, begin)
    run = Replay(header, subject, names_of(journal) if header.redacted else None)
    tracker = Tracker()
    events = frames = 0
    for record in journal.records():
        if isinstance(record, Damaged):
            if record.last is None or record.last >= first:
                return Outcome(events, frames, damage=record)
            continue  # before the beginning, or a header: no record is lost that matters
        turn = record.turn
        if record.number < first:
            continue
        if turn.kind == "state":
            if record.number == first:
                run.core = _restored(turn, run.core)
            continue
        if stops != NOWHERE:
            stops = _stop(stops, run.core, record, tracker)
        difference = run.feed(turn)
        events += 1
        frames += sum(not isinstance(effect.subject, str) for effect in turn.effects)
        if difference is not None:
            return Outcome(events, frames, record, difference)
    return Outcome(events, frames, summary=subject.summary() if subject.summary else "")


def subject_of(header: Header, run_model: bool = True) -> Subject:
    """The recorded core, as it began; an executor's with the model unless `run_model` is false."""
    where = SUBJECTS[header.role] if run_model or header.role != "executor" else WITHOUT_MODEL
    module, function = where.split(":")
    subject: Subject = getattr(importlib.import_module(module), function)(header)
    return subject


def _first(journal: Journal, begin: int | None) -> int:
    """The number of the record to begin with: 1, or one that holds a state."""
    first = None
    for record in journal.records():
        if isinstance(record, Damaged):
            continue
        if record.number == 1 or (record.turn.kind == "state" and (first is None or begin is not None)):
            first = record.number
        if begin is None and first is not None:
            break
        if begin is not None and any((step_of(item) or 0) >= begin for item in items(record.turn)):
            break
    if first is None:
        raise JournalError("the journal's beginning is missing, and no state is recorded in what there is")
    return first


def _restored(turn: Turn, new: Core) -> Core:
    try:
        return restore(msgspec.msgpack.decode(turn.data), new)
    except StateError as error:
        raise JournalError(str(error)) from None


def _stop(stops: Stops, core: Core, record: Record, tracker: Tracker) -> Stops:
    """Hand over to the debugger if this record is a place to stop; where to stop from then on."""
    said = items(record.turn)
    about = [one for item in said for one in tracker.requests(item)]
    steps = [step for item in said if (step := step_of(item)) is not None]
    at_step = stops.step is not None and any(step >= stops.step for step in steps)
    if at_step or (stops.request and matches(stops.request, about)):
        print(*text.lines(record, said, record.turn.at), sep="\n")
        debug(core, record)
    return stops._replace(step=None) if at_step else stops


def debug(core: Core, record: Record) -> None:
    """The core before it is given the event of `record`; ``core.handle`` comes when this returns."""
    breakpoint()


def _told(record: Record, difference: Difference, header: Header) -> list[str]:
    said = items(record.turn)
    recorded, replayed = difference.recorded, difference.replayed
    told = [*text.lines(record, said, header.monotonic), ""]
    where = f"effect {difference.place}" if difference.place else "the event"
    told.append(f"record {record.number}, {where}:")
    told.append(f"  recorded: {text.one_line(recorded) if recorded else 'nothing more'}")
    told.append(f"  replayed: {text.one_line(replayed) if replayed else 'nothing more'}")
    if recorded and replayed:
        told += [f"  {line}" for line in text.differences(recorded, replayed)]
    return told


def _warn_of_other_code(header: Header) -> None:
    code = code_version(header.role)
    if header.code != code:
        print(f"recorded by code {header.code}; this is {code}", file=sys.stderr)


def _named(name: str, kind: Any) -> Any:
    """A parser of ``name=value``."""

    def parse(given: str) -> Any:
        key, _, value = given.partition("=")
        if key != name or not value:
            raise argparse.ArgumentTypeError(f"{given} is not allowed; it must be {name}=…")
        try:
            return kind(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given} is not allowed; {name} is a number") from None

    return parse
