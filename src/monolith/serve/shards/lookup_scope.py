"""`lookup_scope`: a deadline for the lookups of a request, and a report of what happened in them."""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType

__all__ = ["LookupReport", "current_report", "lookup_scope"]


@dataclass
class LookupReport:
    """What happened in the lookups of a `lookup_scope`."""

    deadline: float
    """When they must have ended, on the clock `time.monotonic`. Infinite if nobody asked for one."""
    missing_ids: int = 0
    """Ids that were read as unseen, because no replica of their shard answered."""
    missing_buckets: set[tuple[int, int]] = field(default_factory=set)
    """The buckets of the shards that did not answer."""
    retries: int = 0
    """Requests that were sent to another replica."""

    @property
    def partial(self) -> bool:
        """Whether some rows are missing."""
        return self.missing_ids > 0

    def parameters(self) -> dict[str, int]:
        """Return what an answer says about it: nothing, or how many ids were read as unseen."""
        return {"monolith_missing_ids": self.missing_ids} if self.missing_ids else {}


_scope: ContextVar[LookupReport | None] = ContextVar("monolith_lookup_report", default=None)


class lookup_scope:  # noqa: N801 - used as a function is
    """Limit the lookups of this thread within a block to `timeout` seconds together, and report what happened in them.

    `deadline` limits them too, a moment on the clock `time.monotonic`.

    Example:
        >>> with lookup_scope(timeout=0.05) as report:
        ...     pass  # predictor.predict(batch)
        >>> report.partial
        False
    """

    __slots__ = ("_report", "_token")  # a generator would take twice as long

    def __init__(self, timeout: float | None = None, *, deadline: float = float("inf")) -> None:
        self._report = LookupReport(deadline if timeout is None else min(deadline, time.monotonic() + timeout))
        self._token: Token[LookupReport | None]

    def __enter__(self) -> LookupReport:
        self._token = _scope.set(self._report)
        return self._report

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _scope.reset(self._token)


def current_report() -> LookupReport | None:
    """Return the report of the `lookup_scope` around the caller. None if there is none."""
    return _scope.get()
