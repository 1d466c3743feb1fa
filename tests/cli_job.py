"""A model and data that the tests of the command line name as `cli_job:Model`."""

from __future__ import annotations

from collections.abc import Iterable

from monolith.errors import SchemaError
from monolith.features.batch import Batch
from training import ClickModel, Stream, batch_of


class Model(ClickModel):
    """Brings its own data."""

    def __init__(self, seed: int = 0, batches: int = 50) -> None:
        super().__init__(seed)
        self.batches = batches

    def input_fn(self, mode: str) -> Iterable[Batch]:
        return Stream(self.batches if mode == "train" else 3)


def batches(mode: str, *, first: int = 0) -> Iterable[Batch]:
    return [batch_of(number) for number in range(first, first + 5)]


def broken(mode: str) -> Iterable[Batch]:
    return [{name: column for name, column in batch_of(0).items() if name != "clicked"}]


def nothing(mode: str) -> None:
    """A function that forgets to return its batches."""


def misread(mode: str) -> Iterable[Batch]:
    """A source with the wrong delimiter."""
    raise SchemaError("clicks.csv: its first line 'user;item' has no ',': give delimiter=';'")
