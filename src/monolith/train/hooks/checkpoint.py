"""Save while a model trains: every so often, when asked, and at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from monolith.errors import InvalidArgumentError, SaveInterruptedError
from monolith.process_bound import WorkerThreads
from monolith.train.config import get_metric_prefix
from monolith.train.hooks.hook import CheckpointSaverListener, Hook
from monolith.train.hooks.tide import SecondOrStepTimerWithTideSetting

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["NoFirstSaveCheckpointSaverHook", "PendingSave", "TrainerSaver", "log_metric"]

ATTEMPTS = 2
"""How often a save is tried before it counts as failed."""
INTERRUPTIONS = 10
"""How often a save is begun again because a server was restarted. A server may die of saving, so there is a limit."""

MetricSink = Callable[[str, float, Mapping[str, str]], None]
"""Called with name, value and tags."""

_log = logging.getLogger(__name__)


class PendingSave(Protocol):
    """A save whose content is decided and which is not written yet."""

    def finish(self) -> str:
        """Write it, on any thread. Returns its path once it is durable. An `OSError` means that it may be tried again."""

    def hurry(self) -> None:
        """Write at full speed from now on, because a caller waits."""


class TrainerSaver(Protocol):
    """What a hook saves with."""

    @property
    def mode(self) -> Literal["full", "dense_only"]:
        """What is saved: everything, or everything but the tables."""

    def is_saved(self, trainer: Trainer) -> bool:
        """Return whether the current state of the trainer has been saved, by whichever hook."""

    def prepare(self) -> Future[Any] | None:
        """Begin what should be done before the state is taken, while training continues. Returns None if there is nothing."""

    def begin(self, trainer: Trainer) -> PendingSave:
        """Take the state as it is now, between two steps. Waits for what `prepare` began, and raises its error."""


def log_metric(name: str, value: float, tags: Mapping[str, str]) -> None:
    """Write a metric to Python's log at level DEBUG, under the prefix of this process (`get_metric_prefix`).

    Example:
        >>> log_metric("save_checkpoint", 1, {"mode": "full"})
    """
    _log.debug("%s.%s %s = %g", get_metric_prefix(), name, dict(tags), value)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    step: int
    failures: int
    """Of this save, before this attempt."""
    interruptions: int
    started: float
    written: Future[str]
    hurry: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A save that another thread waits for."""

    ignore_errors: bool
    result: Future[str | None]

    def fail(self, error: OSError) -> None:
        if self.ignore_errors:
            _log.error("a requested save failed, training continues: %s", error)
            self.result.set_result(None)
        else:
            self.result.set_exception(error)


