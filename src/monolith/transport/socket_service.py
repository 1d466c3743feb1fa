"""The server's side of the socket transport: a thread for each connection, which waits in the kernel most of the time."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from monolith.console import RareWarnings
from monolith.errors import OverloadedError, ProtocolError, UnavailableError
from monolith.process_bound import let_go_in_children
from monolith.transport.frame_calls import FrameCalls
from monolith.transport.framed_socket import HELLO, FramedSocket, NoRoomError, TooLongError, Welcome, local_name
from monolith.transport.frames import MAGIC, VERSION
from monolith.transport.services import StreamLimits

__all__ = ["SocketService"]

HELLO_SECONDS = 10.0
"""How long one who has connected may take to say who it is."""
SLOW_SECONDS = 10.0
"""How long a message may take however slow its sender is."""
HEALTH_STREAMS = 8
"""Streams beyond `max_streams` that are open for one health check each."""
HEALTH_BYTES = 4096
"""A health check is smaller."""
RETRY_SECONDS = 0.05
"""Pause before a connection is accepted again after the system had no descriptor or memory for one."""

_logger = logging.getLogger(__name__)


class SocketService:
    """Hands each frame of each connection to `calls` and sends its answer back."""

    def __init__(self, calls: FrameCalls, *, host: str, port: int, token: str | None, limits: StreamLimits) -> None:
        self._calls = calls
        self._token = (token or "").encode()
        self._limits = limits
        self._free = threading.Semaphore(limits.max_streams)
        self._for_health = threading.Semaphore(HEALTH_STREAMS)
        self._most = 2 * limits.max_streams + HEALTH_STREAMS
        self._connections: dict[FramedSocket, bool] = {}
        """Each with whether it is known who it is, the oldest first."""
        self._ended = threading.Condition()
        self._stopping = False
        self._warnings = RareWarnings(_logger)
        self._spare = _Spare()
        self._listeners = _listeners(host, port, backlog=limits.max_streams)
        self.port: int = self._listeners[0].getsockname()[1]
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="monolith-ps-accept", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._accepting:
            thread.start()
        let_go_in_children(self)

    def let_go(self) -> None:
        """Close the sockets in a forked child: it would keep the port after the death of the server, and answer nobody."""
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.let_go()
        self._connections, self._ended = {}, threading.Condition()

    def shutdown(self) -> None:
        """Stop listening, send the answers that are on their way, wait until every connection has ended."""
        with self._ended:
            self._stopping = True
            for connection in self._connections:
                connection.stop_receiving()
        for listener in self._listeners:
            with suppress(OSError):
                # Closing alone does not wake a thread that waits in accept.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._accepting:
            # As long as it is in accept, the address is taken: a successor could not listen there.
            thread.join()
        with self._ended:
            self._ended.wait_for(lambda: not self._connections)
        self._spare.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections until the service stops. Whatever a connection cannot get, the next one is tried."""
        while not self._stopping:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if not self._stopping:
                    self._not_accepted(listener, error)
                continue
            try:
                self._begin(connected)
            except Exception as error:
                connected.close()
                self._warnings.warn("cannot serve a connection: %s; it was closed, the client may try again", error)

    def _not_accepted(self, listener: socket.socket, error: OSError) -> None:
        if error.errno in (errno.ECONNABORTED, errno.EINTR):
            return
        self._warnings.warn(
            "cannot accept a connection: %s; %s are open; raise the limit of the process (ulimit -n) or lower max_streams",
            error.strerror,
            len(self._connections),
        )
        if error.errno == errno.EMFILE:
            # A client that waits to be accepted would wait for ever: close its connection instead.
            with self._spare.given_up(), suppress(OSError):
                listener.setblocking(False)
                try:
                    listener.accept()[0].close()
                finally:
                    listener.setblocking(True)
        time.sleep(RETRY_SECONDS)

    def _begin(self, connected: socket.socket) -> None:
        connection = FramedSocket(connected, takes_room=True)
        uid = connection.peer_uid
        if uid not in (None, 0, os.geteuid()):
            self._warnings.warn(
                "refused a connection from a process of user %s, which is neither this user nor root", uid
            )
            connection.close()
            return
        with self._ended:
            if len(self._connections) >= self._most:
                self._drop_oldest_stranger()
            welcome = not self._stopping and len(self._connections) < self._most
            if welcome:
                self._connections[connection] = False
        if not welcome:
            connection.close()
            return
        try:
            threading.Thread(target=self._run, args=(connection,), name="monolith-ps-stream", daemon=True).start()
        except BaseException:
            self._end(connection)
            raise

    def _drop_oldest_stranger(self) -> None:
        """Close the connection that has waited longest without saying who it is. More may connect than are admitted."""
        stranger = next((connection for connection, is_known in self._connections.items() if not is_known), None)
        if stranger is not None:
            self._warnings.warn("%s connections are open: closed one that did not say who it is", self._most)
            del self._connections[stranger]
            stranger.close()

    def _run(self, connection: FramedSocket) -> None:
        try:
            if self._is_known(connection):
                with self._ended:
                    if connection in self._connections:
                        self._connections[connection] = True
                self._let_in(connection)
        except TimeoutError as error:
            _logger.info("closed a stream: %s", error)
        except OSError:
            # The client has gone, or speaks another language: there is nobody to tell.
            pass
        finally:
            self._end(connection)

    def _end(self, connection: FramedSocket) -> None:
        connection.close()
        with self._ended:
            self._connections.pop(connection, None)
            self._ended.notify_all()

    def _is_known(self, connection: FramedSocket) -> bool:
        deadline = time.monotonic() + HELLO_SECONDS
        magic, version, size = HELLO.unpack(connection.receive(HELLO.size, deadline=deadline).data)
        if magic != MAGIC:
            return False
        if version != VERSION:
            return _say(connection, Welcome.OTHER_VERSION)
        token = connection.receive(size, deadline=deadline).tobytes()
        if self._token and not hmac.compare_digest(token, self._token):
            self._warnings.warn("turned away a client: its token is missing or wrong")
            return _say(connection, Welcome.WRONG_TOKEN)
        return True

    def _let_in(self, connection: FramedSocket) -> None:
        if not self._free.acquire(blocking=False):
            self._let_in_for_health(connection)
            return
        try:
            _say(connection, Welcome.COME_IN)
            while True:
                self._answer_one(connection)
        finally:
            self._free.release()

    def _let_in_for_health(self, connection: FramedSocket) -> None:
        """Answer one health check. Any other request is refused because there are too many streams."""
        why = f"{self._limits.max_streams} streams are open, no more are allowed; close some, or raise max_streams"
        self._warnings.warn("refused a client: %s", why)
        if not self._for_health.acquire(blocking=False):
            _say(connection, Welcome.TOO_MANY_STREAMS)
            return
        try:
            _say(connection, Welcome.COME_IN)
            deadline = time.monotonic() + HELLO_SECONDS
            try:
                data = connection.receive_frame(max_bytes=HEALTH_BYTES, deadline=deadline)
            except TooLongError as long:
                answer = self._calls.refused(long.head, OverloadedError(why))
            else:
                answer = self._calls.answer_health_only(data.copy(), why=why)
            connection.send_frame(answer, deadline=deadline)
        finally:
            self._for_health.release()

    def _answer_one(self, connection: FramedSocket) -> None:
        with self._calls.frames.lent() as take:
            answer = self._answer_to(connection, take)
            connection.send_frame(answer, deadline=self._finish_by(len(answer)))

    def _answer_to(self, connection: FramedSocket, take: Callable[[int], bool]) -> np.ndarray:
        """Receive a request and work on it. `take` says whether there is memory for it."""
        try:
            data = connection.receive_frame(
                max_bytes=self._limits.max_message_bytes,
                deadline=time.monotonic() + self._limits.idle_secs,
                finish_by=self._finish_by,
                take=take,
            )
        except NoRoomError as long:
            why = f"requests and answers of {self._calls.frames.in_use:,} bytes are in memory"
            self._warnings.warn("refused a request of %s bytes: %s", long.size, why)
            return self._calls.refused(
                long.head, OverloadedError(f"{why}, no memory for {long.size:,} more; try again later")
            )
        except TooLongError as long:
            error = ProtocolError(
                f"frame: expected at most {self._limits.max_message_bytes:,} bytes, got {long.size:,}; send smaller batches"
            )
            return self._calls.refused(long.head, error)
        room = connection.room
        is_shared = room is not None and room.is_incoming(data)
        return self._calls.answer(data, is_shared=is_shared, out=None if room is None else room.outgoing)

    def _finish_by(self, size: int) -> float:
        """When a message of `size` bytes must have been received or sent."""
        return time.monotonic() + SLOW_SECONDS + size / self._limits.min_bytes_per_sec


class _Spare:
    """A descriptor that is kept for the moment when no other is left."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._take()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Free the descriptor for the length of the block."""
        with self._lock:
            self._free()
            try:
                yield
            finally:
                self._take()

    def close(self) -> None:
        """Close the descriptor for good. May be called again, and by several threads at once."""
        with self._lock:
            self._closed = True
            self._free()

    def _free(self) -> None:
        # A descriptor that is closed twice may be somebody else's the second time.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        if not self._closed:
            with suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _listeners(host: str, port: int, *, backlog: int) -> list[socket.socket]:
    """On TCP, and beside it for processes of this machine."""
    made: list[socket.socket] = []
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made.append(socket.create_server((host, port), family=family, backlog=backlog))
        name = local_name(host, made[0].getsockname()[1])
        if name is not None:
            made.append(socket.socket(socket.AF_UNIX))
            made[1].bind(name)
            made[1].listen(backlog)
    except OSError as error:
        for listener in made:
            listener.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return made


def _say(connection: FramedSocket, said: Welcome) -> bool:
    connection.send(HELLO.pack(MAGIC, VERSION, said))
    return said == Welcome.COME_IN
