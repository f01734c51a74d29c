"""Drive a real Chromium by the DevTools protocol over a pipe.

That needs no port, and no package that the lock lacks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWERS_WITHIN_S = 60
# Becomes the browser, with the protocol's ends as descriptors 3 and 4. They are moved away first,
# since one may be 3 itself.
AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Browser:
    """Drive one tab.

    `messages` has the console's errors, warnings and exceptions; `addresses` what it loads.
    """

    write_to: int
    read_from: int
    session: str = ""
    number: int = 0
    rest: bytes = b""
    messages: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    loaded: bool = False

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {
            "id": self.number,
            "method": method,
            "params": params,
            **({"sessionId": self.session} if self.session else {}),
        }
        os.write(self.write_to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load the file and wait for its load event; `width` is in CSS pixels."""
        self.messages.clear()
        self.addresses.clear()
        self.loaded = False
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=page.as_uri())
        while not self.loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Return a PNG of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + ANSWERS_WITHIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.read_from, selectors.EVENT_READ)
            while b"\0" not in self.rest:
                assert selector.select(max(0.0, end - time.monotonic())), (
                    "the browser does not answer"
                )
                chunk = os.read(self.read_from, 1 << 20)
                assert chunk, "the browser has ended"
                self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.messages.append(str([argument.get("value") for argument in params["args"]]))


@contextlib.contextmanager
def started(chromium: str) -> Iterator[Browser]:
    """Start a browser that ends with the block, as does its profile."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = """
            --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
            --hide-scrollbars
        """.split()
        argv = [
            chromium,
            *flags,
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        through = [sys.executable, "-c", AT_3_AND_4, str(their_in), str(their_out), *argv]
        child = subprocess.Popen(
            through,
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        browser = Browser(our_out, our_in)
        try:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.call(f"{domain}.enable")
            yield browser
        finally:
            child.terminate()
            child.wait()
            os.close(our_out)
            os.close(our_in)
