"""Adapters on their way to the device: read by a thread of its own while steps run, put into a slot between steps."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from bus.log import get_logger
from bus.messages import AdapterRead, PlaceAdapter, ReadAdapter
from executor.adapter_files import AdapterError

log = get_logger()


class AdapterRunner(Protocol):
    """What holds the slots; see `runner.Runner`."""

    def read_adapter(self, name: str, path: str) -> Any: ...

    def place_adapter(self, slot: int, adapter: Any) -> None: ...


class AdapterLoader:
    """Does what `ReadAdapter` and `PlaceAdapter` say, and posts an `AdapterRead` for each of the former."""

    def __init__(
        self,
        runner: AdapterRunner,
        between_steps: Callable[[Callable[[], None]], None],
        post: Callable[[AdapterRead], None],
    ) -> None:
        self._runner = runner
        self._between_steps = between_steps
        self._post = post
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._brought: dict[int, Any] = {}
        """By number, until it is placed or forgotten."""

    def read(self, wanted: ReadAdapter) -> None:
        """Begin to read an adapter."""
        self._thread.submit(self._read, wanted)

    def place(self, placed: PlaceAdapter) -> None:
        """Put what was read into a slot, or forget it."""
        brought = self._brought.pop(placed.number, None)
        if placed.slot:
            self._between_steps(lambda: self._runner.place_adapter(placed.slot, brought))

    def _read(self, wanted: ReadAdapter) -> None:
        try:
            self._brought[wanted.number] = brought = self._runner.read_adapter(wanted.name, wanted.path)
        except AdapterError as error:
            answer = AdapterRead(number=wanted.number, fault=str(error))
        except Exception as error:  # such as no memory: it is that adapter's fault, and the engine goes on
            log.exception("an adapter could not be read", name=wanted.name, path=wanted.path)
            answer = AdapterRead(number=wanted.number, fault=f"{wanted.path}: {type(error).__name__}: {error}")
        else:
            answer = AdapterRead(number=wanted.number, identity=brought.identity)
        self._post(answer)
