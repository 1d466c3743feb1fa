"""Scripted roles of a job without processes, for tests of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ScriptedProcess"]


@dataclass
class ScriptedProcess:
    """A process that ends when the test calls `exit`, and records what it was asked."""

    pid: int | None = 1
    restarted: int = 0
    code: int | None = None
    asked: bool = False
    killed: bool = False
    silence: float = 0.0
    last_lines: list[str] = field(default_factory=list)

    def exit(self, code: int) -> None:
        """End with `code`."""
        self.code = code

    def poll(self) -> int | None:
        """Return the code that `exit` was called with."""
        return self.code

    def ask_to_end(self) -> None:
        """Record the request."""
        self.asked = True

    def kill(self) -> None:
        """Record it, and end."""
        self.killed, self.code = True, -9
