"""`RoleActor`: a role on some machine of a Ray cluster. It knows nothing of Ray, which only makes it and carries its answers."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monolith.cluster.launch.child_process import ChildProcess
from monolith.cluster.net import get_local_ip

__all__ = ["Look", "RoleActor"]

_KEPT_LINES = 1000  # what may wait for a launcher that does not look


@dataclass(frozen=True)
class Look:
    """A role as its actor sees it."""

    life: str
    """Differs from one life of the actor to the next."""
    pid: int | None
    code: int | None
    lines: tuple[str, ...]
    """Those that are new."""
    next: int
    """What to ask for the next time."""
    silence: float = 0.0
    """Seconds since the role last showed that it is alive. 0 if it never has."""


class RoleActor:
    """Has started the process of a role when it is made: an actor that Ray starts again starts its role again.

    The process ends with the actor, however that ends.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     actor = RoleActor(["-c", "print('hello')"], {}, f"{folder}/log", folder)
        ...     look = actor.look(wait=0.1)
        ...     while look.code is None:
        ...         look = actor.look(look.life, 0, wait=0.1)
        >>> look.lines, look.code
        (('hello',), 0)
    """

    def __init__(
        self,
        python_args: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        folder: str,
        *,
        says_host: bool = False,
    ) -> None:
        """Run Python with `python_args` in `folder`, which this machine must have.

        With `says_host` the arguments end in the option `--host` and the address of this machine.
        """
        self._life = secrets.token_hex(8)
        self._lines: list[str] = []
        self._dropped = 0
        self._changed = threading.Condition()
        command = [sys.executable, *python_args, *(["--host", get_local_ip()] if says_host else [])]
        self._child = ChildProcess(
            command, log=Path(log), environment=environment, folder=Path(folder), on_line=self._hear
        )

    def look(self, life: str = "", after: int = 0, *, wait: float = 0.0) -> Look:
        """What is new since line `after` of `life`; waits for news for up to `wait` seconds."""
        after = after if life == self._life else 0
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) + self._dropped > after, timeout=wait)
        code = self._child.poll()  # before the lines: with the code come the last of them
        with self._changed:
            new = tuple(self._lines[max(after - self._dropped, 0) :])
            count = self._dropped + len(self._lines)
            return Look(self._life, self._child.pid, code, new, count, self._child.silence)

    def ask_to_end(self) -> None:
        """Let the role end in order."""
        self._child.ask_to_end()

    def _hear(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            excess = len(self._lines) - _KEPT_LINES
            if excess > 0:
                del self._lines[:excess]
                self._dropped += excess
            self._changed.notify_all()
