"""The parts of an online loop as processes that begin in milliseconds, the links between them, and what can happen to both."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from forked import Forked

import loop_site
from loop_site import FILES, PARTITIONS, end_event_time, is_clicked
from monolith.errors import MonolithError
from monolith.serve import Client
from monolith.streams import open_stream
from monolith.testing.mock_kafka import MockKafka
from monolith.testing.servers import RedisServer, free_ports
from real_servers import until

__all__ = ["PARTS", "KafkaLink", "Link", "Loop", "counts", "require_each_once", "require_trained_once"]

RESET = struct.pack("ii", 1, 0)
PRODUCE = 0
"""The number of the requests of Kafka that store records."""
PARTS = ("site", "joiner", "trainer", "replica")
RUN, VIEW = "run", "view"
SECONDS = 240.0


class Link:
    """Carries bytes to a server, whose address is asked for with every connection, until it is cut, slowed or reset."""

    def __init__(self, server: Callable[[], str]) -> None:
        self._server = server
        self._whole = threading.Event()
        self._whole.set()
        self.delay = 0.0
        """Seconds that bytes are held."""
        self.carried = 0
        """Bytes."""
        self._closing = False
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._torn: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Carry nothing, and tell nobody."""
        self._whole.clear()

    def heal(self) -> None:
        """Carry bytes as they come."""
        self.delay = 0.0
        self._whole.set()

    def reset(self) -> None:
        """Reset all connections, in the middle of what they carry next."""
        with self._lock:
            self._torn |= self._ends

    def close(self) -> None:
        self._closing = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            with suppress(OSError):
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client:
            host, _, port = self._server().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as server:
                server.settimeout(None)
                with self._lock:
                    self._ends.add(client)
                try:
                    self._carry_between(client, server)
                finally:
                    with self._lock:
                        self._ends.discard(client)
                        self._torn.discard(client)

    def _carry_between(self, client: socket.socket, server: socket.socket) -> None:
        unanswered: set[int] = set()
        while not self._closing:
            for one in select.select([client, server], [], [], 0.02)[0]:
                while not self._whole.wait(0.05):
                    if self._closing or client in self._torn:
                        break
                torn = client in self._torn and not unanswered
                data = self._take(one, unanswered, asks=one is client)
                self.carried += len(data)
                if self.delay:
                    time.sleep(self.delay)
                (server if one is client else client).sendall(data[: len(data) // 2] if torn else data)
                if not data:
                    return
                if torn:
                    for end in (client, server):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return

    def _take(self, end: socket.socket, unanswered: set[int], *, asks: bool) -> bytes:
        """Return what an end has sent. A connection is not torn while there is something in `unanswered`."""
        return end.recv(1 << 16)


class KafkaLink(Link):
    """A link to a mock cluster of Kafka. Clients connect to the address that a broker names, so here it names the link.

    A broker drops a batch that a producer with idempotence sends again because the answer was lost. The mock cluster stores it
    twice, so here no connection is torn between a batch and its answer.
    """

    def _take(self, end: socket.socket, unanswered: set[int], *, asks: bool) -> bytes:
        size = _exactly(end, 4)
        message = _exactly(end, int.from_bytes(size, "big"))
        if asks:
            api, _, number = struct.unpack_from(">hhi", message.ljust(8))
            if message and api == PRODUCE:
                unanswered.add(number)
            return size + message
        unanswered.discard(int.from_bytes(message[:4], "big"))
        # Both ports have the same length, and so have both answers.
        return size + message.replace(_named(self._server()), _named(self.address))


def _exactly(end: socket.socket, size: int) -> bytes:
    """Return so many bytes, or none if the connection has ended."""
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


def _named(address: str) -> bytes:
    """Return an address as it is in answers of Kafka."""
    host, _, port = address.rpartition(":")
    return host.encode() + struct.pack(">i", int(port))


def _streams_at(broker: RedisServer | MockKafka, address: str) -> str:
    """Return what the URLs of streams begin with, for those who reach the broker at this address."""
    return f"kafka://{address}/" if isinstance(broker, MockKafka) else f"redis://{address}/0/"


def live(pipe: Connection, folder: Path, log: str, arguments: list[str]) -> None:
    """Be one part of the loop."""
    os.chdir(folder)
    with (folder / log).open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    if arguments[0] == "site":
        loop_site.main(arguments[1])
    from monolith.cli import main

    sys.exit(main(arguments))


class Loop:
    """Impressions -> stream -> joiner -> stream -> trainer -> replica. Parts that die are started again by `tend`.

    Without a `broker` streams are in folders. With one, every part has a link of its own to it, and the replica has one to the
    trainer.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        broker: RedisServer | MockKafka | None = None,
        parts: Sequence[str] = PARTS,
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`options` are added to the commands of parts."""
        for name, text in FILES.items():
            (folder / name).write_text(text)
        pq.write_table(pa.table({"id": [10**9], "label": pa.array([0.0], pa.float32())}), folder / "history.parquet")
        self.folder, self.broker, self._parts = folder, broker, parts
        self.links: dict[str, Link] = {}
        self.faults: Counter[str] = Counter()
        """What was done, by part and fault."""
        self.deaths: Counter[str] = Counter()
        """Parts that have ended by themselves."""
        self._stopped: dict[str, float] = {}
        self._disturbed: dict[str, float] = {}
        self._processes: dict[str, Forked] = {}
        stack.callback(self._close)
        before = dict.fromkeys(PARTS, "")
        if broker is not None:
            for name in ("site", "joiner", "trainer"):
                self.links[name] = (KafkaLink if isinstance(broker, MockKafka) else Link)(lambda: broker.address)
                before[name] = _streams_at(broker, self.links[name].address)
            self.links["replica"] = Link(lambda: (folder / RUN / "controller_server_addr.txt").read_text())
        for name in ("impressions", "actions", "examples"):
            if isinstance(broker, MockKafka):
                broker.create_topic(name, PARTITIONS)
            else:
                direct = f"{folder}/" if broker is None else _streams_at(broker, broker.address)
                open_stream(f"{direct}{name}", partitions=PARTITIONS)
        port = free_ports(1)[0]
        joiner, trainer = before["joiner"], before["trainer"]
        streams = (
            f"impressions.stream={joiner}impressions",
            f"actions.stream={joiner}actions",
            f"output.stream={joiner}examples",
        )
        served = RUN if broker is None else VIEW
        self._commands = {
            "site": ["site", before["site"]],
            "joiner": ["join", "join.yaml", *(part for one in streams for part in ("--set", one))],
            "trainer": ["train", "job.yaml", "--set", f"then.stream={trainer}examples"],
            "replica": ["serve", "--run", served, "--name", "counted", "--http-port", str(port), "--grpc-port", "0"],
        }
        for name, more in (options or {}).items():
            self._commands[name] += more
        for number, command in enumerate((["train", "job.yaml", "--set", "then=null"], ["export", "job.yaml"])):
            prepared = Forked(live, folder, f"prepare{number}.log", command)
            stack.callback(prepared.close)
            assert prepared.join() == 0, (folder / f"prepare{number}.log").read_text()
        self._make_view()
        self.address = f"127.0.0.1:{port}"
        self.client = stack.enter_context(Client(self.address, timeout=10.0))

    def _make_view(self) -> None:
        """A model_dir as a replica elsewhere sees it: the address of its run is that of the link."""
        view = self.folder / VIEW
        view.mkdir()
        for name in ("exported_models", "controller_token", "run_id", "feeds"):
            (view / name).symlink_to(self.folder / RUN / name)
        if "replica" in self.links:
            (view / "controller_server_addr.txt").write_text(self.links["replica"].address)

    def tend(self) -> None:
        """Start what is not there, and end what has lasted long enough."""
        now = time.monotonic()
        for name in [name for name, until_ in self._stopped.items() if until_ <= now]:
            del self._stopped[name]
            self._signal(name, signal.SIGCONT)
        for name in [name for name, until_ in self._disturbed.items() if until_ <= now]:
            del self._disturbed[name]
            self.links[name].heal()
        if self.broker is not None and self.broker._process is None:
            self.broker.start()
        for name in self._parts:
            process = self._processes.get(name)
            if process is not None and process.is_alive():
                continue
            if process is not None:
                self.deaths[name] += 1
                process.close()
            self._processes[name] = Forked(live, self.folder, f"{name}.log", self._commands[name])

    def hurt(self, draw: random.Random, part: str, fault: str) -> None:
        """Do one thing to one part."""
        self.faults[f"{part} {fault}"] += 1
        soon = time.monotonic() + draw.uniform(0.05, 0.6)
        if fault == "killed":
            if part == "broker":
                # What a mock cluster has is in its memory.
                assert isinstance(self.broker, RedisServer)
                self.broker.stop(kill=True)
                self._stopped.pop(part, None)
            else:
                self._stopped.pop(part, None)
                if part in self._processes:
                    self._processes.pop(part).close()
        elif fault == "stopped":
            self._stopped[part] = soon
            self._signal(part, signal.SIGSTOP)
        else:
            for name in ("site", "joiner", "trainer") if part == "broker" else (part,):
                link = self.links[name]
                if fault == "reset":
                    link.reset()
                    continue
                self._disturbed[name] = soon
                if fault == "slowed":
                    link.delay = draw.uniform(0.01, 0.1)
                else:
                    link.cut()
                    if draw.random() < 0.5:
                        link.reset()

    def pid(self, part: str) -> int:
        """The process that a part is now."""
        return self._processes[part].pid

    def memory(self, part: str) -> int:
        """Bytes that a part has in memory."""
        status = Path(f"/proc/{self.pid(part)}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if name == "broker":
                assert self.broker is not None
                if self.broker._process is not None:
                    os.kill(self.broker._process.pid, number)
            elif name in self._processes:
                os.kill(self._processes[name].pid, number)

    def calm(self) -> None:
        """Undo what lasts."""
        self._stopped = dict.fromkeys(self._stopped, 0.0)
        self._disturbed = dict.fromkeys(self._disturbed, 0.0)
        self.tend()

    def logs(self) -> str:
        """What the parts have said last."""
        return "\n".join(
            f"== {name}\n{path.read_text()[-3000:]}" for name in PARTS if (path := self.folder / f"{name}.log").exists()
        )

    def _close(self) -> None:
        for process in self._processes.values():
            process.close()
        for link in self.links.values():
            link.close()
        if self.broker is not None and self.broker._process is not None:
            os.kill(self.broker._process.pid, signal.SIGCONT)


def require_each_once(loop: Loop, faults: list[tuple[str, str]], draw: random.Random, *, pause: float) -> None:
    """Do these things to the loop while impressions come. Each impression must have been trained once, and the replica say so."""
    until(lambda: loop.tend() or counts(loop.client, np.zeros(1, np.int64)) is not None, seconds=SECONDS)
    for part, fault in faults:
        loop.hurt(draw, part, fault)
        end = time.monotonic() + draw.uniform(0.0, pause)
        while time.monotonic() < end:
            loop.tend()
            time.sleep(0.02)
    loop.calm()
    (loop.folder / "enough").touch()
    try:
        until(lambda: loop.tend() or (loop.folder / "written").exists(), seconds=SECONDS)
        end_event_time(loop.folder)
        loop.hurt(draw, "joiner", "killed")
        require_trained_once(loop.client, np.arange(int((loop.folder / "written").read_text())), tend=loop.tend)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{loop.logs()}") from None


def counts(client: Client, numbers: np.ndarray) -> np.ndarray | None:
    """How often the replica says that each impression was trained. None while it does not answer."""
    try:
        parts = [client.infer({"id": numbers[at : at + 10_000]})["count"] for at in range(0, len(numbers), 10_000)]
    except MonolithError:
        return None
    chances = np.concatenate(parts).astype(np.float64)
    return np.round(np.log(chances / (1 - chances)), 3)


def require_trained_once(client: Client, numbers: np.ndarray, *, tend: Callable[[], None] = lambda: None) -> None:
    """Wait until the replica says that all impressions were trained, and raise if one was trained twice, or as what it is not."""
    expected = np.array([2.0 if is_clicked(number) else 1.0 for number in numbers.tolist()])
    found: list[np.ndarray | None] = [None]

    def is_settled() -> bool:
        tend()
        found[0] = counts(client, numbers)
        return found[0] is not None and bool((found[0] >= expected).all())

    try:
        until(is_settled, seconds=SECONDS)
    except AssertionError:
        assert found[0] is not None, "the replica does not answer"
        np.testing.assert_array_equal(found[0], expected)
    # Were one of them trained twice, that would be seen now, or when what is left has been trained.
    time.sleep(1.0)
    np.testing.assert_array_equal(counts(client, numbers), expected)
