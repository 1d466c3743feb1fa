"""How the ranks of a run continue when one of them is lost: they form the run again and restore their last common state."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from monolith.errors import FencedError, RankLostError, RepeatedFailureError, RunInterruptedError
from monolith.ranks.socket_mesh import SocketMesh
from monolith.state.storage import open_folder
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["FailureRecord", "RankRecovery"]

FAILURES = "rank_failures"
"""The folder of the model_dir with the last failure of each rank."""
_MAX_TEXT = 2000
_log = logging.getLogger(__name__)

Result = TypeVar("Result")


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
    """Calls `attempt` with the connected ranks of a run, and again each time that a rank was lost and the run formed anew.

    A step that some rank has not finished is dropped: `attempt` restores the last state that all ranks have in common. An error
    of this rank itself is told to the others and raised.

    Args:
        form: connects the ranks, given the generation that this process was part of last. It waits for a rank that is replaced.
        record: of the failures of this rank.

    Example:
        >>> from types import SimpleNamespace as Mesh
        >>> meshes = iter([1, 2])
        >>> def form(after):
        ...     return Mesh(rank=0, size=1, generation=next(meshes), members=(), fail=print, close=lambda: None)
        >>> def attempt(mesh):
        ...     if mesh.generation == 1:
        ...         raise RankLostError("rank 1 closed its connection in step 7", rank=1, step=7)
        ...     return mesh.generation
        >>> RankRecovery(form, FailureRecord(None, rank=0)).run(attempt)
        2
    """

    def __init__(
        self,
        form: Callable[[int], SocketMesh],
        record: FailureRecord,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failover: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._form, self._record, self._clock, self._on_failover = form, record, clock, on_failover
        self._lost_at: float | None = None
        self._lost_in = 0
        self._size = 0
        self.failovers = 0
        """How often the run was formed again."""
        self.hook: Hook = _Continued(self)
        """Logs at which step the run continues. A hook of the trainer, after those that restore."""
        self.step: Callable[[], int] = lambda: 0
        """Returns the step of this rank, by which a failure that repeats is recognised."""

    def run(self, attempt: Callable[[SocketMesh], Result]) -> Result:
        """Return what `attempt` returns in the end.

        Raises:
            RepeatedFailureError: this rank has failed in the same step with the same error as its predecessor.
            RankLostError: a lost rank was not replaced in time.
        """
        generation = 0
        while True:
            mesh = self._form(generation)
            generation, self._size = mesh.generation, mesh.size
            with closing(mesh):
                try:
                    return attempt(mesh)
                except RankLostError as lost:
                    # The mesh has told the others who was lost.
                    self._note(mesh, lost)
                except BaseException as error:
                    mesh.fail(f"{type(error).__name__}: {error}")
                    self._raise_if_repeated(error)
                    raise

    def _note(self, mesh: SocketMesh, lost: RankLostError) -> None:
        self._lost_at, self._lost_in = self._clock(), self.step()
        self.failovers += 1
        known = 0 <= lost.rank < len(mesh.members)
        who = f" ({mesh.members[lost.rank]})" if known else ""
        _log.warning("%s%s; dropping the unfinished step and forming the run again", lost, who)
        self._on_failover(self.failovers)

    def _raise_if_repeated(self, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, RunInterruptedError | FencedError):
            return
        step = self.step() + 1
        if self._record.is_repeated(step, error):
            raise RepeatedFailureError(
                f"this rank has failed in step {step} with the same error as the time before, so another restart would not help: "
                f"{type(error).__name__}: {error}"
            ) from error

    def continued(self, step: int) -> None:
        """Log that the run continues from `step`. Called when all of it is restored."""
        if self._lost_at is None:
            return
        seconds, self._lost_at = self._clock() - self._lost_at, None
        again = max(0, self._lost_in - step)
        redone = (
            f"; {again} {'step' if again == 1 else 'steps'} made before the loss will be made again" if again else ""
        )
        ranks = f"{self._size} {'rank' if self._size == 1 else 'ranks'}"
        _log.warning("continuing from step %d with %s, %.1f s after the loss%s", step, ranks, seconds, redone)


class _Continued(Hook):
    def __init__(self, recovery: RankRecovery) -> None:
        self._recovery = recovery

    def after_start(self, trainer: Trainer) -> None:
        self._recovery.continued(trainer.step)
