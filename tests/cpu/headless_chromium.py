"""A page opened in headless Chromium without a network: its images, its script, every request.

Chromium <- NUL-ended JSON on its descriptor 3 - us
         -- NUL-ended JSON on its descriptor 4 -> us     (--remote-debugging-pipe)
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT_S = 100.0  # of one answer; the first one takes a second or two
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, in a container, there is none to be had
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
    "--window-size=1920,1080",  # a slide's
)


@dataclass
class Page:
    """What a page turned out to be."""

    natural_widths: list[int]  # of its images; 0: it did not load
    requested: list[str]  # every URL
    failed: list[str]  # requests that failed, policy violations, and errors of its script
    text: str
    session: str  # by which the browser knows it


class Chromium:
    """`with Chromium(folder) as browser: browser.open(path)`; the profile lies in `folder`."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium")
        assert program is not None, "the test is marked program('chromium')"
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # bash gives it the descriptors 3 and 4, which it expects
        script = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []  # whatever the browser has reported

    def open(self, path: Path) -> Page:
        """Load a file and return what became of it."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable", session)
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self._call("Network.emulateNetworkConditions", session, **offline)
        self._call("Page.navigate", session, url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        widths = self._evaluate(session, "[...document.images].map(image => image.naturalWidth)")
        text = self._evaluate(session, "document.body.innerText")
        requested, failed = [], []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Network.requestWillBeSent":
                requested.append(params["request"]["url"])
            elif event["method"] == "Network.loadingFailed":
                failed.append(str(params))
            elif event["method"] == "Log.entryAdded":
                failed.append(params["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                failed.append(str(params["exceptionDetails"]))
        return Page(widths, requested, failed, text, session)

    def evaluate(self, page: Page, expression: str) -> Any:
        """Return what an expression of the page's script comes to, as JSON can say it."""
        return self._evaluate(page.session, expression)

    def press(self, page: Page, key: str) -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", page.session, type=kind, key=key)

    def mouse(self, page: Page, kind: str, x: float, y: float, **others: Any) -> None:
        """Do something with the mouse: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self._call("Input.dispatchMouseEvent", page.session, type=kind, x=x, y=y, **others)

    def screenshot(self, page: Page) -> bytes:
        """Return what is seen of the page, a PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", page.session)["data"])

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._call("Browser.close")
                self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def _evaluate(self, session: str, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        if session:
            call["sessionId"] = session
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert select.select([self._in], [], [], max(left, 0))[0], "Chromium is silent"
            chunk = os.read(self._in, 1 << 16)
            assert chunk, f"Chromium has ended with {self._process.poll()}"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
