"""One element of look-ahead, to know which one is the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from monolith.errors import InvalidArgumentError

__all__ = ["CacheOneDataset"]

T = TypeVar("T")


class CacheOneDataset(Generic[T]):
    """The elements of a source, each with whether it is the last one.

    The state is that of the source behind the last element handed out: the one looked ahead at is read again.

    Example:
        >>> list(CacheOneDataset([1, 2, 3]))
        [(1, False), (2, False), (3, True)]
        >>> list(CacheOneDataset([]))
        []
    """

    def __init__(self, source: Iterable[T]) -> None:
        self._source = source
        self._ahead: tuple[T, Any] | None = None
        """The element that was looked at and not handed out, and the source's state behind it."""
        self._state: Any = None
        """The source's state behind the last element handed out; None: where the source is."""

    def __iter__(self) -> Iterator[tuple[T, bool]]:
        """Go on after the last element handed out."""
        for element in self._source:
            held, self._ahead = self._ahead, (element, self._place())
            if held is not None:
                yield self._handed_out(held), False
        if self._ahead is not None:
            held, self._ahead = self._ahead, None
            yield self._handed_out(held), True
        self._state = None

    def _handed_out(self, held: tuple[T, Any]) -> T:
        element, self._state = held
        return element

    def state_dict(self) -> dict[str, Any]:
        """The source's state behind the last element handed out."""
        state = self._place() if self._state is None else self._state
        if state is None:
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        if not hasattr(self._source, "load_state_dict"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        self._source.load_state_dict(state)
        self._ahead = self._state = None

    def _place(self) -> Any:  # noqa: ANN401 - the source's own
        return self._source.state_dict() if hasattr(self._source, "state_dict") else None
