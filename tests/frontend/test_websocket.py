"""What a WebSocket connection is sent when it reads slowly."""

import asyncio
import json
from typing import Any

from bus import messages as m
from bus.wire import pack_floats, pack_ints
from frontend.websocket import Outbox

DEADLINE_S = 10.0


class Reader:
    """The far side of a connection that takes nothing before it is told to."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.got = asyncio.Condition()

    async def send_text(self, text: str) -> None:
        await self.reads.wait()
        async with self.got:
            self.events.append(json.loads(text))
            self.got.notify_all()

    async def until(self, count: int) -> list[dict[str, Any]]:
        async with self.got:
            await asyncio.wait_for(self.got.wait_for(lambda: len(self.events) >= count), DEADLINE_S)
        return self.events


def delta(name: str, token: int, **fields: Any) -> m.Delta:
    return m.Delta(request_id=name, token_ids=pack_ints([token]), text=chr(token), **fields)


def test_a_slow_reader_gets_longer_deltas_and_every_end_in_order() -> None:
    async def run() -> list[dict[str, Any]]:
        outbox, reader = Outbox(), Reader()
        for turn in range(1, 4):
            for token in range(65, 75):
                outbox.put(turn, delta("a", token))
                outbox.put(turn, delta("b", token + 1))
            outbox.put(turn, m.TurnFinished(request_id="a", turn=turn, reason="length"))
            outbox.put(turn, m.TurnFinished(request_id="b", turn=turn, reason="stop"))
        writer = asyncio.create_task(outbox.write(reader))  # type: ignore[arg-type]
        reader.reads.set()
        events = await reader.until(12)
        writer.cancel()
        return events

    events = asyncio.run(run())
    assert len(events) == 12
    for name, text in (("a", "ABCDEFGHIJ"), ("b", "BCDEFGHIJK")):
        own = [event for event in events if event["id"] == name]
        assert [event["type"] for event in own] == ["delta", "turn_finished"] * 3
        assert [event["turn"] for event in own] == [1, 1, 2, 2, 3, 3]
        assert {event["text"] for event in own if event["type"] == "delta"} == {text}
        assert [len(event["token_ids"]) for event in own if event["type"] == "delta"] == [10] * 3


def test_what_is_on_its_way_is_not_added_to() -> None:
    async def run() -> list[dict[str, Any]]:
        outbox, reader = Outbox(), Reader()
        writer = asyncio.create_task(outbox.write(reader))  # type: ignore[arg-type]
        outbox.put(1, delta("a", 65))
        await asyncio.sleep(0)  # the writer has taken the first, and waits for the reader
        await asyncio.sleep(0)
        outbox.put(1, delta("a", 66))
        outbox.put(1, delta("a", 67))
        reader.reads.set()
        events = await reader.until(2)
        writer.cancel()
        return events

    assert [event["text"] for event in asyncio.run(run())] == ["A", "BC"]


def test_deltas_with_logprobs_stay_apart() -> None:
    logprobs = m.Logprobs(
        owner=0, positions=1, token_ids=pack_ints([65, 66]), values=pack_floats([-0.5, -1.5]), ranks=pack_ints([1])
    )

    async def run() -> list[dict[str, Any]]:
        outbox, reader = Outbox(), Reader()
        outbox.put(1, delta("a", 65, logprobs=logprobs))
        outbox.put(1, delta("a", 66))
        writer = asyncio.create_task(outbox.write(reader))  # type: ignore[arg-type]
        reader.reads.set()
        events = await reader.until(2)
        writer.cancel()
        return events

    events = asyncio.run(run())
    assert events[0]["logprobs"] == [{"rank": 1, "token_ids": [65, 66], "values": [-0.5, -1.5]}]
    assert "logprobs" not in events[1]
