"""The dashboard: what the engine's status comes to, its stream, and the page in a browser."""

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from bus import log
from bus.messages import ExecutorStatus, Load
from frontend.dashboard import Dashboard
from frontend.seam import StatusUpdate
from frontend.sight import HISTORY, Histogram, Sight, Snapshot, decode, quantile, snapshot
from tests.browser import BINARY, Browser

DEADLINE_S = 20.0
BOUNDS = [0.01, 0.1, 1.0]
PAGE = Path(__file__).parents[2] / "frontend" / "dashboard.html"


def status(second: int, *, up: tuple[int, ...] = (0, 1), ready: bool = True) -> StatusUpdate:
    """How an engine of two ranks does that has run for some seconds: 50 and 100 tokens a second, 10 steps."""
    loads = {
        rank: Load(
            number=second + 1,
            acknowledged=0,
            running=4 + rank,
            waiting=second % 3,
            pending_prefill_tokens=7,
            used_blocks=20 + second % 50,
            num_blocks=100,
            pause_state="paused_all" if rank == 1 and second >= 90 else "unpaused",
            counters={
                "scheduler_steps": 10.0 * second,
                "scheduler_generated_tokens": 50.0 * (rank + 1) * second,
                "scheduler_prompt_tokens": 1000.0,
                "scheduler_cached_prompt_tokens": 250.0,
                "scheduler_preemptions": 3.0,
                "scheduler_draft_tokens": 8.0 * second,
                "scheduler_accepted_tokens": 6.0 * second,
                "scheduler_idle_sessions": 2.0,
                "bus_handling_seconds/Drained": 0.01 * second,
            },
        )
        for rank in up
    }
    counters = {
        "executor_steps": 10.0 * second,
        "executor_device_seconds": 0.5 * second,
        "executor_missed_ranks/0": 1.0,
        "executor_missed_ranks/1": 2.0,
        "bus_handling_seconds/StepDone": 0.02 * second,
    }
    executor = ExecutorStatus(model="tiny <model>", max_model_len=99, num_blocks=200, block_size=16, counters=counters)
    own = {
        "unfinished_requests": 9.0,
        "requests_started": 100.0,
        "requests_ended/stop": 80.0,
        "requests_ended/abort": 1.0,
    }
    return StatusUpdate(ready, loads, executor if ready else None, own)


def histogram(second: int) -> Histogram:
    """Ten values between 0.01 and 0.1 each second."""
    return Histogram(BOUNDS, [0.0, 10.0 * second, 10.0 * second], 10.0 * second, 0.5 * second)


def made(second: int, **given: Any) -> Snapshot:
    return snapshot(1e9 + second, 0, 2, status(second, **given), histogram(second), histogram(second))


def test_a_snapshot_has_what_processes_have_told() -> None:
    one = made(60)
    assert [rank.state for rank in one.ranks] == ["up", "up"]
    assert (one.ranks[1].tokens, one.ranks[1].steps, one.ranks[1].running) == (6000, 600, 5)
    assert (one.ranks[0].idle_sessions, one.ranks[0].cached_tokens, one.ranks[0].preemptions) == (2, 250, 3)
    assert one.executor is not None
    assert (one.executor.missed, one.executor.device_s) == (3, 30.0)
    assert one.executor.split_s == pytest.approx(1.2)
    assert (one.unfinished, one.started, one.ended) == (9, 100, {"stop": 80, "abort": 1})
    assert [rank.state for rank in made(95, up=(1,)).ranks] == ["down", "paused"]
    assert made(3, ready=False).executor is None


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 0.055), (1.0, 0.1)])
def test_quantiles_are_of_what_came_in_between(fraction: float, expected: float) -> None:
    assert quantile(fraction, histogram(2), histogram(5)) == pytest.approx(expected, abs=0.011)
    assert quantile(fraction, histogram(9), histogram(5)) == pytest.approx(expected, abs=0.011)  # it began anew
    assert quantile(fraction, histogram(5), histogram(5)) is None
    assert quantile(fraction, Histogram(), Histogram()) is None
    beyond = Histogram(BOUNDS, [0.0, 0.0, 0.0], 4.0, 8.0)
    assert quantile(fraction, Histogram(BOUNDS, [0.0] * 3), beyond) == 1.0


def test_who_follows_gets_the_past_and_each_new_snapshot_and_an_end() -> None:
    async def main() -> None:
        sight = Sight(0, 2, lambda: (histogram(1), histogram(1)))
        for second in range(HISTORY + 5):
            sight.update(status(second), float(second))
            sight.update(status(second), second + 0.5)  # too soon
        follow = sight.follow()
        past = [decode(data).at for data in await anext(follow)]
        assert past == [float(second) for second in range(5, HISTORY + 5)]
        coming = asyncio.ensure_future(anext(follow))
        await asyncio.sleep(0)
        sight.update(status(700), 700.0)
        assert [decode(data).at for data in await asyncio.wait_for(coming, DEADLINE_S)] == [700.0]
        for second in (701, 702):  # nobody waits just now
            sight.update(status(second), float(second))
        assert [decode(data).at for data in await asyncio.wait_for(anext(follow), DEADLINE_S)] == [701.0, 702.0]
        ending = asyncio.ensure_future(anext(follow, None))
        await asyncio.sleep(0)
        sight.close()
        assert await asyncio.wait_for(ending, DEADLINE_S) is None

    asyncio.run(main())


