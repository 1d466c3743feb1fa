"""`RunFeed`: what replicas follow of a run, its rows and its dense weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from monolith.durable import write_durably
from monolith.follow.calls import FollowCalls
from monolith.follow.feed import LAST_SECS, MAX_REWOUND, Feed, LogPosition, Owner
from monolith.follow.run_service import run_identity
from monolith.log.segment_format import SegmentInfo
from monolith.nn import dense_state_dict
from monolith.ps.client.server_parameters import ServerOptimizer
from monolith.train.hooks.hook import Hook
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.table import EmbeddingTable
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["RunFeed"]

_log = logging.getLogger(__name__)
_FOLLOWED = "followed"
"""A file in the model_dir that exists once a replica has followed the run."""


class RunFeed(Hook):
    """Publishes the rows that this process holds and, if it has the last word on them, the dense weights.

    It costs nothing until somebody follows. A run that was followed publishes from its first step when it is started again, so
    that replicas need not read all rows.

    Args:
        trainer: The run.
        tables: Returns the tables of this process by the name they have in checkpoints. None: those of the trainer.
        owner: Which buckets they have, if other ranks have the rest. What is durable of them is not reported: after a restart
            replicas read all rows again.
        dense: Whether the weights of this process are published.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        tables: Callable[[], Mapping[str, EmbeddingTable]] | None = None,
        owner: Owner | None = None,
        dense: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trainer, self._has_dense, self._clock = trainer, dense, clock
        self._dense_at = self._stepped_at = float("-inf")
        self._published = -1
        self._updating = False
        self._run = ""
        self.feed = Feed(
            tables or (lambda: {name: shards[0] for name, shards in trainer.tables().items()}),
            dense=self._weights_at_rest,
            every=trainer.config.feed_secs,
            dense_every=trainer.config.feed_dense_secs,
            moment=lambda: (trainer.step, trainer.event_time),
            owner=owner,
            log=self if owner is None else None,
            clock=clock,
        )
        self.servers: Callable[[], Sequence[str]] = tuple
        """Returns the addresses of parameter servers, which publish their rows themselves."""
        self.calls = FollowCalls(
            self.feed, on_follower=self._note_follower, moved_to=lambda: tuple(self.servers()), run=self._identity
        )
        """Answers followers."""

    def changed_since(self, position: LogPosition) -> Mapping[str, np.ndarray] | None:
        """Return the ids of each table that have changed in the run's log after that segment. None if that is not known."""
        log = self.trainer.change_log
        if log is None:
            return None
        return log.changed_since(position.sequence, position.checksum, limit=MAX_REWOUND)

    def after_start(self, trainer: Trainer) -> None:
        """The run is restored. One that was followed before publishes from here on."""
        self._dense_at = float("-inf")
        if self.feed.is_active:
            self._watch_log()
        elif (marker := self._marker()) is not None and marker.exists():
            self._watch_log()
            self.feed.start(complete=True)
        self._publish_dense()

    def before_update(self, trainer: Trainer, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Weights change from here on until the end of the step."""
        self._updating = True

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Publish the dense weights if it is time: between two steps they are of one moment."""
        self._updating, self._stepped_at = False, self._clock()
        self._publish_dense()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Publish the last changes, and let followers read them before the process ends."""
        if error is None:
            self._dense_at = float("-inf")
            self._publish_dense()
            if not self.feed.flush(LAST_SECS):
                _log.warning("not all replicas have read the last changes after %g s; they have them later", LAST_SECS)

    def start(self) -> None:
        """Publish from now on, as for a first follower, to somebody in this process."""
        if not self.feed.is_active:
            self._note_follower()
            self.feed.start()

    def close(self) -> None:
        """Publish what is left and stop."""
        self.feed.close()

    def _publish_dense(self) -> None:
        now = self._clock()
        if self.feed.is_active and self._has_dense and now - self._dense_at >= self.trainer.config.feed_dense_secs:
            self._dense_at, self._published = now, self.trainer.step
            self.feed.publish_dense(_weights(self.trainer))

    def _weights_at_rest(self) -> Mapping[str, np.ndarray] | None:
        """Return the weights if no step was made for a while, as in a run that waits for data. Called by the feed's thread."""
        step, rest = self.trainer.step, self._clock() - self._stepped_at
        if not self._has_dense or step == self._published or rest < self.trainer.config.feed_dense_secs:
            return None
        weights = _weights(self.trainer)
        if self._updating or self.trainer.step != step:
            return None  # a step has begun meanwhile, which publishes them itself
        self._published = step
        return weights

    def _note_follower(self) -> None:
        marker = self._marker()
        if marker is not None and not marker.exists():
            write_durably(marker, b"")
        self._watch_log()

    def _watch_log(self) -> None:
        log = self.trainer.change_log
        if log is not None:
            log.on_cut = self._cut

    def _cut(self) -> Callable[[SegmentInfo], None]:
        durable = self.feed.cut()
        return lambda info: durable(LogPosition(sequence=info.sequence, checksum=info.checksum))

    def _identity(self) -> str:
        if not self._run:
            folder = self.trainer.config.model_dir
            self._run = "" if folder is None else run_identity(folder)
        return self._run

    def _marker(self) -> Path | None:
        folder = self.trainer.config.model_dir
        return None if folder is None or is_remote(folder) else Path(folder) / _FOLLOWED


def _weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """Copy the dense weights and buffers by name, without those that servers train."""
    elsewhere = dict(trainer.model.named_parameters()) if isinstance(trainer.optimizer, ServerOptimizer) else {}
    state = dense_state_dict(trainer.model)
    return {name: _array(value) for name, value in state.items() if name not in elsewhere}


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()  # frames have no such type, and nothing is lost
    elif value.dtype not in (torch.float32, torch.float64, torch.int64, torch.int32):
        value = value.to(torch.int64)
    return value.clone().numpy()
