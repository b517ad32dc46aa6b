"""A client process that keeps many token streams open: ``python -m bench.streams ENDPOINT --streams 512 …``.

Each stream is a request of its own prompt; with ``--again`` a stream that has finished is followed by another, on the
same rank. It ends when every stream has finished, or ``--seconds`` after every stream has begun, and prints what it
counted as JSON. With ``--rows`` every stream waits in its rank before the first begins; what is counted ends when so
many are left, and from then on rows stand empty.
"""

import argparse
import itertools
import json
import struct
import time

import msgspec
import numpy as np
import zmq

from bus.messages import (
    FRONTEND_TO_CLIENT,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Command,
    CommandRequest,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Reply,
    RequestCounts,
    Resume,
    SetPause,
    TokenDeltas,
    Welcome,
)
from bus.wire import pack_ints

BLOCK = 16


class Connection:
    """One client on the bus, with its share of the streams."""

    def __init__(self, context: zmq.Context, endpoint: str, number: int) -> None:
        self._incarnation = time.time_ns()
        self._number = number
        self._peer = 0
        self._decoder = msgspec.msgpack.Decoder(FRONTEND_TO_CLIENT)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"client/{number}/{self._incarnation:x}".encode())
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)
        hello = {"type": "Hello", "role": "client", "index": number, "incarnation": self._incarnation}
        self._send(msgspec.msgpack.encode(hello | {"major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR}))
        while not isinstance(welcome := self.receive(), Welcome):
            pass
        self._peer = welcome.incarnation

    def open(self, name: str, prompt_tokens: int, max_tokens: int, rank: int) -> None:
        first = 7 * hash_of(name)
        prompt = (first + np.arange(prompt_tokens)) % 30_000
        params = GenerateParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = Generate(
            request_id=name, prompt_token_ids=pack_ints(prompt), params=params, text_output=False, rank=rank
        )
        self._send(msgspec.msgpack.encode(request))

    def command(self, body: Command) -> object:
        """What it is answered with, before any stream has begun."""
        self._send(msgspec.msgpack.encode(CommandRequest(command_id=1, body=body)))
        while not isinstance(reply := self.receive(), Reply):
            if isinstance(reply, Error):
                raise SystemExit(f"refused: {reply.message}")
        return reply.value

    def receive(self) -> object:
        return self._decoder.decode(self.socket.recv_multipart()[1])

    def _send(self, body: bytes) -> None:
        self.socket.send_multipart([struct.pack("<QQ", self._incarnation, self._peer), body])


def hash_of(name: str) -> int:
    """A number for a name, the same in every process."""
    return int.from_bytes(name.encode()[-6:], "little") % 4_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--first", type=int, default=0, help="number of the first connection")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="streams go to them in turn")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=0, help="of all ranks; one stream waits for each that becomes free")
    arguments = parser.parse_args()

    context = zmq.Context()
    connections = [
        Connection(context, arguments.endpoint, arguments.first + number) for number in range(arguments.connections)
    ]
    poller = zmq.Poller()
    for connection in connections:
        poller.register(connection.socket, zmq.POLLIN)
    by_socket = {connection.socket: connection for connection in connections}
    numbers = [itertools.count(rank, arguments.ranks) for rank in range(arguments.ranks)]
    open_streams = 0

    def start(connection: Connection, max_tokens: int, rank: int) -> None:
        number = next(numbers[rank])
        connection.open(f"{arguments.first}-{number}", arguments.prompt - number % BLOCK, max_tokens, rank)

    def ended(connection: Connection, name: str) -> None:
        nonlocal open_streams
        if arguments.again:
            start(connection, arguments.max_tokens, int(name.rpartition("-")[2]) % arguments.ranks)
        else:
            open_streams -= 1

    staggered = arguments.rows or (arguments.streams if arguments.again else 0)
    if arguments.rows:
        connections[0].command(SetPause(mode="keep"))
    for number in range(arguments.streams):
        share = 1 + number // arguments.ranks % arguments.max_tokens if number < staggered else arguments.max_tokens
        start(connections[number % len(connections)], share, number % arguments.ranks)
        open_streams += 1
    tokens = 0
    counts: list[tuple[float, int]] = []
    silent = {f"{arguments.first}-{number}" for number in range(arguments.streams)}
    all_begun = until = float("inf")
    if arguments.rows:
        while sum(connections[0].command(RequestCounts())) < arguments.streams:  # type: ignore[call-overload]
            pass
        silent, all_begun = set(), time.monotonic()
        connections[0].command(Resume())
    while open_streams > arguments.rows and time.monotonic() < until:
        for socket, _ in poller.poll(100):
            connection = by_socket[socket]
            message = connection.receive()
            if isinstance(message, TokenDeltas):
                tokens += message.tokens.nbytes // 4
                counts.append((time.monotonic(), tokens))
                if silent:
                    silent.difference_update(message.request_ids)
                    if not silent:
                        all_begun = time.monotonic()
                        until = all_begun + arguments.seconds
                for finished in message.finished:
                    ended(connection, finished.request_id)
            elif isinstance(message, Finished):
                ended(connection, message.request_id)
            elif isinstance(message, Error):
                raise SystemExit(f"refused: {message.message}")
    thinned = counts[:: max(1, len(counts) // 2000)]
    print(json.dumps({"counts": thinned, "all_begun": all_begun, "end": time.monotonic()}))
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
