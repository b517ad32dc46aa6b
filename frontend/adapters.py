"""The LoRA adapters that requests may name, as the executor says, and what must be loaded again when it begins anew."""

from bus.core import Effect, Peer, Send
from bus.messages import Adapter, CommandRequest, ExecutorStatus, LoadAdapter
from frontend.params import BadRequest
from frontend.routing import Unroutable

_FIRST_ID = 2**61
"""Numbers of this module's own commands; those of `frontend.commands` count from 1."""


class Adapters:
    """The adapters of the executor that is up, and of the one that was up before, where they are not there again."""

    def __init__(self) -> None:
        self._usable: dict[str, Adapter] = {}
        self._missing: dict[str, Adapter] = {}
        """What the executor before had, and the present one has not, or not yet."""
        self._asked: dict[int, str] = {}
        """Adapters that are being loaded again, by command."""
        self._has_status = False
        self._next_id = _FIRST_ID

    @property
    def usable(self) -> list[Adapter]:
        """Those that requests may name."""
        return list(self._usable.values())

    @property
    def known(self) -> list[Adapter]:
        """Those that requests may name, and those that are to be loaded again."""
        return [*self._usable.values(), *self._missing.values()]

    def identity(self, name: str) -> str:
        """The identity of the adapter that a request names, or empty if that is empty.

        Raises:
            BadRequest: there is no such adapter.
            Unroutable: it is not there yet, after the executor began anew.
        """
        if not name:
            return ""
        if (adapter := self._usable.get(name)) is not None:
            return adapter.identity
        if name in self._missing:
            raise Unroutable(f"adapter {name!r} is being loaded again, since the executor began anew; try again soon")
        loaded = ", ".join(map(repr, self._usable)) or "none"
        raise BadRequest(f"adapter {name!r} is not loaded; loaded are {loaded}")

    def executor_lost(self) -> None:
        """The executor is gone, and its adapters with it."""
        self._missing |= self._usable
        self._usable.clear()
        self._asked.clear()
        self._has_status = False

    def see(self, executor: Peer, status: ExecutorStatus) -> list[Effect]:
        """Take what the executor has; ask it for what the one before had, when it is heard of first."""
        is_first, self._has_status = not self._has_status, True
        self._usable = {adapter.name: adapter for adapter in status.adapters}
        for name in self._usable:
            self._missing.pop(name, None)
        return [self._load(executor, adapter) for adapter in self._missing.values()] if is_first else []

    def answered(self, command_id: int, loaded: bool) -> bool:
        """Take the answer to a command, if it is one of this module's; says whether it is."""
        name = self._asked.pop(command_id, None)
        if name is not None and not loaded:
            self._missing.pop(name, None)
        return name is not None

    def _load(self, executor: Peer, adapter: Adapter) -> Effect:
        command_id, self._next_id = self._next_id, self._next_id + 1
        self._asked[command_id] = adapter.name
        # Of several frontends each asks; to all but the first it is there already, the same one.
        body = LoadAdapter(name=adapter.name, path=adapter.path, replace=True)
        return Send(executor, CommandRequest(command_id=command_id, body=body))
