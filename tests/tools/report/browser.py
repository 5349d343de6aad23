"""Room: a headless Chromium and its own protocol, over two pipes: no package, no port, no other process to reach it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
_LIMIT_S = 90.0


class Browser:
    """One page after another.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        here, theirs = os.pipe(), os.pipe()
        command = [
            "bash",
            "-c",
            f'exec chromium "$@" 3<&{here[0]} 4>&{theirs[1]}',
            "bash",
            *_FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(here[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(here[0])
        os.close(theirs[1])
        self._to, self._from = here[1], theirs[0]
        os.set_blocking(self._from, False)
        self._rest, self._number = b"", 0
        self._messages: deque[dict[str, Any]] = deque()
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What happened on the page: console, exceptions, requests."""

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Show a file, as a screen of this size and taste does, and wait until it is there."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        taste = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[taste])
        self.call("Page.navigate", url=page.as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def evaluate(self, script: str) -> Any:
        """What a script gives."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path) -> bytes:
        """The whole page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])
        path.write_bytes(data)
        return data

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser, and wait for its answer."""
        self._number += 1
        asked = self._number
        message = {"id": asked, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer: list[dict[str, Any]] = []

        def answered() -> bool:
            answer.extend(each for each in self._messages if each.get("id") == asked)
            self._messages.clear()
            return bool(answer)

        self._until(answered)
        assert "error" not in answer[0], answer[0]
        found: dict[str, Any] = answer[0]["result"]
        return found

    def _until(self, done: Any) -> None:
        end = time.monotonic() + _LIMIT_S
        while not done():
            assert time.monotonic() < end, "the browser does not answer"
            assert self._process.poll() is None, "the browser has ended"
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(self._from, 1 << 20)
        except BlockingIOError:
            time.sleep(0.01)
            return
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            (self.events if "method" in message else self._messages).append(message)
