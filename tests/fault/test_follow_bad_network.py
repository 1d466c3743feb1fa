"""Danger: connections between a replica and its run are reset, cut or slow, at any byte of a message, and the replica misses a
change or applies it to the wrong rows; or it hangs, and answers with old rows for ever."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from followed_tables import Copies, FeedProcess, rows_of, table, train, until, writer_at
from monolith.follow import Follower

RESET = struct.pack("ii", 1, 0)


class BadNetwork:
    """Carries bytes to a server, and resets, delays or silently drops connections at random bytes of their answers."""

    def __init__(self, server: str, seed: int) -> None:
        host, _, port = server.rpartition(":")
        self._server, self._draw = (host, int(port)), random.Random(seed)
        self.calm = threading.Event()
        """Set when nothing bad should happen any more."""
        self.resets = self.silences = self.delays = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Another address than the server's, so that no Unix socket leads around the network.
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._closing.is_set():
            with suppress(TimeoutError, OSError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(client, self._draw.randrange(200, 60_000)))
                self._threads.append(thread)
                thread.start()

    def _carry(self, client: socket.socket, left: int) -> None:
        try:
            server = socket.create_connection(self._server)
        except OSError:  # it was killed
            client.close()
            return
        with client, server:
            while not self._closing.is_set():
                for one in select.select([client, server], [], [], 0.05)[0]:
                    with suppress(OSError):
                        data = one.recv(4096)
                        if not data:
                            return
                        if one is server and not self.calm.is_set():
                            left -= len(data)
                            if left < 0:
                                self._happen(client, server, data)
                                return
                        (server if one is client else client).sendall(data)
                        continue
                    return

    def _happen(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            client.sendall(data[: self._draw.randrange(len(data))])
        fate = self._draw.randrange(4)
        if fate == 0:
            self.silences += 1
            self._closing.wait(self._draw.uniform(0.5, 3.0))  # longer than a call may take, mostly
        elif fate == 1:
            self.delays += 1
            time.sleep(self._draw.uniform(0.0, 0.1))
        self.resets += 1
        for end in (client, server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 40), pytest.param(2, 400, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_a_replica_has_every_row_after_resets_and_silence(seed: int, rounds: int) -> None:
    one, copies, draw = table(), Copies(), np.random.default_rng(seed)
    train(one, range(3000))
    # Few segments are kept, so that a replica that was away for long reads all rows again.
    process = FeedProcess({"item": one}, kept_bytes=100_000)
    network = BadNetwork(process.address, seed)
    network.calm.set()
    follower = Follower([writer_at(network.address)], copies, wait=0.05)
    try:
        # Nothing can be published before somebody follows.
        until(lambda: follower.progress["run"].as_of is not None, "the first read")
        network.calm.clear()
        for number in range(rounds):
            train(one, np.unique(draw.integers(0, 4000, 300)).tolist(), seed=number)
            one.erase(draw.integers(0, 4000, 30))
            process.publish()
            resets = network.resets
            if number % 4 == 0:
                until(lambda resets=resets: network.resets > resets, "a reset")  # type: ignore[misc]
        assert network.resets >= rounds // 4
        network.calm.set()
        newest = process.publish()
        until(lambda: follower.progress["run"].sequence == newest, "the newest segment")
        assert copies.rows() == rows_of(one)
    finally:
        follower.close()
        network.close()
        process.close()
