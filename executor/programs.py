"""The fixed set of compiled programs that steps are made of."""

import bisect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax

from bus.log import get_logger
from executor.progress import Progress

log = get_logger()


class Key(NamedTuple):
    """A program, and the size of the bucket it is compiled for."""

    name: str
    size: int


def sizes_up_to(largest: int, smallest: int = 1) -> list[int]:
    """Powers of two from `smallest` on, and `largest` to end with."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def bucket(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of `sizes` (rising) that is at least `wanted`.

    Raises:
        ValueError: all are smaller.
    """
    place = bisect.bisect_left(sizes, wanted)
    if place == len(sizes):
        raise ValueError(f"{wanted} is more than {sizes[-1]}, the most a step may have")
    return sizes[place]


class Programs:
    """Compiles programs ahead, and runs them by name and size.

    A jitted function is never called as such, so nothing can be compiled unseen: a size that was not compiled ahead is
    logged as an error, compiled, and then run.
    """

    def __init__(self) -> None:
        self._sources: dict[Key, tuple[Any, tuple[Any, ...]]] = {}
        self._compiled: dict[Key, Callable[..., Any]] = {}
        self._ready = False

    def add(self, name: str, size: int, function: Any, *arguments: Any) -> None:
        """Declare a program: a jitted function, and arrays or shapes like those it will be called with."""
        self._sources[Key(name, size)] = (function, arguments)

    def compile_all(self, progress: Progress, threads: int = 2) -> None:
        """Compile everything that was added. With a warm cache this is tracing only."""
        started = time.monotonic()
        counter = _CacheMisses()
        # Tracing holds the interpreter, compiling does not: two threads keep both busy.
        with ThreadPoolExecutor(threads) as pool, counter:
            jobs = {pool.submit(self._compile, key): key for key in self._sources}
            progress("compiling programs", 0, len(jobs))
            for done, job in enumerate(as_completed(jobs), 1):
                self._compiled[jobs[job]] = job.result()
                progress("compiling programs", done, len(jobs))
        self._ready = True
        log.info(
            "programs ready",
            programs=len(self._compiled),
            compiled=counter.count,
            seconds=round(time.monotonic() - started, 1),
        )

    def run(self, name: str, size: int, *arguments: Any) -> Any:
        """Call a program. Returns as soon as the device has it, or as soon as the device allows."""
        key = Key(name, size)
        program = self._compiled.get(key)
        if program is None:
            if self._ready:
                log.error("a program was compiled while serving", program=name, size=size)
            program = self._compiled[key] = self._compile(key)
        return program(*arguments)

    def _compile(self, key: Key) -> Callable[..., Any]:
        function, arguments = self._sources[key]
        return function.lower(*arguments).compile()


class _CacheMisses:
    """Counts, while it is entered, the programs that the persistent cache did not have."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "_CacheMisses":
        jax.monitoring.register_event_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_misses":
            with self._lock:
                self.count += 1
