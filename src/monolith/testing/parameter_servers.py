"""Parameter servers in processes of their own, for tests that kill and pause them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["ServerProcess", "server_process"]

_COMMAND = (sys.executable, "-c", "import sys; from monolith.cli import main; sys.exit(main())")


class ServerProcess:
    """A process of `monolith ps` or another serving verb on a free port. It has started when the constructor returns."""

    def __init__(self, options: Sequence[str] = (), *, verb: str = "ps") -> None:
        self._options = (verb, "--json", *options)
        self._start()

    def _start(self) -> None:
        self._process = self._begin(self._options)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with exit code {self._process.wait()} before it listened")
        self.address: str = json.loads(line)["address"]
        """host:port."""

    def _begin(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([*_COMMAND, *arguments], stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Suspend it (SIGSTOP). Returns when it is suspended."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Resume it after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start it again after it has ended, at the address it had."""
        self.close()
        self._options = (*self._options, "--port", self.address.rpartition(":")[2])
        self._start()

    def stop(self, *, timeout: float = 60.0) -> int:
        """Ask it to end and wait for it. Returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def close(self) -> None:
        """End it if it still runs, and let go of its output."""
        if self.is_running:
            # A paused process takes no other signal.
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def server_process(*options: str, verb: str = "ps") -> Iterator[ServerProcess]:
    """Run a server process for the time of a block. `options` are those of `monolith ps`, or of another `verb`."""
    server = ServerProcess(options, verb=verb)
    try:
        yield server
    finally:
        server.close()
