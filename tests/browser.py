"""A headless Chromium for tests, spoken to over its pipe: Chrome DevTools Protocol, JSON with a zero at its end."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DEADLINE_S = 40.0
TO_BROWSER, FROM_BROWSER = 3, 4
"""The descriptors on which Chromium listens and speaks."""


class Browser:
    """One page. Ended with all its processes on leaving the `with` block."""

    def __init__(self) -> None:
        assert BINARY is not None
        self._folder = tempfile.mkdtemp(prefix="rb-browser-")
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()

        def descriptors() -> None:
            read, write = os.dup(to_read), os.dup(from_write)  # neither of the two may stand in the other's place
            os.dup2(read, TO_BROWSER)
            os.dup2(write, FROM_BROWSER)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [BINARY, *options, "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=descriptors,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Exceptions of the page's script, and what the browser logs as an error."""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the browser do something; what it answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + DEADLINE_S
        while (answer := self._read(until)).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go to a page."""
        assert "errorText" not in self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true in the page, which is looked at again with each frame it draws."""
        look = (
            f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
        )
        assert self.value(look) is True

    def look(self, width: int, height: int, *, dark: bool) -> None:
        """Show the page on a screen of this size and scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page (PNG)."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self, until: float) -> dict[str, Any]:
        """The next message; complaints are kept."""
        while b"\0" not in self._buffer:
            if time.monotonic() > until or self._process.poll() is not None:
                raise AssertionError(f"the browser does not answer; its exit code is {self._process.poll()}")
            self._buffer += os.read(self._from, 1 << 20)
        data, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(str(message["params"]["entry"]))
        return message

    def close(self) -> None:
        """End it."""
        os.killpg(self._process.pid, 9)
        self._process.wait(DEADLINE_S)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
