"""Memory that both ends of a connection within a machine see: large frames need not go through the kernel.

The client makes it and passes it over the Unix socket. Half of it is for its requests, half for the answers. One request at a
time is under way on a connection: an end writes when it has the word, and the other reads what the next message says is there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

__all__ = ["ROOM_BYTES", "SharedRoom", "make_room"]

ROOM_BYTES = 2**22
"""Of one direction. Only what is used takes memory; larger frames go through the socket."""
MAX_ROOM_BYTES = 2**28


class SharedRoom:
    """The two halves, of `size` bytes each, as one end sees them.

    The other end may write to what is read here, at any moment: whatever must stay as it was checked is copied first.
    """

    def __init__(self, descriptor: int, size: int, *, made_here: bool) -> None:
        """Map the memory; `ValueError` if it is not what the sender must have made of it. The descriptor can be closed then."""
        if not 0 < size <= MAX_ROOM_BYTES or os.fstat(descriptor).st_size != 2 * size:
            raise ValueError(f"shared memory of {os.fstat(descriptor).st_size:,} bytes for two rooms of {size:,}")
        # Memory that could shrink would end whoever reads it, by a signal.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise ValueError("shared memory that could change its size")
        memory = mmap.mmap(descriptor, 2 * size)
        halves = [np.frombuffer(memory, dtype=np.uint8, count=size, offset=at) for at in (0, size)]
        self.outgoing, self.incoming = halves if made_here else halves[::-1]
        """What this end writes, and what it reads."""
        self.incoming.flags.writeable = False

    def put(self, pieces: Sequence[np.ndarray]) -> None:
        """Write the pieces one behind the other; those that were made here stay where they are."""
        at = 0
        for piece in pieces:
            if piece.base is not self.outgoing:
                self.outgoing[at : at + len(piece)] = piece
            at += len(piece)

    def is_incoming(self, data: np.ndarray) -> bool:
        """Whether `data` is here, and not a copy."""
        return data.base is self.incoming


def make_room(size: int = ROOM_BYTES) -> tuple[SharedRoom, int] | None:
    """New rooms, and the descriptor to pass to the other end; None where the system has no such memory.

    Example:
        >>> import sys
        >>> (make_room(4096) is not None) == (sys.platform == "linux")
        True
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("monolith-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, 2 * size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        return SharedRoom(descriptor, size, made_here=True), descriptor
    except OSError:
        os.close(descriptor)
        return None


def _seals() -> int:
    # Looked up when used: other systems than Linux do not even have the names.
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