class Site:
    """The dashboard over HTTP, on a thread, with a `Sight` to be fed."""

    def __init__(self) -> None:
        self.sight = Sight(0, 2, lambda: (histogram(self._second), histogram(self._second)))
        self._second = 0
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(DEADLINE_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        state = SimpleNamespace(engine_client=SimpleNamespace(sight=self.sight))

        async def rest(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"the rest"})

        inner = Dashboard(rest)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await inner({**scope, "app": SimpleNamespace(state=state)}, receive, send)

        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port = listening.getsockname()[1]
            config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
            self._server = uvicorn.Server(config)
            self._loop.call_soon(self._started.set)
            await self._server.serve([listening])

    def feed(self, seconds: range, **given: Any) -> None:
        """Let these seconds pass."""
        fed = threading.Event()

        def feed() -> None:
            for self._second in seconds:
                self.sight.update(status(self._second, **given), 1e9 + self._second)
            fed.set()

        self._loop.call_soon_threadsafe(feed)
        assert fed.wait(DEADLINE_S)

    def get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        connection.request("GET", path)
        return connection.getresponse()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.sight.close)
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_the_stream_and_the_page(site: Site) -> None:
    site.feed(range(3))
    response = site.get("/dashboard/events")
    assert response.headers["content-type"] == "text/event-stream"
    first = response.readline()
    assert [one["at"] - 1e9 for one in json.loads(first.removeprefix(b"data: "))] == [0, 1, 2]
    assert response.readline() == b"\n"
    site.feed(range(3, 4))
    assert [one["at"] - 1e9 for one in json.loads(response.readline().removeprefix(b"data: "))] == [3]
    response.close()  # the server goes on
    page = site.get("/dashboard")
    assert (page.status, page.read()) == (200, PAGE.read_bytes())
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert site.get("/dashboard/other").read() == b"the rest"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?:", text)


@pytest.mark.skipif(BINARY is None, reason="there is no Chromium")
def test_the_page_in_a_browser(site: Site, tmp_path: Path) -> None:
    log.recent.clear()
    log.recent.append(log.Line("2030-01-31T12:34:56Z", "warning", "peer down, peer=rank/1 <b>"))
    site.feed(range(120))
    with Browser() as browser:
        browser.look(1280, 900, dark=False)
        browser.open(f"http://127.0.0.1:{site.port}/dashboard")
        browser.wait_for(
            "typeof shots !== 'undefined' && shots.length === 120 && document.querySelector('#processes tr')"
        )
        cards = browser.value("[...document.querySelectorAll('.card h3')].map(one => one.textContent)")
        assert {"Time to first token", "Inter-token latency", "KV blocks in use", "Parts of a step"} <= set(cards)
        values = browser.value(
            "Object.fromEntries([...document.querySelectorAll('section')].map(one => "
            "[one.parentNode.id + ' ' + one.querySelector('h3').textContent, one.querySelector('svg').ariaLabel]))"
        )
        assert values["whole Tokens per second"] == "Tokens per second: all ranks 150"
        assert values["ranks Tokens per second"] == "Tokens per second: rank 0 50, rank 1 100"
        assert values["whole Steps per second"].endswith("executor 10")
        assert values["whole Parts of a step"].startswith("Parts of a step: device 50\u2009ms, dispatch 0")
        assert re.search("p50 5\\d.*ms, p90 9\\d", values["whole Time to first token"])
        table = browser.value("[...document.querySelectorAll('#processes tr')].map(one => one.innerText)")
        assert table[0].startswith("frontend 0\tready\t9")
        assert table[1] == "rank 0\tup\t4\t2\t2\t39\u2009%\t25\u2009%\t50\t3\t10"
        assert table[2].startswith("rank 1\tpaused")
        assert browser.value("document.querySelector('#errors').innerText").endswith("peer down, peer=rank/1 <b>")
        assert browser.value("document.querySelector('#model').textContent") == "tiny <model>"
        browser.screenshot(tmp_path / "light.png")
        # Live: a rank goes down, then the engine
        site.feed(range(120, 121), up=(0,))
        browser.wait_for("document.querySelector('#processes').innerText.includes('rank 1\tdown')")
        site.feed(range(121, 122), up=(), ready=False)
        browser.wait_for("document.querySelector('#state').textContent === 'not ready'")
        grounds = []
        for dark in (False, True):
            browser.look(390, 844, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") == 390  # nothing sticks out
            assert (
                browser.value("new Set([...document.querySelectorAll('section')].map(one => one.offsetLeft)).size") == 1
            )
            grounds.append(browser.value("getComputedStyle(document.body).backgroundColor"))
            browser.screenshot(tmp_path / f"phone-{dark}.png")
        assert grounds[0] != grounds[1]
        assert browser.complaints == []
