"""The life of hooks: begin, start, end, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["hooks_running"]


@contextmanager
def hooks_running(hooks: Sequence[Hook], trainer: Trainer, start: Callable[[], object]) -> Iterator[None]:
    """Call `begin` of every hook, `start`, `after_start` of every hook; then, after the body, `end` of all that began.

    Example:
        >>> class Diary(Hook):
        ...     def begin(self, trainer): print("begin")
        ...     def end(self, trainer, error): print("end", repr(error))
        >>> from monolith.train import Trainer
        >>> from torch import nn
        >>> with hooks_running([Diary()], Trainer(nn.Identity()), start=lambda: print("start")):
        ...     print("body")
        begin
        start
        body
        end None
    """
    began: list[Hook] = []
    error: BaseException | None = None
    try:
        for hook in hooks:
            hook.begin(trainer)
            began.append(hook)
        start()
        for hook in hooks:
            hook.after_start(trainer)
        yield
    except BaseException as caught:
        # Who lets go of a generator of predictions has seen enough; nothing broke.
        error = None if isinstance(caught, GeneratorExit) else caught
        raise
    finally:
        with ExitStack() as ends:
            for hook in reversed(began):
                ends.callback(hook.end, trainer, error)
