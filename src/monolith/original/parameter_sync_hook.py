"""`ParameterSyncHook`: pushes touched rows to serving targets while a run trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import InvalidArgumentError, MonolithError
from monolith.follow.feed import Feed
from monolith.original.backends import SyncBackend, refresh_sync_config
from monolith.original.parameter_sync import ParameterSyncClient
from monolith.proto.parameter_sync_pb2 import ClientConfig, PushResult
from monolith.train.control import Controller
from monolith.train.hooks.hook import Hook
from monolith.train.run_feed import RunFeed
from monolith.transport.link import Link
from monolith.transport.server import read_pem

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["ParameterSyncHook", "ParameterSyncThread"]

LOOK_SECS = 0.2
"""Seconds until targets that failed are looked at again if nothing changes."""
MIN_SECS = 0.01
"""Seconds between two rounds at least."""

_log = logging.getLogger(__name__)


class ParameterSyncThread:
    """Pushes the rows of a feed to the targets of a sub-model, as soon as they change, until `close`.

    A process that holds rows has one: a run, a rank, or a parameter server. The original pushes every 10 seconds.

    Args:
        feed: what is pushed. It is started here if it was not.
        sync_backend: knows the targets.
        ps_index: the sub-model is `ps_<ps_index>`.
        refresh_interval: seconds between two queries for targets.
        token: what targets require.
        tls_root_certs: CA bundle (PEM) that signed their certificates.
        clock: seconds, rising.
    """

    def __init__(
        self,
        feed: Feed,
        sync_backend: SyncBackend,
        ps_index: int,
        refresh_interval: float = 100,
        *,
        token: str | None = None,
        tls_root_certs: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pem = None if tls_root_certs is None else read_pem(tls_root_certs, "tls_root_certs")

        def connect(address: str, timeout: float) -> Link:
            return Link(address, timeout=timeout, token=token, tls_root_certs=pem, max_streams=1)

        self._feed, self._backend, self._ps_index = feed, sync_backend, ps_index
        self._refresh_interval, self._clock = refresh_interval, clock
        self._refreshed = float("-inf")
        self.config = ClientConfig()
        """The targets, as they were when they were last queried."""
        self.last_result = PushResult()
        """The outcome of the last push."""
        feed.start()
        self._client = ParameterSyncClient(feed, connect=connect, clock=clock)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monolith-parameter-sync", daemon=True)
        self._thread.start()

    def close(self, *, flush: bool = True) -> bool:
        """Push what has changed until now, and stop. Returns whether all targets have everything."""
        self._closing.set()
        self._thread.join()
        try:
            if flush:
                self._feed.drain()
                self._round(retry=True)
                if any(self._client.lacking.values()):  # one was started again: it gets all rows now
                    self._round(retry=True)
            return not any(self._client.lacking.values())
        finally:
            self._client.close()

    def _run(self) -> None:
        while not self._closing.wait(MIN_SECS):
            self._round()
            stream, since = self._client.position
            version = self._feed.dense_version
            self._feed.wait(stream=stream, since=since, dense_version=version, timeout=LOOK_SECS)

    def _round(self, *, retry: bool = False) -> None:
        try:
            self._refresh()
            result = self._client.sync(self.config, retry=retry)
            if result.responses:
                self.last_result = result
        except MonolithError as error:
            _log.warning("parameter sync: %s", error)
        except Exception:
            _log.exception("parameter sync")

    def _refresh(self) -> None:
        if self._clock() - self._refreshed < self._refresh_interval:
            return
        self._refreshed = self._clock()
        try:
            self.config = refresh_sync_config(self._backend, self._ps_index)
        except MonolithError as error:
            _log.warning("the targets of parameter sync cannot be queried, those known before are used: %s", error)


class ParameterSyncHook(Hook):
    """Pushes rows that training has touched to the targets of `ps_<ps_index>`, by a thread beside the steps.

    Give it to a run in one process with `ps_index` 0, or to each rank of a synchronous run with its rank. The rows of parameter
    servers are not in the process of a hook: there a replica follows (`monolith serve --run`).

    Args:
        sync_backend: knows the targets.
        ps_index: the sub-model is `ps_<ps_index>`.
        refresh_interval: seconds between two queries for targets.
        token: what targets require.
        tls_root_certs: CA bundle (PEM) that signed their certificates.
        clock: seconds, rising.

    Example:
        >>> import tempfile
        >>> from monolith.original import DiscoveryBackend
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = ParameterSyncHook(DiscoveryBackend(f"file={folder}"), 0)
    """

    def __init__(
        self,
        sync_backend: SyncBackend,
        ps_index: int,
        refresh_interval: float = 100,
        *,
        token: str | None = None,
        tls_root_certs: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ps_index < 0 or not refresh_interval >= 0:
            raise InvalidArgumentError(
                f"ps_index, refresh_interval: expected numbers from 0, got {ps_index}, {refresh_interval}"
            )
        self._backend, self._ps_index, self._refresh_interval = sync_backend, ps_index, refresh_interval
        self._token, self._tls_root_certs, self._clock = token, tls_root_certs, clock
        self._own: Feed | None = None
        self.thread: ParameterSyncThread | None = None
        """What pushes, while the run goes on."""

    def after_start(self, trainer: Trainer) -> None:
        """The rows are restored: push from here on."""
        feed = self._feed_of(trainer)
        if not feed.tables():
            raise InvalidArgumentError(
                "ParameterSyncHook: the rows of this run are not in this process; let replicas follow it with "
                "`monolith serve --run`, or give each parameter server a ParameterSyncThread over its feed"
            )
        self.thread = ParameterSyncThread(
            feed,
            self._backend,
            self._ps_index,
            self._refresh_interval,
            token=self._token,
            tls_root_certs=self._tls_root_certs,
            clock=self._clock,
        )

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Push the last changes. A target that does not answer is logged and gets them from the next run."""
        thread, self.thread = self.thread, None
        if thread is not None and not thread.close(flush=error is None):
            _log.warning(
                "not all targets of parameter sync have the last changes; the next run pushes all rows to them"
            )
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def _feed_of(self, trainer: Trainer) -> Feed:
        """Return the feed of the run. Two feeds of one table would take changes from each other."""
        for hook in trainer.hooks:
            found = hook.feed if isinstance(hook, Controller) else hook
            if isinstance(found, RunFeed):
                found.start()
                return found.feed
        self._own = Feed(
            lambda: {name: shards[0] for name, shards in trainer.tables().items()}, every=trainer.config.feed_secs
        )
        return self._own
