"""Reads the journal that disk_shim.c writes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

HEAD = struct.Struct("=IiqIIQ")


class Op(IntEnum):
    """What happened; disk_shim.c has the same numbers."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    SYNC_FAILED = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    LINK = 10
    MARK = 11
    DUP = 12
    CLOSE = 13
    BLIND = 14


@dataclass(frozen=True, kw_only=True)
class Record:
    """One change of the disk, or one line of standard output (`Op.MARK`)."""

    op: Op
    fd: int
    number: int
    """Offset of a write, length of a truncation, flags of an open, the new descriptor of a dup."""
    path: str
    target: str
    data: bytes


def read_journal(path: Path) -> list[Record]:
    """All records; a last one that is cut off, because the process was killed, is left out."""
    data, place, records = path.read_bytes(), 0, []
    while place + HEAD.size <= len(data):
        op, fd, number, first, second, size = HEAD.unpack_from(data, place)
        begin = place + HEAD.size
        place = begin + first + second + size
        if place > len(data):
            break
        records.append(
            Record(
                op=Op(op),
                fd=fd,
                number=number,
                path=data[begin : begin + first].decode(),
                target=data[begin + first : begin + first + second].decode(),
                data=data[begin + first + second : place],
            )
        )
    return records
