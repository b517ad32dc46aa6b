"""The same with nothing but pyzmq and msgspec, to show what goes over the wire: python examples/raw_zmq.py [ENDPOINT]

Messages are MessagePack maps, after 16 bytes that name the sender's and the addressee's start; docs/protocol.md has all
of them.
"""

import struct
import sys
import time
from pathlib import Path

import msgspec
import zmq

endpoint = sys.argv[1] if len(sys.argv) > 1 else f"ipc://{Path('run').absolute()}/client-0.ipc"
incarnation, frontend = time.time_ns(), 0
index = incarnation % 2**31

socket = zmq.Context.instance().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, f"client/{index}/{incarnation:x}".encode())
socket.connect(endpoint)


def send(message: dict) -> None:
    socket.send_multipart([struct.pack("<QQ", incarnation, frontend), msgspec.msgpack.encode(message)])


def receive() -> dict:
    while True:
        message = msgspec.msgpack.decode(socket.recv_multipart()[1])
        if message["type"] != "Heartbeat":
            return message


send({"type": "Hello", "role": "client", "index": index, "incarnation": incarnation, "major": 1, "minor": 0})
frontend = receive()["incarnation"]

params = {"temperature": 0.0, "max_tokens": 30}
messages = [{"role": "user", "content": "What is the capital of France?"}]
send({"type": "Generate", "request_id": "france", "messages": messages, "params": params})
while (message := receive())["type"] == "Delta":
    print(message.get("text", ""), end="", flush=True)
print(f"\n{message}")
