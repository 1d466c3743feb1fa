"""A real browser for tests of pages: Debian's Chromium without a window, over its DevTools protocol on two pipes.

It needs no package: messages are JSON that end with a zero byte. Tests skip where Chromium is not installed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_servers import INSTALL

_ARGUMENTS = [
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--force-color-profile=srgb", "--hide-scrollbars"),
]


class Browser:
    """One tab. Every wait ends after `seconds`, which is only for machines that are slow."""

    def __init__(self, folder: Path, *, seconds: float = 60.0) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.skip(f"the page cannot be shown without the package chromium; {INSTALL}")
        self._seconds = seconds
        self.problems: list[str] = []
        """Errors of the page: exceptions, and what its Content-Security-Policy refused."""
        self.requests: list[str] = []
        """URLs that the page has asked for."""
        self._number, self._session = 0, ""
        self._received = b""
        self._start(program, folder)
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, folder: Path) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4. Ours are out of their way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        shell = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        command = ["bash", "-c", shell, program, *_ARGUMENTS, f"--user-data-dir={folder / 'chromium'}", "about:blank"]
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=ends,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder), "TZ": "UTC"},
                cwd=folder,
                start_new_session=True,
            )
        for end in (to_browser, from_browser, *ends):
            os.close(end)

    def show(self, *, dark: bool = False, width: int = 1200, height: int = 900, scale: float = 1.0) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the page has
        """Return the value of an expression of JavaScript, or of the promise that it is."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Return when `expression` is true."""
        deadline = time.monotonic() + self._seconds
        while not self.evaluate(f"Boolean({expression})"):  # a part of the page, as a value, is an empty object
            if time.monotonic() > deadline:
                raise AssertionError(f"{expression} did not become true; the page: {self.text()}")
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            answer = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        else:
            answer = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._call("Browser.close", session=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, session: bool = True, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session and self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"].get("exception", values)))
        elif event.get("method") == "Log.entryAdded" and values["entry"]["source"] in ("security", "javascript"):
            self.problems.append(values["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._from, 1 << 16)
            assert part, "Chromium has ended; see chromium.log"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    made = Browser(folder)
    try:
        yield made
    finally:
        made.close()
