"""Control of a run through files, as the original names it: `monolith_action` and `monolith_action_response`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from monolith.errors import InvalidArgumentError, MonolithError, RankLostError, RanksDisagreeError
from monolith.state.storage import open_folder
from monolith.train.control import Controller
from monolith.train.distributed.barrier import STOP, BarrierHook, WorkerBarrier
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["ACTION_FILE", "QueryActionHook", "RESPONSE_FILE", "StopHelper"]

ACTION_FILE = "monolith_action"
"""The file by which an operator asks for something: `action: TRIGGER_SAVE` or `action: STOP`."""
RESPONSE_FILE = "monolith_action_response"
"""The file with what came of it: `OK` or an error."""
_ACTION = re.compile(r"\s*action\s*:\s*(?:(?P<save>TRIGGER_SAVE|1)|(?P<stop>STOP|2))\s*")
_log = logging.getLogger(__name__)


class StopHelper:
    """Ends a run in all workers: the chief calls `trigger_stop`, every other worker has `create_stop_hook`.

    Example:
        >>> from monolith.train.distributed.barrier import LocalBarrier
        >>> helper = StopHelper(LocalBarrier(2))
        >>> hook = helper.create_stop_hook(index=1)
    """

    def __init__(self, barrier: WorkerBarrier) -> None:
        self._barrier = barrier

    def trigger_stop(self, trainer: Trainer) -> None:
        """In the chief: end the run in all workers, each before its next step."""
        if self._barrier.capacity > 1:
            self._barrier.place(STOP)
        trainer.request_stop("the run was asked to stop")

    def create_stop_hook(self, index: int) -> Hook:
        """Return the hook of worker `index`, which is not the chief."""
        return BarrierHook(self._barrier, index=index)


class QueryActionHook(Hook):
    """In the chief: does what the file `monolith_action` of the model_dir asks for, and answers in another file.

    `action: TRIGGER_SAVE` (or 1) saves a checkpoint, `action: STOP` (or 2) ends the run in all workers. The request is removed
    when it is done, and `monolith_action_response` has `OK` or the error. An error ends nothing. `monolith control` does the same
    and more without a file.

    Args:
        model_dir: where the files are. None: the model_dir of the run, which only its chief has.
        poll_seconds: seconds between two looks, made after a step.
        clock: seconds.

    Example:
        >>> hook = QueryActionHook(poll_seconds=10)
    """

    def __init__(
        self,
        model_dir: str | None = None,
        *,
        poll_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_dir, self._poll_seconds, self._clock = model_dir, poll_seconds, clock
        self._next = 0.0

    def after_start(self, trainer: Trainer) -> None:
        """Begin to look."""
        self._next = self._clock()

    def before_step(self, trainer: Trainer) -> None:
        """Look for a request, if it is time."""
        self._look(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Look for a request, if it is time."""
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        folder = self._model_dir or trainer.config.model_dir
        if folder is None or self._clock() < self._next:
            return
        self._next = self._clock() + self._poll_seconds
        home = open_folder(folder)
        if home.size(ACTION_FILE) is None:
            return
        text = home.read(ACTION_FILE).decode(errors="replace")
        try:
            self._do(trainer, text)
        except (RankLostError, RanksDisagreeError):
            raise
        except MonolithError as error:
            _log.error("%s of %s failed: %s", ACTION_FILE, folder, error)
            answer = f"{type(error).__name__}: {error}"
        else:
            answer = "OK"
        home.write(RESPONSE_FILE, answer.encode())
        home.remove(ACTION_FILE)

    def _do(self, trainer: Trainer, text: str) -> None:
        asked = _ACTION.fullmatch(text)
        if asked is None:
            raise InvalidArgumentError(
                f"{ACTION_FILE}: expected 'action: TRIGGER_SAVE' or 'action: STOP', got {text!r}"
            )
        # The run's own knows its other workers. A plain trainer has neither.
        controller = next((hook for hook in trainer.hooks if isinstance(hook, Controller)), None)
        if controller is None:
            controller = Controller(trainer)
            controller.begin(trainer)
        if asked["save"]:
            controller.save()
        else:
            controller.end_run()
