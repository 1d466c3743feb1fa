"""Signals, taken over by the command line only: SIGUSR1 shows what a process is doing, an interrupt ends training in order."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

__all__ = ["add_siguser1_handler", "stop_on_interrupt"]


def add_siguser1_handler(file: TextIO | None = None) -> None:
    """On SIGUSR1 print the stacks of all threads to `file`, stderr by default, then call the handler that was there before.

    It works even while all threads are inside compiled code. Calling it again is harmless.
    """
    stream = file or sys.__stderr__
    if stream is None:  # a process without a terminal or log has nowhere to print to
        return
    previous = signal.getsignal(signal.SIGUSR1)
    # A handler set since an earlier call has taken our place, which faulthandler does not notice: start over.
    faulthandler.unregister(signal.SIGUSR1)
    if previous is not None:
        signal.signal(signal.SIGUSR1, previous)
    # Chaining to the default action would end the process.
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=callable(previous))


@contextmanager
def stop_on_interrupt(request_stop: Callable[[str], None]) -> Iterator[list[str]]:
    """Within the block, the first SIGINT or SIGTERM asks to stop after the running step; a second one acts as always.

    Gives a list that holds the name of the signal once one has come.
    """
    received: list[str] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        request_stop(f"received {received[0]}")
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        restore()
