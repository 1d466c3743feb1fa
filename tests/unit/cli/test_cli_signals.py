"""Danger: a debugging signal that kills the process or silences the handler of the program it debugs."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from monolith.cli import add_siguser1_handler
from monolith.cli.train import stop_on_interrupt


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)}
    yield
    faulthandler.unregister(signal.SIGUSR1)
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_the_stack_is_printed_and_the_earlier_handler_called(tmp_path: Path) -> None:
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    with (tmp_path / "stacks").open("w+") as file:
        add_siguser1_handler(file)
        add_siguser1_handler(file)
        signal.raise_signal(signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
        file.seek(0)
        assert "test_the_stack_is_printed" in file.read()


def test_a_handler_set_in_between_is_called_too(tmp_path: Path) -> None:
    called: list[int] = []
    with (tmp_path / "stacks").open("w+") as file:
        add_siguser1_handler(file)
        signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
        add_siguser1_handler(file)
        signal.raise_signal(signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
        file.seek(0)
        assert "test_a_handler_set_in_between" in file.read()


def test_without_an_earlier_handler_the_process_lives_on(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with (tmp_path / "stacks").open("w+") as file:
        add_siguser1_handler(file)
        signal.raise_signal(signal.SIGUSR1)
        file.seek(0)
        assert "test_without_an_earlier_handler" in file.read()


def test_the_first_interrupt_asks_and_the_second_interrupts() -> None:
    asked: list[str] = []
    with stop_on_interrupt(asked.append) as received:
        signal.raise_signal(signal.SIGINT)
        assert asked == ["received SIGINT"]
        assert received == ["SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_on_interrupt(print):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
