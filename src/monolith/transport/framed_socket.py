"""`FramedSocket`: frames over a TCP or Unix socket, and through shared memory within a machine.

    hello     of the client: magic "MOPS", version u16, length of the token u16, the token
    welcome   of the server: magic "MOPS", version u16, its verdict on the hello u16 (`Welcome`)
    message   either direction, repeated: length u64, then a frame of that many bytes
    shared    over a Unix socket: length u64 with the highest bit set. The frame is in the sender's half of the shared memory
    memory    over a Unix socket, of the client: size u64 with the second highest bit set, and the descriptor of memory of twice
              that size, one half for each direction (`SharedMemory`)

Everything is little endian. Only one request is in flight on a connection, so that the two ends never write to the same half
of the shared memory at the same time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np

from monolith.transport.frames import MAGIC, PROTOCOL_VERSION, SHARED_FROM

__all__ = [
    "FramedSocket",
    "HELLO",
    "MAX_MESSAGE_BYTES",
    "SHARED_BYTES",
    "SharedMemory",
    "TooLongError",
    "Welcome",
    "hello",
    "local_name",
    "make_shared_memory",
]

SHARED_BYTES = 2**22
"""Bytes of shared memory for each direction. Only what is used takes memory. Larger frames go through the socket."""
MAX_SHARED_BYTES = 2**28


class SharedMemory:
    """Memory that both ends of a connection within a machine see: a half of `size` bytes for each direction.

    The other end may write to `incoming` at any moment: copy values that are checked before they are used.
    """

    def __init__(self, descriptor: int, size: int, *, made_here: bool) -> None:
        """Map the memory, after which the descriptor can be closed. Raises `ValueError` if its size is wrong or not sealed."""
        if not 0 < size <= MAX_SHARED_BYTES or os.fstat(descriptor).st_size != 2 * size:
            raise ValueError(f"shared memory: expected 2 x {size:,} bytes, got {os.fstat(descriptor).st_size:,}")
        # Reading memory that has shrunk kills the process by a signal.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise ValueError("shared memory that could change its size")
        memory = mmap.mmap(descriptor, 2 * size)
        halves = [np.frombuffer(memory, dtype=np.uint8, count=size, offset=at) for at in (0, size)]
        self.outgoing, self.incoming = halves if made_here else halves[::-1]
        """What this end writes and what it reads."""
        self.incoming.flags.writeable = False

    def put(self, parts: Sequence[np.ndarray]) -> None:
        """Write the parts in order. Parts that are in this memory already are not copied."""
        at = 0
        for part in parts:
            if part.base is not self.outgoing:
                self.outgoing[at : at + len(part)] = part
            at += len(part)

    def is_incoming(self, data: np.ndarray) -> bool:
        """Whether `data` is a view of this memory, not a copy."""
        return data.base is self.incoming


def make_shared_memory(size: int = SHARED_BYTES) -> tuple[SharedMemory, int] | None:
    """Return new memory and the descriptor to pass to the other end, or None if the system has no such memory.

    Example:
        >>> import sys
        >>> (make_shared_memory(4096) is not None) == (sys.platform == "linux")
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
        return SharedMemory(descriptor, size, made_here=True), descriptor
    except OSError:
        os.close(descriptor)
        return None


def _seals() -> int:
    # Looked up when used: systems other than Linux lack the names.
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


HELLO = struct.Struct(f"<{len(MAGIC)}sHH")
"""The fixed part of hello and welcome."""
MAX_MESSAGE_BYTES = 2**31
"""No message is longer, whatever the configured limits."""

_LENGTH = struct.Struct("<Q")
_SHARED, _MEMORY_FOLLOWS = 2**63, 2**62
_TIMEOUT = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SKIPPED_AT_ONCE = 2**16
_SEND_BUFFER = 2**21


class Welcome(IntEnum):
    """The verdict of a server on a hello."""

    ACCEPTED = 0
    WRONG_TOKEN = 1
    TOO_MANY_STREAMS = 2
    OTHER_VERSION = 3


class TooLongError(Exception):
    """A message was longer than allowed and has been skipped. `head` holds its first bytes."""

    def __init__(self, size: int, head: np.ndarray) -> None:
        super().__init__(size)
        self.size, self.head = size, head


