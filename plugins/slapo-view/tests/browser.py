"""Chromium without a window, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The installed browser; None without one."""


class Browser:
    """One page of a browser.

    Args:
        directory: for its profile.

    Attributes:
        errors: what the page's console and the browser's log said.
    """

    def __init__(self, directory: Path) -> None:
        assert PROGRAM is not None
        read, self._to = os.pipe()
        self._from, write = os.pipe()

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            for end, number in ((os.dup(read), 3), (os.dup(write), 4)):
                os.dup2(end, number)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={directory}", "--force-prefers-reduced-motion"]
        self._process = subprocess.Popen(
            [PROGRAM, *flags, "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        self._events: deque[dict[str, Any]] = deque()
        self.errors: list[str] = []
        self._frames: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def wait(self, method: str) -> None:
        """Wait for an event of the protocol."""
        deadline = time.monotonic() + 60
        while not any(event["method"] == method for event in self._events):
            self._note(self._receive(deadline))
        self._events.clear()

    def open(self, page: Path, *, width: int, height: int, scheme: str) -> None:
        """Open a file in a window of a size, with a preferred color scheme."""
        self.errors.clear()
        self._events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=page.as_uri())
        self.wait("Page.loadEventFired")

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Talk to the frame of the page, which has a process of its own."""
        page, deadline = self._session, time.monotonic() + 60
        while not self._frames:
            self._note(self._receive(deadline))
        self._session = self._frames[-1]
        try:
            loaded = "new Promise(done => addEventListener('load', () => done()))"
            self.run(f"document.readyState === 'complete' || {loaded}")
            self.send("Log.enable")
            self.send("Runtime.enable")
            yield
        finally:
            self._session = page

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, e.g. ``"ArrowDown"``."""
        for key in keys:
            text = {"Enter": "\r", " ": " "}.get(key, "")
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def picture(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._from], [], [], min(left, 1))[0]:
                more = os.read(self._from, 2**20)
                assert more, "the browser ended"
                self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        values = event.get("params", {})
        if event["method"] == "Target.attachedToTarget" and values["targetInfo"]["type"] == "iframe":
            self._frames.append(values["sessionId"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(values["args"]))
        elif event["method"] == "Log.entryAdded":
            self.errors.append(values["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent" and not values["request"]["url"].startswith(
            ("file:", "data:")
        ):
            self.errors.append(f"request of {values['request']['url']}")
