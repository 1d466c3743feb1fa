"""`make demo`: the live loop in one terminal, for a minute. A click on the site is in the next answers a moment later."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from live_numbers import write_report
from live_view import View, introduction
from rich.console import Console
from rich.live import Live

HERE = Path(__file__).parent / "live"
EXPORTS = HERE / "runs" / "live" / "model" / "exported_models"
QUIET_SECS = 5.0


class Loop:
    """`monolith launch online.yaml` as a process, and what it says."""

    def __init__(self, secs: float, rate: float, port: int) -> None:
        environment = {"SECS": f"{secs:g}", "RATE": f"{rate:g}", "HTTP_PORT": str(port)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "monolith.cli", "launch", "--json", "--grace", "35", "online.yaml"],
            cwd=HERE,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through `stop`, so that it ends in order
        )

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what happens until all parts have ended, and None when nothing has happened for a while."""
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=[lines], daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=QUIET_SECS)
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            yield json.loads(line)

    def _read(self, lines: queue.SimpleQueue[str | None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.put(line)
        lines.put(None)

    def stop(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGINT)


def free_port() -> int:
    """Return a port that nobody listens on now, 8000 if it can be had."""
    for port in (8000, 0):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(found.getsockname()[1])
    raise AssertionError("port 0 is any free one")


def main(secs: float, rate: float) -> int:
    """Run the loop and show it. Returns the exit code."""
    console, port = Console(highlight=False), free_port()
    page = f"http://127.0.0.1:{port}/"
    console.print(introduction(secs, page, continues=EXPORTS.exists()), soft_wrap=True)
    loop = Loop(secs, rate, port)
    prepare = [step["run"] for step in yaml.safe_load((HERE / "online.yaml").read_text())["prepare"]]
    view = View(console, page, prepare)

    def end(*_: object) -> None:
        view.end()
        loop.stop()  # a second one kills what has not ended yet

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        with Live(view, console=console, refresh_per_second=4) if console.is_terminal else nullcontext():
            for event in loop.events():
                if event is None:
                    view.wait()
                else:
                    view.take(event)
        code = loop.process.wait()
    finally:
        loop.process.kill()
    view.last()
    report = HERE / "runs" / "live" / "report.html"
    if write_report(report, view.reports):
        console.print(f"report  {report.resolve().as_uri()}", soft_wrap=True)
    if code not in (0, 130):
        console.print(f"the loop failed; the logs of its parts are in {HERE / 'runs/live/logs'}", style="red")
    return 0 if code == 130 else code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--secs", type=float, default=60.0, help="seconds that the site is open")
    parser.add_argument("--stay", action="store_true", help="keep it open until Ctrl-C")
    parser.add_argument("--rate", type=float, default=1500.0, help="impressions per second")
    given = parser.parse_args()
    sys.exit(main(0 if given.stay else given.secs, given.rate))
