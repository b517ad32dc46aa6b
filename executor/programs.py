"""The fixed set of compiled programs that steps are made of."""

import bisect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from bus.log import get_logger
from executor import hosts
from executor import mesh as meshes
from executor.kept import Kept
from executor.progress import Progress

log = get_logger()

Options: TypeAlias = Mapping[str, str] | None
"""Options of XLA's compiler, by name."""


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
    """Compiles programs of a mesh ahead, and runs them by name and size.

    A jitted function is never called as such, so nothing can be compiled unseen: once `compile_all` is done, a program
    that was not compiled ahead is logged as an error, compiled, and then run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._spans_processes = hosts.are_several()
        self._kept = Kept.instead_of_jax() if hosts.is_follower() else None
        self._functions: dict[Key, Any] = {}
        self._options: dict[Key, Options] = {}
        self._traced: dict[Key, Any] = {}
        self._compiled: dict[Key, Callable[..., Any]] = {}
        self._ready = False

    def add(
        self,
        name: str,
        size: int,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        donate: Sequence[int] = (),
        options: Options = None,
    ) -> None:
        """Declare a program: `function` works on a device's parts of the arguments, which `in_specs` say how to make.

        The arguments in `donate` are given away when it is called; `options` are for the compiler.
        """
        self._functions[Key(name, size)] = meshes.jit(function, self._mesh, in_specs, out_specs, donate)
        self._options[Key(name, size)] = options

    def trace(self, name: str, size: int, *arguments: Any) -> Any:
        """Have a program compiled by `compile_all`, for arrays like `arguments` (arrays or shapes).

        Returns:
            The shapes of what it returns.
        """
        traced = self._functions[Key(name, size)].trace(*map(meshes.outline, arguments))
        self._traced[Key(name, size)] = traced
        return traced.out_info

    def compile_all(self, progress: Progress, threads: int = 2) -> None:
        """Compile what was traced, or take it from the persistent cache."""
        started = time.monotonic()
        counter = _CacheMisses()
        # Lowering holds the interpreter, compiling does not: two threads keep both busy.
        with ThreadPoolExecutor(threads) as pool, counter:
            jobs = {pool.submit(self._compile, key, traced, counter): key for key, traced in self._traced.items()}
            progress("compiling programs", 0, len(jobs))
            for done, job in enumerate(as_completed(jobs), 1):
                self._compiled[jobs[job]] = job.result()
                progress("compiling programs", done, len(jobs))
        self._traced.clear()
        self._ready = True
        log.info(
            "programs ready",
            programs=len(self._compiled),
            compiled=counter.count,
            seconds=round(time.monotonic() - started, 1),
        )

    def compile_one(self, key: Key, options: Options = None) -> Any:
        """Compile a program that was traced, with `options` or else its own, and return it."""
        return self._traced[key].lower().compile(compiler_options=options or self._options[key])

    def run(self, name: str, size: int, *arguments: Any) -> Any:
        """Call a program. Returns as soon as the device has it, or as soon as the device allows."""
        key = Key(name, size)
        if self._spans_processes:
            arguments = tuple(meshes.place(self._mesh, argument) for argument in arguments)
        program = self._compiled.get(key)
        if program is None:
            if self._ready:
                log.error("a program was compiled while serving", program=name, size=size)
            program = self._compiled[key] = self._compile(key, self._functions[key].trace(*arguments))
        return program(*arguments)

    def _compile(self, key: Key, traced: Any, counter: "_CacheMisses | None" = None) -> Callable[..., Any]:
        if self._kept is None:
            return traced.lower().compile(compiler_options=self._options[key])
        program, is_new = self._kept.compiled(traced.lower(), self._options[key])
        if is_new and counter is not None:
            counter.add()
        return program


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

    def add(self) -> None:
        """One more."""
        with self._lock:
            self.count += 1

    def _listen(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_misses":
            self.add()
