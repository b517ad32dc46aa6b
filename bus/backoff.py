"""Slow a crash loop down: supervisord starts a process that ended again at once, for ever."""

import json
import os
import time
from pathlib import Path

QUICK_S = 60.0
"""A start this soon after the one before counts as part of a crash loop."""
FIRST_S = 0.5
LONGEST_S = 30.0


class Backoff:
    """Counts a process's quick starts in a file that outlives it.

    Times are on the machine's monotonic clock, which all processes since its boot share.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.json"

    def delay(self, now: float) -> float:
        """Note a start at `now` and return how long it must wait: 0 for a first one, then 0.5, 1, 2, … 30 seconds."""
        quick, last = self._read()
        quick = quick + 1 if 0 <= now - last < QUICK_S else 0
        wait = min(LONGEST_S, FIRST_S * 2 ** min(quick - 1, 16)) if quick else 0.0
        self._write(quick, now + wait)
        return wait

    def ended_well(self) -> None:
        """An orderly end: the next start does not count as a crash."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[int, float]:
        try:
            quick, last = json.loads(self._path.read_bytes())
            return int(quick), float(last)
        except (OSError, ValueError, TypeError):
            return 0, float("-inf")

    def _write(self, quick: int, last: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps([quick, last]))
        new.replace(self._path)


def wait_if_crashing(folder: Path, name: str) -> Backoff:
    """Note this start of process `name`, and sleep as long as its crash loop demands. SIGTERM ends the sleep."""
    backoff = Backoff(folder, name)
    time.sleep(backoff.delay(time.monotonic()))
    return backoff
