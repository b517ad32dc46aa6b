"""Which buses there are: who binds, who connects, and what may be sent each way."""

from typing import Any, NamedTuple

from bus.messages import (
    CLIENT_TO_FRONTEND,
    ENGINE_TO_FRONTEND,
    EXECUTOR_TO_FOLLOWER,
    EXECUTOR_TO_RANK,
    FOLLOWER_TO_EXECUTOR,
    FRONTEND_TO_CLIENT,
    FRONTEND_TO_ENGINE,
    RANK_TO_EXECUTOR,
    Role,
)
from bus.wire import schema_hash


class Bus(NamedTuple):
    """One bus. `up` is what the connecting side sends, `down` what the binding side sends."""

    name: str
    binds: Role
    connects: tuple[Role, ...]
    up: Any
    down: Any


BUSES = {
    bus.name: bus
    for bus in (
        Bus("client", "frontend", ("client",), CLIENT_TO_FRONTEND, FRONTEND_TO_CLIENT),
        Bus("command", "frontend", ("rank", "executor"), ENGINE_TO_FRONTEND, FRONTEND_TO_ENGINE),
        Bus("step", "executor", ("rank",), RANK_TO_EXECUTOR, EXECUTOR_TO_RANK),
        Bus("follower", "executor", ("executor",), FOLLOWER_TO_EXECUTOR, EXECUTOR_TO_FOLLOWER),
    )
}

SCHEMA = schema_hash(union for bus in BUSES.values() for union in (bus.up, bus.down))
