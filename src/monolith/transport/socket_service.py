"""The server's side of the socket transport: a thread for each connection, which waits in the kernel most of the time."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from contextlib import suppress

from monolith.errors import ProtocolError, UnavailableError
from monolith.transport.frame_calls import FrameCalls
from monolith.transport.framed_socket import HELLO, FramedSocket, TooLongError, Welcome, local_name
from monolith.transport.frames import MAGIC, VERSION

__all__ = ["SocketService"]

HELLO_SECONDS = 10.0
"""How long one who has connected may take to say who it is."""


class SocketService:
    """Hands each frame of each connection to `calls` and sends its answer back."""

    def __init__(
        self, calls: FrameCalls, *, host: str, port: int, token: str | None, max_streams: int, max_message_bytes: int
    ) -> None:
        self._calls = calls
        self._token = (token or "").encode()
        self._free = threading.Semaphore(max_streams)
        self._most = 2 * max_streams
        self._max_bytes = max_message_bytes
        self._connections: set[FramedSocket] = set()
        self._ended = threading.Condition()
        self._stopping = False
        self._listeners = _listeners(host, port, backlog=max_streams)
        self.port: int = self._listeners[0].getsockname()[1]
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="monolith-ps-accept", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._accepting:
            thread.start()

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

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                if self._stopping:
                    return
                # No descriptor is free, or the client has gone already.
                time.sleep(0.05)
                continue
            connection = FramedSocket(connected, takes_room=True)
            with self._ended:
                # Some more may knock than may come in; beyond, nobody is even asked who it is.
                welcome = not self._stopping and len(self._connections) < self._most
                if welcome:
                    self._connections.add(connection)
            if welcome:
                threading.Thread(target=self._run, args=(connection,), name="monolith-ps-stream", daemon=True).start()
            else:
                connection.close()

    def _run(self, connection: FramedSocket) -> None:
        try:
            if self._is_known(connection):
                self._let_in(connection)
        except OSError:
            # The client has gone, or speaks another language: there is nobody to tell.
            pass
        finally:
            connection.close()
            with self._ended:
                self._connections.discard(connection)
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
            return _say(connection, Welcome.WRONG_TOKEN)
        return True

    def _let_in(self, connection: FramedSocket) -> None:
        if not self._free.acquire(blocking=False):
            _say(connection, Welcome.TOO_MANY_STREAMS)
            return
        try:
            _say(connection, Welcome.COME_IN)
            while True:
                self._answer_one(connection)
        finally:
            self._free.release()

    def _answer_one(self, connection: FramedSocket) -> None:
        try:
            data = connection.receive_frame(max_bytes=self._max_bytes)
        except TooLongError as long:
            error = ProtocolError(
                f"frame: expected at most {self._max_bytes:,} bytes, got {long.size:,}; send smaller batches"
            )
            answer = self._calls.refused(long.head, error)
        else:
            room = connection.room
            is_shared = room is not None and room.is_incoming(data)
            answer = self._calls.answer(data, is_shared=is_shared, out=None if room is None else room.outgoing)
        connection.send_frame(answer)


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
