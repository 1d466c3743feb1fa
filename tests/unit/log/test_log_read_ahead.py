"""Danger: a cut that is read ahead loses chunks, reorders them, or fills the memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monolith.log.commit import read_ahead

SIZES = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("room", [0, 1, 5, 12, 31, 100])
def test_pieces_come_in_order_and_never_more_than_there_is_room_for_are_ahead(room: int) -> None:
    made: list[int] = []

    def pieces() -> Iterator[int]:
        for size in SIZES:
            made.append(size)
            yield size

    for place, size in enumerate(read_ahead(pieces(), room, int)):
        assert size == SIZES[place]
        ahead = made[place + 1 :]
        assert sum(ahead[:-1]) <= room  # the last one is what did not fit
        # Whatever else there is did not fit.
        rest = SIZES[len(made) :]
        assert not rest or sum(SIZES[place : len(made)]) > room
    assert made == SIZES


def test_an_error_of_the_reader_arrives() -> None:
    def pieces() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(read_ahead(pieces(), 100, int))
