"""How far long work has come, told to whoever waits for it."""

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from bus.log import get_logger

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is in all."""

log = get_logger()

_LOG_INTERVAL_S = 5.0


def show(console: Console) -> Progress:
    """A `Progress` that draws a bar per kind of work on a terminal, and elsewhere logs a line every few seconds."""
    return _drawn(console) if console.is_terminal else _logged()


def _drawn(console: Console) -> Progress:
    bars: dict[str, Bars] = {}

    def draw(what: str, done: int, total: int) -> None:
        if what not in bars:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            bars[what] = Bars(*columns, console=console)
            bars[what].add_task(what)
            bars[what].start()
        bars[what].update(bars[what].task_ids[0], completed=done, total=total)
        if done >= total:
            bars.pop(what).stop()

    return draw


def _logged() -> Progress:
    shown: dict[str, float] = {}

    def write(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - shown.get(what, -math.inf) >= _LOG_INTERVAL_S:
            shown[what] = now
            log.info(what, percent=round(100 * done / max(total, 1)))

    return write
