"""What replicas follow of a run whose rows are spread over ranks: each rank publishes its own rows, the chief the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from monolith.cluster.net import concat_ip_and_port, get_local_host
from monolith.errors import StorageError
from monolith.follow.run_service import announce_rank, forget_rank, forget_ranks
from monolith.ranks.rank_store import RankStore
from monolith.table.buckets import mask_of
from monolith.train.distributed.config import ControllerConfig
from monolith.train.run_feed import RunFeed
from monolith.transport.calls import Answer, BasicCall, FrameCalls
from monolith.transport.server import FrameServer
from monolith.transport.tokens import new_token, reveal
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["RankFeed", "announced_feed"]

_ANY_ADDRESS = ("0.0.0.0", "::")
_log = logging.getLogger(__name__)


class RankFeed(RunFeed):
    """Publishes the rows of one rank and, if it is the chief, the dense weights, which all ranks have."""

    def __init__(self, trainer: Trainer, store: RankStore) -> None:
        self.rank, self.ranks = store.agreement.mesh.rank, store.agreement.mesh.size
        self._mask = mask_of([(store.buckets.start, store.buckets.stop)])
        super().__init__(trainer, tables=lambda: store.local.tables, owner=self, dense=self.rank == 0)

    def mask(self) -> np.ndarray:
        """Return bool [NUM_BUCKETS]: which rows the rank has. It keeps them until the run is formed again."""
        return self._mask


class _FeedCalls(FrameCalls):
    def __init__(self, feed: RunFeed, *, max_frame_bytes: int) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self._feed = feed
        # Without SHUTDOWN: the service lives as long as the rank.
        self._handlers = {BasicCall.HEALTH: lambda frame: Answer(), **feed.calls.calls()}

    def stop(self, *, grace: float) -> bool:
        self._feed.feed.release()
        return super().stop(grace=grace)


@contextmanager
def announced_feed(feed: RankFeed, model_dir: str | None, config: ControllerConfig) -> Iterator[None]:
    """Let replicas follow a rank during the block. The chief has a service of its own, and makes room for a new set of ranks."""
    if not model_dir or is_remote(model_dir) or not config.enabled:
        try:
            yield
        finally:
            feed.close()
        return
    if feed.rank == 0:
        forget_ranks(model_dir, since=feed.ranks)
        yield  # the controller closes the feed
        return
    drawn = None if reveal(config.token) is not None else new_token()
    listens = config.model_copy(update={"port": 0, "token": config.token if drawn is None else drawn})
    with FrameServer(listens, _FeedCalls(feed, max_frame_bytes=listens.max_message_bytes)) as server:
        host = listens.host
        address = concat_ip_and_port(get_local_host(), server.port) if host in _ANY_ADDRESS else server.address
        try:
            announce_rank(model_dir, feed.rank, address, drawn)
        except StorageError as error:
            _log.warning("replicas cannot follow rank %d: %s", feed.rank, error)
        try:
            yield
        finally:
            feed.close()
            forget_rank(model_dir, feed.rank, address)
