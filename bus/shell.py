"""The event loop of a process: sockets, clock and threads on the outside, its pure core on the inside.

All that happens to a process goes through `Shell._feed` in one order, and so into the core one event at a time.
"""

import gc
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import Socket as BareSocket
from zmq.backend import zmq_poll

from bus import affinity, curve
from bus.buses import BUSES
from bus.config import Config
from bus.core import Core, Drained, Effect, Event, Peer, PeerDown, PeerUp, Posted, Send, Stop, Tick, WakeAt
from bus.counters import Counters
from bus.journal.recorder import Recorder
from bus.links import Dialer, Identity, Listener, Timing
from bus.log import get_logger
from bus.messages import Goodbye, Message, Role
from bus.phases import Phases
from bus.wire import Codec

log = get_logger()

TICK_S = 0.1
TURNS_PER_DRAIN = 1024
"""How often each socket may give a message before the core hears that all is drained."""
HIGH_WATER_MARK = 100_000
"""Messages that may wait for one peer; one that falls further behind is lost (`PeerDown`)."""
LINGER_MS = 1000
NEW_OBJECTS = 20_000
"""So many more objects that may be part of cycles, and Python looks for garbage among them."""


def collect_seldom() -> None:
    """Have Python look for garbage as the engine's processes do: seldom, and not in what there is by now.

    What a process has made when it begins to serve it keeps. A request makes hundreds of objects and no cycle, so the
    search, by default after every 700, would find nothing but take a tenth of the time under load.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def new_incarnation() -> int:
    """An incarnation for this start of the process: wall time in nanoseconds, so later starts have larger ones."""
    return time.time_ns()


class Shell:
    """Owns a process's sockets and clock and runs its core.

    `perform` gets every effect of the core that is not `Send`, `WakeAt` or `Stop`. With a `recorder`, all that
    passes through the core is journaled. Only `post` and `stop` may be called from other threads.
    """

    def __init__(
        self,
        identity: Identity,
        config: Config,
        core: Core,
        perform: Callable[[Effect], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._me = identity
        self._config = config
        self._core = core
        self._perform = perform
        self._recorder = recorder
        self._counters = Counters()
        self._phases = Phases()
        self._timing = Timing(config.heartbeat_interval_s, config.heartbeat_timeout_s)
        self._context = zmq.Context()
        self._cpu = affinity.choose(identity.role, identity.index, config)
        if self._cpu is not None:
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, self._cpu)
            if affinity.may_batch(config):
                self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._sides: dict[zmq.Socket[bytes], Listener | Dialer] = {}
        self._of_bus: dict[str, list[tuple[zmq.Socket[bytes], Listener | Dialer]]] = {}
        self._events: deque[tuple[Event, bytes]] = deque()
        self._posted: deque[Any] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Other threads may post after `run` has returned: the descriptor stays theirs as long as they know this shell.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._sources: list[tuple[int | zmq.Socket[bytes], int]] = [(self._wake, zmq.POLLIN)]
        self._wake_at: float | None = None
        self._stop_reason: str | None = None

    def bind(self, bus_name: str, endpoint: str) -> None:
        """Be the binding side of a bus at `endpoint`.

        Raises:
            ConfigError: it is a tcp address, and the key for it cannot be had.
        """
        bus = BUSES[bus_name]
        codec = Codec(bus.up, self._config.max_message_bytes)
        limits: dict[Role, int] = {"rank": self._config.ranks, "executor": self._config.executors}
        listener = Listener(bus, self._me, codec, self._counters, self._timing, limits)
        socket = self._open(zmq.ROUTER, listener)
        if curve.is_needed(endpoint):
            curve.guard_binding(socket, self._config)
            endpoint = curve.binding(endpoint)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(endpoint)

    def connect(self, bus_name: str, endpoint: str, index: int = 0) -> None:
        """Be a connecting side of a bus; `index` is that of the process at `endpoint`. It may start later.

        Raises:
            ConfigError: it is a tcp address, and the key for it cannot be had.
        """
        bus = BUSES[bus_name]
        codec = Codec(bus.down, self._config.max_message_bytes)
        dialer = Dialer(bus, self._me, codec, self._counters, self._timing, index)
        socket = self._open(zmq.DEALER, dialer)
        socket.setsockopt(zmq.IDENTITY, dialer.routing_id)
        if curve.is_needed(endpoint):
            curve.guard_connecting(socket, self._config)
        # Not IMMEDIATE: with it, libzmq drops what has come and was not read when a connection ends, Goodbye above all.
        socket.connect(endpoint)

    def post(self, value: Any) -> None:
        """Give the core a `Posted` event from another thread; nothing happens if `run` has returned."""
        self._posted.append(value)
        os.eventfd_write(self._wake, 1)

    def stop(self, reason: str) -> None:
        """End `run` soon; safe in signal handlers and other threads."""
        self._stop_reason = reason
        os.eventfd_write(self._wake, 1)

    def run(self) -> str:
        """Feed the core until `stop` or a `Stop` effect; say Goodbye, close the sockets, return the reason."""
        collect_seldom()
        try:
            with affinity.pinned(self._cpu):
                self._loop()
            assert self._stop_reason is not None
            return self._stop_reason
        finally:
            self._close()

    def _loop(self) -> None:
        next_tick = time.monotonic()
        while self._stop_reason is None:
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + TICK_S
            until = min(next_tick, self._wake_at if self._wake_at is not None else next_tick)
            self._drain(zmq_poll(self._sources, max(0, round((until - time.monotonic()) * 1000))))

    def _drain(self, ready: list[tuple[Any, int]]) -> None:
        """Feed all that has arrived, then one `Drained`; a peer that floods a socket cannot hold it up for ever.

        `ready` has the sources that have something. Each gives one message before they are looked at again, which is
        cheaper than asking each until it has nothing.
        """
        for _ in range(TURNS_PER_DRAIN):
            if not ready or self._stop_reason is not None:
                break
            for source, _ in ready:
                if isinstance(source, int):
                    os.eventfd_read(self._wake)
                    self._take_posted()
                else:
                    self._take_message(source)
            ready = zmq_poll(self._sources, 0)
        self._wake_at = None
        self._feed(Drained(time.monotonic()))

    def _take_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._feed(Posted(self._posted.popleft()))

    def _take_message(self, socket: zmq.Socket[bytes]) -> None:
        parts = _receive(socket)
        if parts is None:
            return
        side = self._sides[socket]
        events = side.receive(parts, time.monotonic())
        if side.outbox:
            self._flush(socket, side)
        for event in events:
            self._feed(event, parts[-1])

    def _tick(self, now: float) -> None:
        for socket, side in self._sides.items():
            events = side.tick(now)
            self._flush(socket, side)
            for event in events:
                self._feed(event)
        journal = self._recorder.counters() if self._recorder else {}
        self._feed(Tick(now, time.time(), self._counters.snapshot() | self._phases.snapshot() | journal))

    def _feed(self, event: Event, body: bytes = b"") -> None:
        """The one place where events enter the core. `body` is that of the frame an event comes from."""
        self._events.append((event, body))
        if len(self._events) > 1:
            return  # an effect of the event being handled; it comes next
        while self._events:
            event, body = self._events[0]
            if isinstance(event, PeerUp):
                self._counters.add(f"bus_peers_up/{event.peer.bus}/{event.peer.role}")
            elif isinstance(event, PeerDown):
                self._counters.add(f"bus_peers_down/{event.peer.bus}/{event.peer.role}")
                log.warning("peer down", bus=event.peer.bus, peer=str(event.peer), reason=event.reason)
            begin = time.monotonic()
            self._handle(event, body)
            self._phases.add(event, time.monotonic() - begin)
            self._events.popleft()

    def _handle(self, event: Event, body: bytes) -> None:
        recorder = self._recorder
        if recorder is None:
            for effect in self._core.handle(event):
                self._do(effect)
            return
        recorder.begin(event, body)
        try:
            for effect in self._core.handle(event):
                recorder.effect(effect, self._do(effect))
        except BaseException as error:
            recorder.end(f"{type(error).__name__}: {error}")
            raise
        recorder.end()

    def _do(self, effect: Effect) -> bytes | None:
        """Perform an effect; the body of the frame if one went out."""
        if isinstance(effect, Send):
            return self._send(effect.peer, effect.message)
        if isinstance(effect, WakeAt):
            self._wake_at = effect.at
        elif isinstance(effect, Stop):
            self._stop_reason = effect.reason
        else:
            self._perform(effect)
        return None

    def _send(self, peer: Peer, message: Message) -> bytes | None:
        """Send a message if the peer is up; its body if so."""
        for socket, side in self._of_bus.get(peer.bus, ()):
            parts = side.encode(peer, message, time.monotonic())
            if parts is not None:
                reason = _try_send(socket, parts)
                if reason:
                    self._counters.add(f"bus_lost_peers/{peer.bus}/{reason.split()[0]}")
                    for event in side.lose(peer, reason):
                        self._feed(event)
                return parts[-1]
        return None

    def _flush(self, socket: zmq.Socket[bytes], side: Listener | Dialer) -> None:
        """Send what the link itself has to say."""
        outbox, side.outbox = side.outbox, []
        for parts in outbox:
            reason = _try_send(socket, parts)
            if reason and isinstance(side, Listener):
                peer = side.peer_of(parts[0])
                for event in side.lose(peer, reason) if peer else ():
                    self._feed(event)

    def _open(self, kind: int, side: Listener | Dialer) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        # Larger bodies than allowed are answered with a sentence; far larger ones cut the connection in libzmq.
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * self._config.max_message_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(self._timing.interval * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(self._timing.timeout * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._sources.append((socket, zmq.POLLIN))
        self._sides[socket] = side
        self._of_bus.setdefault(side.bus.name, []).append((socket, side))
        return socket

    def _close(self) -> None:
        goodbye = Goodbye(reason=self._stop_reason or "it failed")
        for socket, side in self._sides.items():
            for peer in side.peers():
                parts = side.encode(peer, goodbye, time.monotonic())
                if parts is not None:
                    _try_send(socket, parts)  # whoever cannot take it finds out by itself
            socket.close()
        if self._recorder is not None:
            self._recorder.close()
        self._context.term()


# pyzmq's own `send_multipart` and `recv_multipart` take most of their time to look at options. Plain numbers, since a
# flag that is an enum member costs more than a message.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """The parts of the next message, None if there is none."""
    try:
        frame = BareSocket.recv(socket, _NOBLOCK, False)
    except zmq.Again:
        return None
    parts = [frame.bytes]
    while frame.more:
        frame = BareSocket.recv(socket, _NOBLOCK, False)
        parts.append(frame.bytes)
    return parts


def _try_send(socket: "zmq.Socket[bytes]", parts: list[bytes]) -> str:
    """Send without waiting; the reason if that cannot be done."""
    try:
        for part in parts[:-1]:
            BareSocket.send(socket, part, _MORE)
        BareSocket.send(socket, parts[-1], _NOBLOCK)
    except zmq.Again:
        return "stuck: it reads too slowly or its connection is gone"
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return "disconnected"
    return ""
