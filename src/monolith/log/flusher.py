"""`Flusher`: when to commit. Asked between steps; it commits in the background every so many seconds or changed rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from monolith.errors import InvalidArgumentError
from monolith.log.change_log import ChangeLog
from monolith.state_bytes import State

__all__ = ["Flusher"]

_logger = logging.getLogger(__name__)


class Flusher:
    """Commits to `log` in the background when something changed and it is time.

    A commit that fails is reported to the `logging` module and counted; its changes are in the next one, which is tried as
    soon as it is due again.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [table]) as log:
        ...     flusher = Flusher(log, every_secs=None, every_rows=2)
        ...     _ = table.reinitialize([7])
        ...     print(flusher.poll(step=1))
        ...     _ = table.reinitialize([8])
        ...     flusher.poll(step=2).result()
        None
        1
    """

    def __init__(
        self,
        log: ChangeLog,
        *,
        every_secs: float | None = 1.0,
        every_rows: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every_secs` seconds after the last commit, or when `every_rows` ids have changed: what comes first; None: never."""
        for name, value in (("every_secs", every_secs), ("every_rows", every_rows)):
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name}: expected a number above 0, or None, got {value!r}")
        self.log = log
        self.every_secs = every_secs
        self.every_rows = every_rows
        self.failures = 0
        """Commits that failed so far."""
        self._clock = clock
        self._last = clock()
        self._under_way: Future[int] | None = None

    def poll(
        self,
        *,
        step: int,
        event_time: int = 0,
        source: Callable[[], State] | None = None,
        dense: Callable[[], Mapping[str, State]] | None = None,
    ) -> Future[int] | None:
        """Commit if it is due; the commit under way then, else None. `source` and `dense` are called only for a commit."""
        self._look_back()
        if self.log.busy or not self._due():
            return None
        self._last = self._clock()
        self._under_way = self.log.commit_in_background(
            step=step,
            event_time=event_time,
            source=None if source is None else source(),
            dense=None if dense is None else dense(),
        )
        return self._under_way

    def _due(self) -> bool:
        changed = self.log.changed
        in_time = self.every_secs is not None and self._clock() - self._last >= self.every_secs
        return changed > 0 and (in_time or (self.every_rows is not None and changed >= self.every_rows))

    def _look_back(self) -> None:
        """Say it when the last commit failed: nobody need have waited for it."""
        if self._under_way is None or not self._under_way.done():
            return
        error, self._under_way = self._under_way.exception(), None
        if error is not None:
            self.failures += 1
            _logger.warning("the change log could not be written, its changes wait for the next commit: %s", error)
