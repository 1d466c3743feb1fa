"""What a rank notes when others are lost, and when it fails itself."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from monolith.errors import FencedError, RankLostError, RepeatedFailureError, RunInterruptedError
from monolith.exit_codes import WRONG_USAGE, exit_code_of
from monolith.state.storage import open_folder

__all__ = ["FailureRecord", "RankRecovery", "loss_in"]

FAILURES = "rank_failures"
"""The folder of the model_dir with the last failure of each rank."""
_MAX_TEXT = 2000
_log = logging.getLogger(__name__)


class FailureRecord:
    """Remembers the last failure of a rank in `<model_dir>/rank_failures/<rank>`, so that its successor knows of it.

    Example:
        >>> record = FailureRecord("memory://failing-run", rank=1)
        >>> record.is_repeated(7, ValueError("bad data"))
        False
        >>> FailureRecord("memory://failing-run", rank=1).is_repeated(7, ValueError("bad data"))
        True
    """

    def __init__(self, model_dir: str | None, *, rank: int) -> None:
        """Without a `model_dir` nothing is remembered."""
        self._folder = None if not model_dir else open_folder(f"{model_dir.rstrip('/')}/{FAILURES}")
        self._name = str(rank)

    def is_repeated(self, step: int, error: BaseException) -> bool:
        """Return whether the failure before this one was an error of the same type in the same step, and remember this one."""
        if self._folder is None:
            return False
        failure = {"step": step, "type": type(error).__name__}
        try:
            before = self._read()
            text = str(error)[:_MAX_TEXT]
            self._folder.write(self._name, json.dumps({**failure, "text": text, "at": time.time()}).encode())
        except OSError as refused:
            # The failure itself is what matters to whoever reads the output.
            _log.warning("the failure of rank %s cannot be remembered: %s", self._name, refused)
            return False
        return {name: before.get(name) for name in failure} == failure

    def _read(self) -> dict[str, object]:
        if self._folder is None or self._folder.size(self._name) is None:
            return {}
        try:
            found = json.loads(self._folder.read(self._name))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class RankRecovery:
    """What one process knows about the losses of ranks in a run: whom, since when, and what they cost.

    Every event is one line in the log.

    Args:
        record: of the failures of this rank.

    Example:
        >>> recovery = RankRecovery(FailureRecord(None, rank=0))
        >>> recovery.lost(RankLostError("rank 1 closed its connection in step 7", rank=1, step=7), step=6)
        >>> recovery.losses
        1
        >>> recovery.continued(step=5, ranks=2)
    """

    def __init__(self, record: FailureRecord, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._record, self._clock = record, clock
        self._lost_at: float | None = None
        self._made = 0
        self.losses = 0
        """How often a rank was lost."""

    @property
    def seconds(self) -> float:
        """Since the loss from which the run has not continued yet, 0 if there is none."""
        return 0.0 if self._lost_at is None else self._clock() - self._lost_at

    def lost(self, loss: RankLostError, *, step: int) -> None:
        """Note that a rank was lost when this one had made `step` steps."""
        if self._lost_at is None:
            self._lost_at, self._made = self._clock(), step
            self.losses += 1
        _log.warning("%s; dropping the unfinished step and forming the run again", loss)

    def continued(self, *, step: int, ranks: int) -> None:
        """Log that `ranks` continue from `step`, if a rank was lost before."""
        if self._lost_at is None:
            return
        again = max(0, self._made - step)
        redone = (
            f"; {again} {'step' if again == 1 else 'steps'} made before the loss will be made again" if again else ""
        )
        who = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
        _log.warning("continuing from step %d with %s, %.1f s after the loss%s", step, who, self.seconds, redone)
        self._lost_at = None

    def failed(self, error: BaseException, *, step: int) -> None:
        """Remember that this rank itself has failed after `step` steps.

        Raises:
            RepeatedFailureError: its predecessor has failed in the same step with the same error.
        """
        if not isinstance(error, Exception) or isinstance(error, RunInterruptedError | FencedError):
            return
        if exit_code_of(error) == WRONG_USAGE:
            return  # the launcher does not restart it, and a user who has corrected something may fail again
        if self._record.is_repeated(step + 1, error):
            raise RepeatedFailureError(
                f"this rank has failed in step {step + 1} with the same error as the time before, so another restart would not "
                f"help: {type(error).__name__}: {error}"
            ) from error


def loss_in(error: BaseException) -> RankLostError | None:
    """Return the loss of a rank that `error` is, or that it was raised because of.

    Example:
        >>> try:
        ...     try:
        ...         raise RankLostError("rank 1 has left", rank=1)
        ...     finally:
        ...         raise OSError("a save was not finished")
        ... except OSError as error:
        ...     loss_in(error).rank
        1
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, RankLostError):
        seen = seen.__cause__ or seen.__context__
    return seen
