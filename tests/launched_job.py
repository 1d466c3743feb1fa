"""One `monolith launch --json` as a process, and its events as they come."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

__all__ = ["Launch", "is_alive"]


class Launch:
    """The launcher has been started when this is made."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "monolith.cli", "launch", "--json", "--log-dir", "logs", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=None if environment is None else dict(environment),
        )
        self.events: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def pids(self, role: str) -> list[int]:
        return [e["pid"] for e in self.events if e["event"] == "started" and e["role"] == role]

    def all_pids(self) -> list[int]:
        return [event["pid"] for event in self.events if event["event"] == "started"]

    def lines(self, role: str) -> list[str]:
        return [event["text"] for event in self.events if event["event"] == "line" and event["role"] == role]

    def kinds(self, role: str) -> list[str]:
        return [e["event"] for e in self.events if e.get("role") == role and e["event"] != "line"]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, timeout: float = 180.0) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        code = self._process.wait(timeout)
        self._reader.join(timeout)
        assert self._process.stderr is not None
        return code, self._process.stderr.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def is_alive(pid: int) -> bool:
    try:
        # A process that nobody has reaped is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
