"""Which adapters are loaded, are coming, or are on their way out, and who is told of it: pure, as the core it is for.

An adapter comes in three steps: all of the executor's processes read it, it is put into a free slot between two steps,
and all ranks are told that requests may have it. It goes in two: ranks are told that new requests may not have it, and
its slot is free when none of them has any left that does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bus import messages
from bus.core import Effect, Peer, Send
from bus.log import get_logger
from bus.messages import (
    Adapter,
    AdapterRead,
    AdaptersHeld,
    CommandRequest,
    Error,
    LoadAdapter,
    PlaceAdapter,
    ReadAdapter,
    Reply,
    UnloadAdapter,
)

log = get_logger()


@dataclass(slots=True, eq=False)
class _Asked:
    """A command that is not answered yet; nobody waits for it any more when `peer` is None."""

    peer: Peer | None
    command_id: int
    deadline: float


@dataclass(slots=True, eq=False)
class _Load(_Asked):
    """An adapter that is to come. `read` has what the executor's processes say, by index.

    `announced` is the number of the message by which ranks hear of it, 0 before that is sent.
    """

    body: LoadAdapter
    read: dict[int, AdapterRead] = field(default_factory=dict)
    adapter: Adapter | None = None
    announced: int = 0


@dataclass(slots=True, eq=False)
class _Unload(_Asked):
    adapter: Adapter


@dataclass(slots=True, eq=False)
class _Rank:
    """What a rank that is up has said last: it knows the message `number`, and has requests with `held` besides."""

    peer: Peer
    number: int = 0
    held: list[str] = field(default_factory=list)


class Adapters:
    """The adapters of one executor. Commands to load are carried out one after the other."""

    def __init__(
        self,
        max_loras: int,
        model: str,
        executors: int,
        deadline_s: float,
        first: Sequence[Adapter],
        changed: Callable[[], list[Effect]],
    ) -> None:
        """`model` is the name that no adapter may have, `first` are in the slots from 1 on already.

        `changed` tells frontends which adapters requests may name (`usable`).
        """
        self._max = max_loras
        self._model = model
        self._executors = executors
        self._deadline_s = deadline_s
        self._changed = changed
        self._usable = {adapter.name: adapter for adapter in first}
        self.slots = {adapter.identity: slot for slot, adapter in enumerate(first, 1)}
        """Where rows find their adapters, by identity: those that are usable, come, or go."""
        self._loads: deque[_Load] = deque()
        self._unloads: list[_Unload] = []
        self._ranks: dict[int, _Rank] = {}
        self._read = 0
        self._announced = 0

    @property
    def usable(self) -> list[Adapter]:
        """Those that requests may name."""
        return list(self._usable.values())

    # Ranks

    def rank_up(self, peer: Peer) -> list[Effect]:
        """A rank is to know which adapters its requests may have, before it is told that it may begin."""
        if not self._max:
            return []
        self._ranks[peer.index] = _Rank(peer)
        return [Send(peer, self._announcement())]

    def rank_down(self, index: int, now: float) -> list[Effect]:
        """A rank is gone, and its requests with it."""
        self._ranks.pop(index, None)
        return self._settle(now)

    def held(self, peer: Peer, message: AdaptersHeld, now: float) -> list[Effect]:
        """A rank has heard of a change, or has ended requests; all that it sent before is in steps."""
        rank = self._ranks.get(peer.index)
        if rank is None or rank.peer != peer:
            return []
        rank.number, rank.held = message.number, message.identities
        return self._settle(now)

    # Commands

    def ask(self, peer: Peer, request: CommandRequest, now: float) -> list[Effect]:
        """Load or unload; the answer comes later, or at once."""
        body = request.body
        deadline = now + (self._deadline_s if request.deadline_s is None else request.deadline_s)
        if isinstance(body, LoadAdapter):
            self._loads.append(_Load(peer, request.command_id, deadline, body))
            return self._begin() if len(self._loads) == 1 else []
        assert isinstance(body, UnloadAdapter)
        adapter = self._usable.pop(body.name, None)
        asked = _Asked(peer, request.command_id, deadline)
        if adapter is None:
            return self._refuse(asked, f"adapter {body.name!r} is not loaded; loaded are {self._names()}")
        unload = _Unload(peer, request.command_id, deadline, adapter)
        self._unloads.append(unload)
        log.info("adapter unloaded", name=adapter.name, identity=adapter.identity)
        answer = [] if body.wait else self._answer(unload, True)
        return [*self._changed(), *answer, *self._announce(), *self._settle(now)]

    def expire(self, now: float) -> list[Effect]:
        """Tell those whose deadline has come that it takes longer."""
        effects: list[Effect] = []
        for unload in self._unloads:
            if unload.peer is not None and now >= unload.deadline:
                name = unload.adapter.name
                sentence = f"requests still have adapter {name!r}; it takes no new ones, and goes when they have ended"
                effects += self._refuse(unload, sentence, "deadline")
        for load in self._loads:
            if load.peer is not None and now >= load.deadline:
                effects += self._refuse(
                    load, f"adapter {load.body.name!r} is not loaded yet, but may be soon", "deadline"
                )
        return effects

    # Loading

    def _begin(self) -> list[Effect]:
        """Begin with the next command to load, or the one after that if it cannot be carried out."""
        effects: list[Effect] = []
        while self._loads:
            load = self._loads[0]
            if fault := self._fault(load.body):
                effects += self._refuse(self._loads.popleft(), fault)
                continue
            self._read += 1
            return [*effects, ReadAdapter(number=self._read, name=load.body.name, path=load.body.path)]
        return effects

    def _fault(self, body: LoadAdapter) -> str:
        """Why an adapter need not even be read; empty if it is to be."""
        if not self._max:
            return "adapters are off; max_loras says how many there may be"
        if not body.name or body.name == self._model:
            return f"an adapter cannot be called {body.name!r}; it needs a name that is not the model's"
        if body.name in self._usable and not body.replace:
            return f"adapter {body.name!r} is loaded already; with replace another may take its place"
        return ""

    def read(self, executor: int, message: AdapterRead, now: float) -> list[Effect]:
        """One of the executor's processes has read an adapter, or cannot."""
        if not self._loads or message.number != self._read:
            return []
        load = self._loads[0]
        load.read[executor] = message
        if len(load.read) < self._executors:
            return []
        answers = [load.read[index] for index in sorted(load.read)]
        fault = next((answer.fault for answer in answers if answer.fault), "")
        if not fault and len({answer.identity for answer in answers}) > 1:
            fault = f"the executor's processes find different files in {load.body.path}"
        return self._take(load, fault, message.identity, now)

    def _take(self, load: _Load, fault: str, identity: str, now: float) -> list[Effect]:
        """All have read the adapter of a command, unless there is a `fault`: give it a slot."""
        name, before = load.body.name, self._usable.get(load.body.name)
        forget = PlaceAdapter(number=self._read, slot=0)
        if not fault and before is not None and before.identity == identity:
            self._loads.popleft()
            return [forget, *self._answer(load, identity), *self._begin()]
        free = next((slot for slot in range(1, self._max + 1) if slot not in self.slots.values()), None)
        if not fault and identity not in self.slots and free is None:
            others = f"; loaded are {self._names()}" if self._usable else ""
            fault = f"there are {self._max} adapters already, which is max_loras, those that go counted in{others}"
        if fault:
            log.warning("adapter refused", name=name, path=load.body.path, detail=fault)
            return [forget, *self._refuse(self._loads.popleft(), fault), *self._begin()]
        load.adapter = Adapter(name=name, path=load.body.path, identity=identity)
        effects: list[Effect] = [forget]
        if identity not in self.slots:
            assert free is not None
            self.slots[identity] = free
            effects = [PlaceAdapter(number=self._read, slot=free)]
        else:  # it was going, and is back
            back = [unload for unload in self._unloads if unload.adapter.identity == identity]
            self._unloads = [unload for unload in self._unloads if unload not in back]
            effects += [effect for unload in back for effect in self._answer(unload, True)]
        effects += self._announce()
        load.announced = self._announced
        return [*effects, *self._settle(now)]

    # What follows when ranks have heard

    def _settle(self, now: float) -> list[Effect]:
        """Go on with what waited for ranks."""
        effects: list[Effect] = []
        if self._loads and (load := self._loads[0]).adapter is not None and self._heard(load.announced):
            adapter = load.adapter
            self._loads.popleft()
            replaced = self._usable.get(adapter.name)
            self._usable[adapter.name] = adapter
            log.info("adapter loaded", name=adapter.name, path=adapter.path, identity=adapter.identity)
            effects += [*self._changed(), *self._answer(load, adapter.identity)]
            if replaced is not None:
                effects += self._announce()
            effects += self._begin()
        if not self._heard(self._announced):
            return effects
        wanted = {*self._identities(), *(held for rank in self._ranks.values() for held in rank.held)}
        for identity in [identity for identity in self.slots if identity not in wanted]:
            del self.slots[identity]
        gone = [unload for unload in self._unloads if unload.adapter.identity not in self.slots]
        self._unloads = [unload for unload in self._unloads if unload not in gone]
        return [*effects, *(effect for unload in gone for effect in self._answer(unload, True))]

    def _heard(self, number: int) -> bool:
        return all(rank.number >= number for rank in self._ranks.values())

    def _identities(self) -> list[str]:
        """Those that requests may have from now on."""
        coming = [load.adapter.identity for load in self._loads if load.adapter is not None]
        return list(dict.fromkeys([*(adapter.identity for adapter in self._usable.values()), *coming]))

    def _announce(self) -> list[Effect]:
        self._announced += 1
        message = self._announcement()
        return [Send(rank.peer, message) for _, rank in sorted(self._ranks.items())]

    def _announcement(self) -> messages.Adapters:
        return messages.Adapters(number=self._announced, identities=self._identities())

    # Answers

    def _names(self) -> str:
        return ", ".join(map(repr, self._usable)) or "none"

    def _answer(self, asked: _Asked, value: str | bool) -> list[Effect]:
        peer, asked.peer = asked.peer, None
        return [Send(peer, Reply(command_id=asked.command_id, value=value))] if peer is not None else []

    def _refuse(self, asked: _Asked, sentence: str, code: str = "invalid") -> list[Effect]:
        peer, asked.peer = asked.peer, None
        return [Send(peer, Error(code=code, message=sentence, command_id=asked.command_id))] if peer is not None else []
