"""Debian's chromium without a window, driven over its DevTools pipe: no driver, no download."""

from __future__ import annotations

import base64
import fcntl
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

import pytest

REQUIRED = "DISCO_REQUIRE_CHROMIUM"
ANSWER_SECONDS = 60


def find_chromium() -> str:
    """The browser's path; without one the test is skipped, or fails where CI requires it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    reason = "no chromium: apt-get install --no-install-recommends chromium"
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)


class Page:
    """A tab: commands, what it logged, and what it asked the network for."""

    def __init__(self, process: subprocess.Popen[bytes], read_fd: int, write_fd: int) -> None:
        self._process, self._read_fd, self._write_fd = process, read_fd, write_fd
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], deadline - time.monotonic())
            chunk = os.read(self._read_fd, 1 << 20) if ready else b""
            assert chunk, f"chromium does not answer (exit status {self._process.poll()})"
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def show(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Open a file at a width in CSS pixels and wait until it is loaded."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844 if phone else 1000,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def errors(self) -> list[str]:
        """Messages of the console, and exceptions of scripts."""
        self.evaluate("0")  # whatever was still on its way has arrived
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, inline data left out."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith("data:")]


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that the shell moves them to."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with one tab; ended with everything that it started."""
    to_browser, from_test = _pipe()
    from_browser, to_test = _pipe()
    # The browser reads commands from descriptor 3 and answers on 4; a shell puts the pipes there.
    command = [
        "bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{to_test}', find_chromium(),
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
        "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        pass_fds=(to_browser, to_test),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(to_test)
    try:
        yield Page(process, from_browser, from_test)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        os.close(from_browser)
        os.close(from_test)
