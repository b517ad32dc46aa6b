"""Carries the core's effects from the bus thread to the event loop of the HTTP side.

The other way needs nothing of its own: `bus.shell.Shell.post` takes calls from any thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Handlers = Mapping[type, Callable[[Any], None]]
"""What to do with an effect, by its type; called on the event loop, in the order the effects came."""


class Bridge:
    """A queue from the bus thread to one event loop, which is woken once for all that came since it last looked.

    Effects that come before `attach` wait: the buses run while vLLM is still being imported.
    """

    def __init__(self) -> None:
        self._effects: deque[Any] = deque()
        self._handlers: Handlers = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    def deliver(self, effect: Any) -> None:
        """Queue an effect. Bus thread only."""
        self._effects.append(effect)
        loop = self._loop
        if loop is not None and not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._drain)

    def attach(self, handlers: Handlers) -> None:
        """Begin to hand effects to `handlers`, on the running event loop, with those that wait first."""
        self._handlers = handlers
        self._woken = True  # by the call below: the bus thread need not wake the loop before that ran
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._drain)

    def detach(self) -> None:
        """Hand over nothing more; the event loop is about to end."""
        self._loop = None

    def _drain(self) -> None:
        self._woken = False  # before looking: what comes from here on wakes the loop again
        while self._effects:
            effect = self._effects.popleft()
            self._handlers[type(effect)](effect)