class NoFirstSaveCheckpointSaverHook(Hook):
    """Saves every `save_secs` seconds or `save_steps` steps, when `trigger_save` is called, and when the run ends.

    A save takes the state between two steps and is written on a thread while training continues, one at a time. It is tried
    again once after an `OSError`. A second one ends the run, or with `ignore_save_errors` is logged. A server that was restarted
    meanwhile does not count as an error, up to ten times, because servers come back. A state that has been saved is not saved
    again, so a dense-only save is skipped at a step with a full one.

    At the end of a run that failed, what is being written is finished and nothing new is saved.

    Args:
        saver: takes and writes the state.
        save_secs: seconds between two saves. Give this or `save_steps`, or neither to save only when asked and at the end.
        save_steps: steps between two saves.
        no_first_save: do not save at the start of a run, before its first step.
        listeners: see `CheckpointSaverListener`.
        guard_listeners: called before the first and after the last attempt of a save, even if all fail.
        ignore_save_errors: continue training without the save.
        background: False writes before the next step.
        on_metric: called with "save_checkpoint" (1) and "save_checkpoint_time" (seconds), tagged with the mode, after each save.
        clock: seconds since 1970.
        tide: settings of the window of `SecondOrStepTimerWithTideSetting`: `tide_start_hour` and so on.

    Example:
        >>> from monolith.train import RunConfig, Trainer
        >>> config = RunConfig(save_checkpoints_steps=1000)         # the trainer has such a hook by itself, with a model_dir
    """

    def __init__(
        self,
        saver: TrainerSaver,
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        no_first_save: bool = True,
        listeners: Sequence[CheckpointSaverListener] = (),
        guard_listeners: Sequence[CheckpointSaverListener] = (),
        ignore_save_errors: bool = False,
        background: bool = True,
        on_metric: MetricSink = log_metric,
        clock: Callable[[], float] = time.time,
        tide: Mapping[str, int | None] | None = None,
    ) -> None:
        self.timer: SecondOrStepTimerWithTideSetting | None = None
        if save_secs is not None or save_steps is not None:
            settings = {name: value for name, value in (tide or {}).items() if value is not None}
            self.timer = SecondOrStepTimerWithTideSetting(
                every_secs=save_secs, every_steps=save_steps, clock=clock, **settings
            )
        self._saver, self._no_first_save = saver, no_first_save
        self._listeners, self._guards = tuple(listeners), tuple(guard_listeners)
        self._ignore_save_errors, self._background = ignore_save_errors, background
        self._on_metric, self._clock = on_metric, clock
        self._running: _Attempt | None = None
        self._threads: WorkerThreads | None = None
        self._requests: list[_Request] = []
        self._path: str | None = None
        self._training_thread: int | None = None
        self._lock = threading.Lock()

    def after_start(self, trainer: Trainer) -> None:
        """Begin to count, and save unless `no_first_save` is set."""
        self._training_thread = threading.get_ident()
        for listener in (*self._guards, *self._listeners):
            listener.begin(trainer)
        if self.timer is not None:
            self.timer.reset()
            self.timer.update_last_triggered_step(trainer.step)
        if not self._no_first_save:
            self._save(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """As after a step: a state that is not saved becomes due by time although no step follows."""
        self.after_step(trainer, None)

    def after_step(self, trainer: Trainer, result: StepResult | None) -> None:
        """Check the save that is being written, and start one that is due or requested."""
        self._advance(trainer)
        self._serve_requests(trainer)
        if self._running is None and self.timer is not None and self.timer.should_trigger_for_step(trainer.step):
            preparing = self._saver.prepare() if self._background else None
            # It stays due: the step at which everything is ready is the one that is saved.
            if preparing is not None and not preparing.done():
                return
            self._start(trainer)
            if not self._background:
                self._advance(trainer, wait=True)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Finish what is being written. After a run that did not fail, save the state it ended in."""
        try:
            if error is not None:
                self._finish_after(error, trainer)
                return
            self._advance(trainer, wait=True)
            self._serve_requests(trainer)
            if self._saver.mode == "full":
                self._save(trainer)
            for listener in self._listeners:
                listener.end(trainer, trainer.step)
        finally:
            self._training_thread = None
            self._refuse_requests()
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None

    def trigger_save(
        self, trainer: Trainer, *, ignore_save_errors: bool = False, timeout: float | None = None
    ) -> str | None:
        """Save now. Returns the path of the newest save once it is durable.

        In the training thread, for example in a hook, it is done at once. Any other thread waits until the current step is over.

        Args:
            trainer: the one that is saved.
            ignore_save_errors: log a save that failed twice and return None. Otherwise its error is raised here, whatever the
                hook does about its own saves.
            timeout: seconds that another thread than the training thread waits.
        """
        request = _Request(ignore_errors=ignore_save_errors, result=Future())
        if threading.get_ident() == self._training_thread or self._training_thread is None:
            self._serve([request], trainer)
        else:
            with self._lock:
                self._requests.append(request)
        return request.result.result(timeout)

    def _save_loudly(self, trainer: Trainer) -> None:
        quiet, self._ignore_save_errors = self._ignore_save_errors, False
        try:
            self._advance(trainer, wait=True)
            self._save(trainer)
        finally:
            self._ignore_save_errors = quiet

    def _serve_requests(self, trainer: Trainer) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        if requests:
            self._serve(requests, trainer)

    def _serve(self, requests: Sequence[_Request], trainer: Trainer) -> None:
        try:
            self._save_loudly(trainer)
        except OSError as error:
            # For those who asked to deal with.
            for request in requests:
                request.fail(error)
            return
        except BaseException as error:
            for request in requests:
                request.result.set_exception(error)
            raise
        for request in requests:
            request.result.set_result(self._path)

    def _refuse_requests(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            request.result.set_exception(InvalidArgumentError("trigger_save: the run has ended without this save"))

    def _save(self, trainer: Trainer) -> None:
        self._start(trainer)
        self._advance(trainer, wait=True)

    def _start(self, trainer: Trainer) -> None:
        if self.timer is not None:
            self.timer.update_last_triggered_step(trainer.step)
        if self._saver.is_saved(trainer):
            return
        for guard in self._guards:
            _call_guard(guard.before_save, trainer, trainer.step)
        self._attempt(trainer)

    def _attempt(self, trainer: Trainer, *, failures: int = 0, interruptions: int = 0) -> None:
        for guard in self._guards:
            _call_guard(guard.before_cut, trainer, trainer.step)
        step, started = trainer.step, self._clock()
        try:
            for listener in self._listeners:
                listener.before_save(trainer, step)
            pending = self._saver.begin(trainer)
            for listener in self._listeners:
                listener.after_cut(trainer, step)
            written, hurry = self._pool().submit(pending.finish), pending.hurry
        except OSError as error:
            written, hurry = Future(), _do_nothing
            written.set_exception(error)
        except BaseException:
            self._release_guards(trainer, step)
            raise
        for guard in reversed(self._guards):
            _call_guard(guard.after_cut, trainer, step)
        self._running = _Attempt(
            step=step,
            failures=failures,
            interruptions=interruptions,
            started=started,
            written=written,
            hurry=hurry,
        )

    def _advance(self, trainer: Trainer, *, wait: bool = False) -> None:
        """Take the result of the save that is being written, if it has ended, and try again if it failed."""
        while self._running is not None and (wait or self._running.written.done()):
            done, self._running = self._running, None
            if wait:
                done.hurry()
            try:
                path = done.written.result()
                for listener in self._listeners:
                    listener.after_save(trainer, done.step)
            except OSError as error:
                interrupted = isinstance(error, SaveInterruptedError)
                failures, interruptions = done.failures + (not interrupted), done.interruptions + interrupted
                if failures < ATTEMPTS and interruptions < INTERRUPTIONS:
                    _log.warning("saving step %d failed, trying again: %s", done.step, error)
                    self._attempt(trainer, failures=failures, interruptions=interruptions)
                    continue
                self._release_guards(trainer, done.step)
                if not self._ignore_save_errors:
                    raise
                _log.error(
                    "saving step %d failed %d times, training goes on: %s", done.step, failures + interruptions, error
                )
            except BaseException:
                self._release_guards(trainer, done.step)
                raise
            else:
                self._release_guards(trainer, done.step)
                self._path = path
                self._report(done)

    def _report(self, done: _Attempt) -> None:
        tags = {"mode": self._saver.mode}
        _log.info("saved step %d as %s", done.step, self._path)
        self._on_metric("save_checkpoint", 1, tags)
        self._on_metric("save_checkpoint_time", self._clock() - done.started, tags)

    def _finish_after(self, error: BaseException, trainer: Trainer) -> None:
        """After a run has failed, let what is being written end, and keep its error from hiding that of the run."""
        done, self._running = self._running, None
        if done is None:
            return
        done.hurry()
        failure = done.written.exception()
        if failure is not None:
            _log.error("saving step %d failed as well: %s", done.step, failure)
        self._release_guards(trainer, done.step)

    def _release_guards(self, trainer: Trainer, step: int) -> None:
        for guard in reversed(self._guards):
            _call_guard(guard.after_save, trainer, step)

    def _pool(self) -> WorkerThreads:
        if self._threads is None:
            self._threads = WorkerThreads(1, thread_name_prefix="monolith-save")
        return self._threads


def _do_nothing() -> None:
    pass


def _call_guard(moment: Callable[[Trainer, int], None], trainer: Trainer, step: int) -> None:
    try:
        moment(trainer, step)
    except Exception:
        _log.exception("a guard listener failed at step %d", step)
