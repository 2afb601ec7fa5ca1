"""A headless Chromium that a test drives: its debugging protocol over two pipes, with nothing but the standard library.

It is started without a sandbox, which root cannot have, and shows only files that the tests wrote.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0  # seconds for an answer
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "Tab": 9,
    "Escape": 27,
    "Home": 36,
    "End": 35,
}


def find_chromium() -> str | None:
    """The path of a Chromium, None if there is none; the variable CHROMIUM overrides it."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page, its network requests, and its errors."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read, self._rest, self._last = to_browser, from_browser, b"", 0
        self.session: str | None = None
        self.requested: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer, taking what is told meanwhile."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        what, params = told.get("method"), told.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif what == "Runtime.exceptionThrown" or (what == "Runtime.consoleAPICalled" and params["type"] == "error"):
            self.complaints.append(json.dumps(params))
        elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        return told

    def open(self, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of that size, and wait until its script has run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.requested, self.complaints = [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """What an expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and let go a key, as a keyboard does."""
        code = KEYS.get(key, ord(key[0].upper()))
        named = {"key": key, "code": key if key in KEYS else f"Key{key.upper()}", "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def point(self, selector: str, *, click: bool) -> None:
        """Move the mouse onto the first element of that selector, and click."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({json.dumps(selector)}).getClientRects()[0]"
        x, y, w, h = self.run(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
        where = {"x": x + w / 2, "y": y + h / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browsing(chromium: str, profile: Path) -> Iterator[Browser]:
    """A browser of its own, which ends with the block."""
    flags = (
        "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-dev-shm-usage "
        "--disable-background-networking --disable-component-update --disable-sync --use-mock-keychain"
    ).split()
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def place() -> None:  # where the protocol wants the pipes
        spare_in, spare_out = os.dup(theirs_in), os.dup(theirs_out)  # neither may be written over first
        os.dup2(spare_in, 3)
        os.dup2(spare_out, 4)

    process = subprocess.Popen(
        [chromium, *flags, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=place, close_fds=False,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_out)
        os.close(ours_in)
