"""Servers and workers as processes that begin in a few milliseconds: forked by one that has everything imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked_processes import CONTEXT


class Forked:
    """One process that runs `target`; what it sends to its pipe is read with `receive`."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=target, args=(theirs, *arguments))
        self._process.start()
        # Only the child must hold it, or its death would go unnoticed.
        theirs.close()

    def receive(self, *, timeout: float = 120.0) -> Any:  # noqa: ANN401 - whatever was sent
        """The next message; `EOFError` if the process has ended without one."""
        assert self.pipe.poll(timeout), "the process neither sent anything nor ended"
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def stop(self) -> None:
        """Let it do nothing more until it is killed."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.join()

    def join(self, *, timeout: float = 120.0) -> int:
        """Wait for its end; the exit code."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "the process has not ended"
        return self._process.exitcode

    def close(self) -> None:
        """End it if it still runs."""
        self.kill()
        self.pipe.close()


class ForkedServer:
    """A parameter server with a folder; started again it has the port that it had."""

    def __init__(self, folder: Path, flush: float | None) -> None:
        self._folder, self._flush, self.port = folder, flush, 0
        self.restart()

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        """Start it, at first or after `kill`; returns when it listens."""
        self._forked = Forked(_serve, self._folder, self._flush, self.port)
        self.port = self._forked.receive()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._forked.kill()

    def close(self) -> None:
        """End it if it still runs."""
        self._forked.close()


def _serve(pipe: Connection, folder: Path, flush: float | None, port: int) -> None:
    from monolith.ps import ServerConfig
    from same_port import started_again

    server = started_again(ServerConfig(folder=folder, log_flush_secs=flush, port=port))
    pipe.send(server.port)
    # Nothing ever comes; it ends with the test, whatever becomes of that.
    with suppress(EOFError):
        pipe.recv()
    server.close()
