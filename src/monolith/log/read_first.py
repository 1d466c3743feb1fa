"""Reading a cut before it is written, as far as there is room for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["read_first"]

Piece = TypeVar("Piece")


def read_first(pieces: Iterable[Piece], room: int, size: Callable[[Piece], int]) -> Iterator[Piece]:
    """The same pieces, of which as many are made ahead as `room` has place for by their `size`.

    While a row of a cut is unread, whoever changes it must save a copy of it first. So a writer that takes its time should not
    let the rows wait for it.

    Example:
        >>> made = []
        >>> pieces = (made.append(name) or name for name in ["aa", "bbb", "c", "dd"])
        >>> next(read_first(pieces, 5, len)), made
        ('aa', ['aa', 'bbb', 'c'])
    """
    ahead: deque[Piece] = deque()
    held = 0
    for piece in pieces:
        ahead.append(piece)
        held += size(piece)
        while held > room:
            held -= size(ahead[0])
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()
