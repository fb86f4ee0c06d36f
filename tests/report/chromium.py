"""A headless Chromium, driven over its debugging pipe, that says what a page did."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--headless", "--disable-gpu", "--no-sandbox", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # No name resolves: what wants the network fails, and says so.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def found() -> str | None:
    """The browser's program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Seen(NamedTuple):
    """What a page did while it loaded."""

    requests: list[str]
    complaints: list[str]
    """Console messages, uncaught exceptions, and what the browser itself has logged."""


class Browser:
    """One tab."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer, self._number = b"", 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int = 800) -> Seen:
        """Load a file in a window of so many CSS pixels and wait until it is there."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._events = []
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())
        named = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return Seen(
            [
                event["params"]["request"]["url"]
                for event in self._events
                if event["method"] == "Network.requestWillBeSent"
            ],
            [json.dumps(event["params"]) for event in self._events if event["method"] in named],
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its answer."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (message := self._receive()).get("id") != self._number:
            self._events.append(message)
        assert "error" not in message, message
        answer: dict[str, Any] = message["result"]
        return answer

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own; ended afterwards."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and answers on 4.
        redirected = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
        process = subprocess.Popen(
            [*redirected, program, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)
