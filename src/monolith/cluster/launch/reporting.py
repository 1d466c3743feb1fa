"""What a role reports to its launcher: heartbeats over a pipe."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from monolith.exit_codes import HEARTBEAT_VARIABLE

__all__ = ["Pulse", "beating"]

_STOPPED_STATES = ("T", "t")
_BEAT, _LAST_BEAT = b".", b"-"
_MANY = 1 << 16


class Pulse:
    """The launcher's end: how long ago a role last showed that it is alive.

    A role that has not begun to send heartbeats, or has stopped sending them on purpose, counts as alive unless the kernel
    says that it was stopped (SIGSTOP).
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._last: float | None = None
        self._stopped_since: float | None = None
        self._open = [self._read_end, self.write_end]

    @property
    def variable(self) -> str:
        """The value of `HEARTBEAT_VARIABLE` for the role."""
        return f"{self.write_end}:{os.fstat(self.write_end).st_ino}"

    def started(self) -> None:
        """Close the write end, which the role has inherited."""
        self._close(self.write_end)

    def silence(self, pid: int) -> float:
        """Return the seconds since the process `pid` last showed that it is alive. 0 if it never has."""
        now = self._clock()
        if beats := self._beats():
            self._last = None if beats.endswith(_LAST_BEAT) else now
        if not _is_stopped(pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return max(now - moment for moment in (self._last, self._stopped_since, now) if moment is not None)

    def close(self) -> None:
        """Close the pipe."""
        for end in tuple(self._open):
            self._close(end)

    def _close(self, end: int) -> None:
        if end in self._open:
            self._open.remove(end)
            os.close(end)

    def _beats(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self._read_end, _MANY) if self._read_end in self._open else b""
        return b""


@contextmanager
def beating(every_secs: float, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Send a heartbeat to the launcher of this process now and every `every_secs` seconds, for the time of a block.

    Without a launcher nothing is sent.

    Example:
        >>> with beating(5.0, {}):
        ...     pass
    """
    pipe = _pipe_of(os.environ if environ is None else environ)
    if pipe is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(pipe, every_secs, ended), name="monolith-launch-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _beat(pipe: int, every_secs: float, ended: threading.Event) -> None:
    _send(pipe, _BEAT)
    while not ended.wait(every_secs):
        _send(pipe, _BEAT)
    _send(pipe, _LAST_BEAT)


def _send(pipe: int, beat: bytes) -> None:
    # If the launcher has ended, the kernel ends this process too. One that is stopped reads later: the heartbeats of a day
    # fit into the pipe.
    with suppress(BrokenPipeError, BlockingIOError):
        os.write(pipe, beat)


def _pipe_of(environ: Mapping[str, str]) -> int | None:
    """Return the descriptor of the pipe, unless it is another file: a child of a role has the variable but not the pipe."""
    descriptor, _, inode = environ.get(HEARTBEAT_VARIABLE, "").partition(":")
    if not descriptor:
        return None
    try:
        found = os.fstat(int(descriptor))
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != int(inode):
            return None
    except (OSError, ValueError):
        return None
    os.set_blocking(int(descriptor), False)
    return int(descriptor)


def _is_stopped(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0] in _STOPPED_STATES
    except (OSError, IndexError):
        return False
