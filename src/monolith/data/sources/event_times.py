"""`EventTimes`: how far the events of each partition have come, and the watermark that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["EventTimes"]


class EventTimes:
    """The newest event time of each partition, and the watermark: nothing older than it is expected any more.

    The watermark is the smallest newest event time of all partitions, less the allowed lateness. It never falls. A partition
    without records for `idle_secs` does not hold it back. All times are milliseconds since 1970.

    Example:
        >>> times = EventTimes(lateness_ms=10, idle_secs=60, clock=lambda: 0.0)
        >>> times.assign(["clicks/0", "clicks/1"])
        >>> times.observe("clicks/0", 1000)
        >>> times.watermark
        >>> times.observe("clicks/1", 500)
        >>> times.watermark
        490
    """

    def __init__(self, *, lateness_ms: int, idle_secs: float, clock: Callable[[], float]) -> None:
        self._lateness_ms, self._idle_secs, self._clock = lateness_ms, idle_secs, clock
        self.newest: dict[str, int] = {}
        """Newest event time of each partition that has had one."""
        self._last_seen: dict[str, float] = {}
        self.watermark: int | None = None
        """None before every partition has had an event or is idle."""

    def assign(self, partitions: list[str], newest: Mapping[str, int] | None = None) -> None:
        """Follow these partitions and no others. `newest` are the newest event times that were seen earlier."""
        now = self._clock()
        self._last_seen = {name: self._last_seen.get(name, now) for name in partitions}
        known = {**(newest or {}), **self.newest}
        self.newest = {name: known[name] for name in partitions if name in known}
        self.advance()

    def observe(self, partition: str, event_time: int) -> None:
        """Note the newest event time of some records of `partition`."""
        # A new dict, because another thread may be reading the old one.
        self.newest = {**self.newest, partition: max(event_time, self.newest.get(partition, event_time))}
        self._last_seen[partition] = self._clock()
        self.advance()

    def advance(self) -> None:
        """Move the watermark on if partitions have become idle."""
        now = self._clock()
        active = [name for name, seen in self._last_seen.items() if now - seen < self._idle_secs]
        if not active or any(name not in self.newest for name in active):
            return
        reached = min(self.newest[name] for name in active) - self._lateness_ms
        self.watermark = reached if self.watermark is None else max(reached, self.watermark)
