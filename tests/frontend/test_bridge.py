"""The queue from the bus thread to the event loop."""

import asyncio
import threading

from frontend.bridge import Bridge


def test_order_is_kept_and_what_came_early_waits() -> None:
    bridge = Bridge()
    got: list[int | str] = []
    bridge.deliver(0)
    bridge.deliver("early")

    async def main() -> None:
        done = asyncio.Event()

        def take(value: int | str) -> None:
            got.append(value)
            if value == 10_000:
                done.set()

        bridge.attach({int: take, str: take})
        thread = threading.Thread(target=lambda: [bridge.deliver(number) for number in range(1, 10_001)])
        thread.start()
        await asyncio.wait_for(done.wait(), 30)
        thread.join()

    asyncio.run(main())
    assert got == [0, "early", *range(1, 10_001)]


def test_a_burst_wakes_the_loop_once() -> None:
    async def main() -> int:
        bridge = Bridge()
        loop = asyncio.get_running_loop()
        wakes = 0
        wake = loop.call_soon_threadsafe

        def count(*args: object) -> asyncio.Handle:
            nonlocal wakes
            wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = count  # type: ignore[method-assign, assignment]
        done = asyncio.Event()
        bridge.attach({int: lambda number: done.set() if number == 99 else None})
        await asyncio.sleep(0)  # the drain that attach asked for
        for number in range(100):  # on the loop's own thread, so that it cannot drain in between
            bridge.deliver(number)
        await asyncio.wait_for(done.wait(), 30)
        return wakes

    assert asyncio.run(main()) == 1


def test_nothing_is_handed_over_after_detach() -> None:
    async def main() -> list[int]:
        bridge = Bridge()
        got: list[int] = []
        bridge.attach({int: got.append})
        await asyncio.sleep(0)
        bridge.detach()
        bridge.deliver(1)
        await asyncio.sleep(0)
        return got

    assert asyncio.run(main()) == []
