"""Which segments of a log were removed by retention, so that a missing one that was not is known to be lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import ConfigError, CorruptFileError, StorageError

__all__ = ["PRUNED", "add_pruned", "read_pruned"]

PRUNED = "pruned.json"
"""Its name in the folder of the log."""

_Sequence = Annotated[int, Field(ge=1, lt=2**63)]


class _Pruned(Config):
    format: Literal["monolith-log-pruned"] = "monolith-log-pruned"
    version: Literal[1] = 1
    ranges: tuple[tuple[_Sequence, _Sequence], ...] = ()
    """First and last sequence number."""


class PrunedNumbers:
    """Sequence numbers in ranges: `number in numbers`."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = tuple(ranges)

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self._ranges)

    def with_more(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The ranges of these numbers and those."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, *((number, number) for number in numbers)]):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return tuple(joined)


def read_pruned(folder: Path) -> PrunedNumbers:
    """The sequence numbers that retention has removed from the log in `folder`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     add_pruned(Path(folder), [1, 2, 3, 7])
        ...     [number for number in range(9) if number in read_pruned(Path(folder))]
        [1, 2, 3, 7]
    """
    path = folder / PRUNED
    try:
        return PrunedNumbers(_Pruned.from_json(path.read_text()).ranges)
    except FileNotFoundError:
        return PrunedNumbers()
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: {error}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def add_pruned(folder: Path, numbers: Collection[int]) -> None:
    """Note, durably, that segments are about to be removed."""
    record = _Pruned(ranges=read_pruned(folder).with_more(numbers))
    try:
        write_durably(folder / PRUNED, record.model_dump_json().encode())
    except OSError as error:
        raise StorageError(f"{folder / PRUNED}: cannot be written: {error.strerror}") from error
