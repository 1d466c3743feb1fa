"""A transport of asyncio without a socket, for tests of connections."""

from __future__ import annotations

from collections.abc import Iterable


class Transport:
    """Stands for a socket: keeps what is written."""

    def __init__(self) -> None:
        self.sent, self.state, self.paused = b"", "open", False

    def write(self, data: bytes) -> None:
        assert self.state == "open"
        self.sent += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.sent += b"".join(parts)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.state = "half closed"

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def is_closing(self) -> bool:
        return self.state in ("closed", "aborted")

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.sent.split(b"HTTP/1.1 ")[1:]]