class NoMemoryError(TooLongError):
    """There was no memory for a message, which has been skipped. `head` holds its first bytes."""


def peer_uid(connected: socket.socket) -> int | None:
    """Return the user id of the other end of a Unix socket. None over TCP, and where the system does not say."""
    if connected.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def local_name(host: str, port: int) -> str | None:
    """Return the Unix socket on which a server of `host` and `port` also listens for its own machine. None outside Linux.

    It is in the abstract namespace, so there is no file to clean up. It takes less CPU time on both ends than TCP.
    """
    return f"\0monolith-frames/{host}:{port}" if sys.platform == "linux" else None


def hello(token: str | None) -> bytes:
    """Return the first bytes that a client sends."""
    words = (token or "").encode()
    return HELLO.pack(MAGIC, PROTOCOL_VERSION, len(words)) + words


class FramedSocket:
    """A connected socket. Errors are those of sockets: `TimeoutError`, `ConnectionError`, other `OSError`."""

    def __init__(self, connected: socket.socket, *, offers_memory: bool = False, accepts_memory: bool = False) -> None:
        """Wrap `connected`. Within a machine it may offer shared memory to the other end, or accept what the other end offers."""
        self._socket = connected
        self.is_local = is_local = connected.family == socket.AF_UNIX
        """Whether the other end is a process of this machine, connected by a Unix socket."""
        self._offers_memory, self._accepts_memory = offers_memory and is_local, accepts_memory and is_local
        self.shared: SharedMemory | None = None
        """Shared memory for large frames, once it is needed."""
        self._limits: dict[int, float] = {}
        # A store that is dropped without `close` closes its connections silently, as with Flight. Not in __del__: in a cycle of
        # objects the socket may be collected first, with a ResourceWarning.
        self._closed = weakref.finalize(self, connected.close)
        # The kernel applies time limits: a Python socket with a timeout makes two system calls for each read or write.
        connected.settimeout(None)
        if is_local:
            # The buffer should hold a message: both ends wait for each other whenever it is full. TCP tunes its own.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts: bytes | np.ndarray, deadline: float | None = None) -> None:
        """Send the parts in order."""
        left = [memoryview(part if isinstance(part, bytes) else part.data) for part in parts]
        while left:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                continue  # the kernel's limit has passed: `_limit` checks the deadline
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def send_frame(self, *parts: np.ndarray, deadline: float | None = None) -> None:
        """Send one message, the bytes of all `parts`."""
        size = sum(map(len, parts))
        shared = self._memory_for(size, deadline)
        if shared is None:
            self.send(_LENGTH.pack(size), *parts, deadline=deadline)
        else:
            shared.put(parts)
            self.send(_LENGTH.pack(_SHARED | size), deadline=deadline)

    def receive(self, size: int, *, deadline: float | None = None) -> np.ndarray:
        """Return the next `size` bytes in memory of their own. Raises `ConnectionError` if the stream ends before."""
        # Memory is touched only as bytes arrive, so a peer that announces much and sends little costs little.
        data = np.empty(size, dtype=np.uint8)
        at = 0
        while at < size:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._socket.recv_into(data[at:].data, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if got == 0:
                raise ConnectionResetError("the peer has closed the stream")
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
        """Return the next message. One of more than `max_bytes` is skipped with `TooLongError`.

        It is in memory of its own, or a view of the shared memory that is valid until the next message is sent.

        Args:
            max_bytes: the longest message to accept.
            deadline: when the message must have begun, and must be complete if there is no `finish_by`.
            finish_by: returns the deadline for a message of so many bytes, called when it begins.
            take: whether there is memory for a message of so many bytes. If not, it is skipped with `NoMemoryError`.
        """
        size = self._receive_length(deadline)
        if finish_by is not None:
            deadline = finish_by(min(size, MAX_MESSAGE_BYTES))
        if size & _SHARED:
            return self._found_in_memory(size ^ _SHARED, max_bytes, take)
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionAbortedError(f"a message claims {size:,} bytes")
        fits = size <= max_bytes
        if fits and take(size):
            return self.receive(size, deadline=deadline)
        head = self.receive(min(size, _SKIPPED_AT_ONCE), deadline=deadline)
        for left in range(size - len(head), 0, -_SKIPPED_AT_ONCE):
            self.receive(min(left, _SKIPPED_AT_ONCE), deadline=deadline)
        raise (NoMemoryError if fits else TooLongError)(size, head)

    def _memory_for(self, size: int, deadline: float | None) -> SharedMemory | None:
        if size < SHARED_FROM:
            return None
        if self._offers_memory and self.shared is None:
            self._offers_memory = False
            made = make_shared_memory()
            if made is not None:
                self.shared, descriptor = made
                try:
                    word = _LENGTH.pack(_MEMORY_FOLLOWS | len(self.shared.outgoing))
                    self._limit(socket.SO_SNDTIMEO, deadline)
                    socket.send_fds(self._socket, [word], [descriptor])
                finally:
                    os.close(descriptor)
        return None if self.shared is None or size > len(self.shared.outgoing) else self.shared

    def _found_in_memory(self, size: int, max_bytes: int, take: Callable[[int], bool]) -> np.ndarray:
        if self.shared is None or size > len(self.shared.incoming):
            raise ConnectionAbortedError(
                f"a message of {size:,} bytes is said to be in shared memory that does not hold it"
            )
        if size > max_bytes:
            raise TooLongError(size, self.shared.incoming[:_SKIPPED_AT_ONCE].copy())
        if not take(size):
            raise NoMemoryError(size, self.shared.incoming[:_SKIPPED_AT_ONCE].copy())
        return self.shared.incoming[:size]

    def _receive_length(self, deadline: float | None) -> int:
        if self._accepts_memory and self.shared is None:
            size = self._length_or_memory(deadline)
            if size is not None:
                return size
        return self._length(self.receive(_LENGTH.size, deadline=deadline).tobytes())

    def _length(self, word: bytes) -> int:
        (size,) = _LENGTH.unpack(word)
        if size & _MEMORY_FOLLOWS and not size & _SHARED:
            raise ConnectionAbortedError("shared memory was offered where none is accepted")
        return int(size)

    def _length_or_memory(self, deadline: float | None) -> int | None:
        """Return the length of the next message, or None if shared memory came instead."""
        word, descriptors = self._receive_with_descriptors(deadline)
        try:
            (size,) = _LENGTH.unpack(word)
            if not descriptors or size & _SHARED or not size & _MEMORY_FOLLOWS:
                return self._length(word)
            self.shared = SharedMemory(descriptors[0], size ^ _MEMORY_FOLLOWS, made_here=False)
            return None
        except (OSError, ValueError) as error:
            raise ConnectionAbortedError(f"cannot use the shared memory of the peer: {error}") from None
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
            raise ConnectionResetError("the peer has closed the stream")
        if len(word) == _LENGTH.size:
            return word, descriptors
        try:
            return word + self.receive(_LENGTH.size - len(word), deadline=deadline).tobytes(), descriptors
        except BaseException:
            # A peer that sends a descriptor and half a length must not leak it here.
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    @property
    def peer_uid(self) -> int | None:
        """The user id of the other end, as of the function of this name."""
        return peer_uid(self._socket)

    def is_readable(self) -> bool:
        """Whether bytes have arrived or the peer has closed the connection."""
        with suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return True
        return False

    def wait_readable(self, timeout: float) -> bool:
        """Wait until `is_readable`. Returns whether that happened in time."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * timeout))

    def stop_receiving(self) -> None:
        """Let a thread that waits for bytes see the end of the stream. Sending continues."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def detach(self) -> socket.socket:
        """Return the socket, which the caller has to close. This object can no longer be used."""
        self._closed.detach()
        return self._socket

    def let_go(self) -> None:
        """Close the copy of a forked child. The connection stays open in the parent."""
        self._closed()

    def close(self) -> None:
        """Close the connection. A thread that sends or receives gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._closed()

    def _limit(self, option: int, deadline: float | None) -> None:
        """Let the kernel wait until `deadline` at most. It may return a little earlier."""
        if deadline is None:
            if self._limits.pop(option, None) is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(0, 0))
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        # Most calls have about as much time left as the one before, which needs no system call.
        if not 0.9 * left <= self._limits.get(option, 0.0) <= left:
            self._limits[option] = left
            # 0 would mean no limit at all.
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(int(left), max(1, int(left % 1 * 1e6))))
