"""Evaluation of every checkpoint of a run, also while the run goes on and writes more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from monolith.errors import InvalidArgumentError, MonolithError
from monolith.features.batch import Batch
from monolith.state.index import checkpoint_exists, read_patiently
from monolith.state.model_dir import ModelDir
from monolith.state.paths import base_name
from monolith.train.config import RunConfig
from monolith.train.estimator import Estimator

__all__ = ["SavedCheckpoint", "checkpoints_iterator", "evaluate_checkpoints"]

_log = logging.getLogger(__name__)

_POLL_SECS = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that the index of a folder names."""

    path: str
    sequence: int
    """Its number in the change log, by which a checkpoint of the same step that replaces it is told from it."""

    @property
    def step(self) -> int:
        """The global step in its name."""
        return int(base_name(self.path).rpartition("-")[2])


def checkpoints_iterator(
    model_dir: str,
    *,
    timeout_secs: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[SavedCheckpoint]:
    """Yield every checkpoint of `model_dir`, oldest first, and then each new one as soon as it is complete.

    Ends when there has been no new one for `timeout_secs` seconds, at once with 0. A checkpoint that a run writes again after it
    went back to an earlier step is a new one.

    Example:
        >>> list(checkpoints_iterator("memory://no-run"))
        []
    """
    seen: set[SavedCheckpoint] = set()
    newest_at = clock()
    while True:
        new = [checkpoint for checkpoint in _listed(model_dir) if checkpoint not in seen]
        for checkpoint in new:
            seen.add(checkpoint)
            yield checkpoint
        if new:
            newest_at = clock()
            continue
        left = newest_at + timeout_secs - clock()
        if left <= 0:
            return
        sleep(min(left, _POLL_SECS))


def _listed(model_dir: str) -> list[SavedCheckpoint]:
    home = ModelDir(model_dir)
    state = read_patiently(home)
    found = []
    for path in () if state is None else state.all_model_checkpoint_paths:
        try:
            found.append(SavedCheckpoint(path, home.home_of(path).manifest(base_name(path)).sequence))
        except MonolithError:
            # The index is older than the folder, or the folder is damaged.
            if checkpoint_exists(path):
                raise
    return found


def evaluate_checkpoints(
    make: Callable[[RunConfig], Estimator],
    config: RunConfig,
    source: Callable[[], Iterable[Batch] | None] = lambda: None,
    *,
    steps: int | None = None,
    max_steps: int | None = None,
    timeout_secs: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, float]]:
    """Yield the metrics of every checkpoint of `config.model_dir`, in the order of saving, as `Estimator.evaluate` returns them.

    They are also written as summaries to the folder `eval` of the model_dir. A checkpoint that the run has removed before it
    could be read is skipped with a log line. Ends after a checkpoint of step `max_steps` or later, or when no new one has come
    for `timeout_secs` seconds.

    Args:
        make: returns a new estimator for the given configuration, which restores one checkpoint.
        config: that of the run.
        source: returns the data to evaluate on, for each checkpoint again. None means the model's own.
        steps: batches to read for each checkpoint.
        max_steps: the step at which training ends.
        timeout_secs: how long to wait for the next checkpoint.
        sleep: waits.
        clock: tells the seconds.

    Example:
        >>> config = RunConfig(model_dir="memory://no-run")
        >>> list(evaluate_checkpoints(lambda config: Estimator(model, config), config))
        []
    """
    if config.model_dir is None:
        raise InvalidArgumentError("config: there is no model_dir, whose checkpoints could be evaluated")
    for checkpoint in checkpoints_iterator(config.model_dir, timeout_secs=timeout_secs, sleep=sleep, clock=clock):
        own = config.model_copy(update={"restore_ckpt": base_name(checkpoint.path), "restore_to": None})
        found = _evaluate(make(own), checkpoint, source, steps)
        if found is None:
            continue
        yield found
        if max_steps is not None and checkpoint.step >= max_steps:
            _log.info("the evaluation ends with step %d, which training ends with", checkpoint.step)
            return


def _evaluate(
    estimator: Estimator,
    checkpoint: SavedCheckpoint,
    source: Callable[[], Iterable[Batch] | None],
    steps: int | None,
) -> dict[str, float] | None:
    """Return the metrics of a checkpoint, or None if it has been removed."""
    try:
        # A name that is gone from the index is not followed, and the newest checkpoint would be evaluated in its place.
        is_there = estimator.global_step == checkpoint.step and checkpoint_exists(checkpoint.path)
        if is_there:
            return estimator.evaluate(source(), steps=steps)
    except MonolithError:
        if checkpoint_exists(checkpoint.path):
            raise
    finally:
        estimator.close()
    _log.warning("%s is skipped: it was removed before it could be evaluated", checkpoint.path)
    return None
