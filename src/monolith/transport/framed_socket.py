"""Frames over a socket: what both ends of the socket transport do.

    hello     of the client: magic "MOPS", version u16, length of the token u16, the token
    welcome   of the server: magic "MOPS", version u16, what it says to the hello u16 (`Welcome`)
    message   either way, any number: length u64, then a frame of that many bytes
    shared    over a Unix socket, instead: length u64 with the highest bit set; the frame is in the sender's shared room
    room      over a Unix socket, of the client: size u64 with the second highest bit set, and the descriptor of memory of twice
              that size: the rooms of the client and of the server (`SharedRoom`)

Everything is little endian.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import numpy as np

from monolith.transport.frames import MAGIC, SHARED_FROM, VERSION
from monolith.transport.shared_room import SharedRoom, make_room

__all__ = ["FramedSocket", "HELLO", "MAX_MESSAGE_BYTES", "TooLongError", "Welcome", "hello", "local_name"]

HELLO = struct.Struct(f"<{len(MAGIC)}sHH")
"""The fixed part of hello and welcome."""
MAX_MESSAGE_BYTES = 2**31
"""A longer message is none of ours, whatever the limits are."""

_LENGTH = struct.Struct("<Q")
_SHARED, _ROOM_COMES = 2**63, 2**62
_TIMEOUT = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SKIPPED_AT_ONCE = 2**16
_ROOM = 2**21


class Welcome(IntEnum):
    """What a server says to a hello."""

    COME_IN = 0
    WRONG_TOKEN = 1
    TOO_MANY_STREAMS = 2
    OTHER_VERSION = 3


class TooLongError(Exception):
    """A message was longer than allowed. It has been skipped; `head` is its beginning."""

    def __init__(self, size: int, head: np.ndarray) -> None:
        super().__init__(size)
        self.size, self.head = size, head


class NoRoomError(TooLongError):
    """There was no memory for a message. It has been skipped. `head` is its beginning."""


def peer_uid(connected: socket.socket) -> int | None:
    """The user that the other end of a Unix socket runs as. None over TCP, and where the system does not tell."""
    if connected.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def local_name(host: str, port: int) -> str | None:
    """Where a server that listens on `host` and `port` is found by processes of the same machine, besides; None: nowhere.

    A Unix socket of Linux' abstract kind: it has no file, and goes with its process as a port does. The same bytes take less of
    both processors than over TCP.
    """
    return f"\0monolith-frames/{host}:{port}" if sys.platform == "linux" else None


def hello(token: str | None) -> bytes:
    """What a client begins with."""
    words = (token or "").encode()
    return HELLO.pack(MAGIC, VERSION, len(words)) + words


class FramedSocket:
    """A connected socket. Errors are those of sockets: `TimeoutError`, `ConnectionError`, other `OSError`."""

    def __init__(self, connected: socket.socket, *, makes_room: bool = False, takes_room: bool = False) -> None:
        """`makes_room`: for its large frames, if the other end is on this machine; `takes_room`: that the other end makes."""
        self._socket = connected
        is_local = connected.family == socket.AF_UNIX
        self._makes_room, self._takes_room = makes_room and is_local, takes_room and is_local
        self.room: SharedRoom | None = None
        """Memory that the other end sees too, for large frames."""
        self._limits: dict[int, float] = {}
        # A store that was dropped without `close` lets go of its connections without a word, as with Flight. Not by __del__:
        # of objects in a circle the socket may go first, and complain.
        self._closed = weakref.finalize(self, connected.close)
        # Waiting with a time limit is left to the kernel: a socket of Python with a timeout would ask it twice for each call.
        connected.settimeout(None)
        if is_local:
            # Room for a message: each time it is full, both sides wait for each other. TCP finds out by itself.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts: bytes | np.ndarray, deadline: float | None = None) -> None:
        """Send the parts, one behind the other."""
        left = [memoryview(part if isinstance(part, bytes) else part.data) for part in parts]
        while left:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                continue  # the limit was over; whether the deadline is too is looked up there
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def send_frame(self, *pieces: np.ndarray, deadline: float | None = None) -> None:
        """Send one message, the bytes of all `pieces`."""
        size = sum(map(len, pieces))
        room = self._room_for(size, deadline)
        if room is None:
            self.send(_LENGTH.pack(size), *pieces, deadline=deadline)
        else:
            room.put(pieces)
            self.send(_LENGTH.pack(_SHARED | size), deadline=deadline)

    def receive(self, size: int, *, deadline: float | None = None) -> np.ndarray:
        """The next `size` bytes, in memory that nobody else has; `ConnectionError` if the other side ends before."""
        # Memory is touched only as bytes come in: one who announces much and sends little costs little.
        data = np.empty(size, dtype=np.uint8)
        at = 0
        while at < size:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._socket.recv_into(data[at:].data, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if got == 0:
                raise ConnectionResetError("the other side has closed the stream")
            at += got
        return data

    def receive_frame(
        self,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        deadline: float | None = None,
        finish_by: Callable[[int], float] | None = None,
        take: Callable[[int], bool] = lambda size: True,
    ) -> np.ndarray:
        """The next message, of at most `max_bytes`; a longer one is skipped, and `TooLongError` has its beginning.

        It is in memory of its own, or a view of the shared room, valid until the next message is sent.

        Args:
            max_bytes: what is longer is skipped.
            deadline: when it must have begun; without `finish_by`, when it must be complete.
            finish_by: when a message of so many bytes must be complete, asked when it begins.
            take: whether there is memory for a message of so many bytes; without, it is skipped, and `NoRoomError` has its
                beginning.
        """
        size = self._receive_length(deadline)
        if finish_by is not None:
            deadline = finish_by(min(size, MAX_MESSAGE_BYTES))
        if size & _SHARED:
            return self._found_in_room(size ^ _SHARED, max_bytes, take)
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionAbortedError(f"a message claims {size:,} bytes")
        fits = size <= max_bytes
        if fits and take(size):
            return self.receive(size, deadline=deadline)
        head = self.receive(min(size, _SKIPPED_AT_ONCE), deadline=deadline)
        for left in range(size - len(head), 0, -_SKIPPED_AT_ONCE):
            self.receive(min(left, _SKIPPED_AT_ONCE), deadline=deadline)
        raise (NoRoomError if fits else TooLongError)(size, head)

    def _room_for(self, size: int, deadline: float | None) -> SharedRoom | None:
        if size < SHARED_FROM:
            return None
        if self._makes_room and self.room is None:
            self._makes_room = False
            made = make_room()
            if made is not None:
                self.room, descriptor = made
                try:
                    word = _LENGTH.pack(_ROOM_COMES | len(self.room.outgoing))
                    self._limit(socket.SO_SNDTIMEO, deadline)
                    socket.send_fds(self._socket, [word], [descriptor])
                finally:
                    os.close(descriptor)
        return None if self.room is None or size > len(self.room.outgoing) else self.room

    def _found_in_room(self, size: int, max_bytes: int, take: Callable[[int], bool]) -> np.ndarray:
        if self.room is None or size > len(self.room.incoming):
            raise ConnectionAbortedError(f"a message of {size:,} bytes is said to be in a room that has not got it")
        if size > max_bytes:
            raise TooLongError(size, self.room.incoming[:_SKIPPED_AT_ONCE].copy())
        if not take(size):
            raise NoRoomError(size, self.room.incoming[:_SKIPPED_AT_ONCE].copy())
        return self.room.incoming[:size]

    def _receive_length(self, deadline: float | None) -> int:
        if self._takes_room and self.room is None:
            size = self._length_or_room(deadline)
            if size is not None:
                return size
        return self._length(self.receive(_LENGTH.size, deadline=deadline).tobytes())

    def _length(self, word: bytes) -> int:
        (size,) = _LENGTH.unpack(word)
        if size & _ROOM_COMES and not size & _SHARED:
            raise ConnectionAbortedError("a room was announced where none is taken")
        return int(size)

    def _length_or_room(self, deadline: float | None) -> int | None:
        """The length of the next message, or None: a room came, and is taken."""
        word, descriptors = self._receive_with_descriptors(deadline)
        try:
            (size,) = _LENGTH.unpack(word)
            if not descriptors or size & _SHARED or not size & _ROOM_COMES:
                return self._length(word)
            self.room = SharedRoom(descriptors[0], size ^ _ROOM_COMES, made_here=False)
            return None
        except (OSError, ValueError) as error:
            raise ConnectionAbortedError(f"no room: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive_with_descriptors(self, deadline: float | None) -> tuple[bytes, list[int]]:
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline)
            with suppress(BlockingIOError):
                flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
                word, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1, flags)
                break
        if not word:
            raise ConnectionResetError("the other side has closed the stream")
        try:
            return word + self.receive(_LENGTH.size - len(word), deadline=deadline).tobytes(), descriptors
        except BaseException:
            # Whoever sends a descriptor and half a word must not leave it here.
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    @property
    def peer_uid(self) -> int | None:
        """See the function of this name."""
        return peer_uid(self._socket)

    def is_readable(self) -> bool:
        """Whether bytes have come in, or the other side has closed the connection."""
        with suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return True
        return False

    def stop_receiving(self) -> None:
        """Let a thread that waits for bytes find the end; what is being sent is sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def let_go(self) -> None:
        """Close the copy of a forked child. The connection stays open in the parent."""
        self._closed()

    def close(self) -> None:
        """Close it; a thread that sends or receives gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._closed()

    def _limit(self, option: int, deadline: float | None) -> None:
        """Let the kernel wait until `deadline` at most; it may wake up a little before."""
        if deadline is None:
            if self._limits.pop(option, None) is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(0, 0))
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        # Most calls have the same time left as the one before them: then nothing has to be said.
        if not 0.9 * left <= self._limits.get(option, 0.0) <= left:
            self._limits[option] = left
            # 0 would mean no limit at all.
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(int(left), max(1, int(left % 1 * 1e6))))
