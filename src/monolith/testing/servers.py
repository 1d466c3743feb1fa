"""Real ZooKeeper, Kafka, Consul and Redis servers for tests: on this machine only, on free ports, with data of their own."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from monolith.errors import MonolithError

__all__ = [
    "ConsulServer",
    "KafkaServer",
    "LocalServer",
    "RedisServer",
    "ServerStartError",
    "ZooKeeperServer",
    "free_ports",
]

_START_SECS = 60.0
_STOP_SECS = 20.0
_JARS = Path("/usr/share/java")
# Below the ephemeral ports, which the system gives to connections and to servers on port 0.
_PORTS = range(15_000, 32_768)


class ServerStartError(MonolithError):
    """A server for tests could not be started. The message has the end of its log."""


def free_ports(count: int) -> list[int]:
    """Return different TCP ports of 127.0.0.1 that are free and outside of the range of ephemeral ports.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


class LocalServer(ABC):
    """A server as a child process. It keeps its port and data across restarts, and ends with the block."""

    ports_needed = 1

    def __init__(self, folder: str | Path) -> None:
        """Keep data and log below `folder`."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "server.log"
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port clients connect to, known from the first start on."""
        return self._ports[0]

    @property
    def address(self) -> str:
        """`127.0.0.1:port`."""
        return f"127.0.0.1:{self.port}"

    @abstractmethod
    def command(self, ports: list[int]) -> list[str]:
        """Return the command that serves on `ports`."""

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether it serves."""

    def start(self) -> Self:
        """Start, and return when it answers."""
        if self._process is None:
            ports = self._ports or free_ports(self.ports_needed)
            # If this process is killed, nothing else would end the server.
            tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    tie + self.command(ports), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            self._ports = ports
            self._wait_until(self.answers)
        return self

    def stop(self, *, kill: bool = False) -> None:
        """End it, by SIGTERM or SIGKILL, and wait until it has ended. Its data stays."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill() if kill else process.terminate()
        try:
            process.wait(_STOP_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECS
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop(kill=True)
                end = self.log.read_text(errors="replace")[-2000:]
                raise ServerStartError(f"{type(self).__name__} does not answer at {self.address}:\n{end}")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ZooKeeperServer(LocalServer):
    """One ZooKeeper server, from the Debian package `zookeeper`. Sessions may be as short as one second."""

    @staticmethod
    def missing() -> str:
        """What is not installed, empty if it can be started."""
        needed = {"the package zookeeper": (_JARS / "zookeeper.jar").exists(), "java": shutil.which("java") is not None}
        return ", ".join(name for name, there in needed.items() if not there)

    def command(self, ports: list[int]) -> list[str]:
        """Java with ZooKeeper's own jars, and a configuration file."""
        (self.folder / "zoo.cfg").write_text(
            f"tickTime=500\ndataDir={self.folder / 'data'}\nclientPortAddress=127.0.0.1\nclientPort={ports[0]}\n"
            "admin.enableServer=false\n4lw.commands.whitelist=ruok,dump\n"
        )
        jars = f"{_JARS / 'zookeeper.jar'}:{_JARS}/*"
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", jars, main, "zoo.cfg"]

    def answers(self) -> bool:
        """Whether it says that it is well."""
        return self._say(b"ruok") == b"imok"

    def has_session(self, path: str) -> bool:
        """Whether a session that has not ended keeps the node `path`."""
        return path.encode() in self._say(b"dump").split()

    def _say(self, word: bytes) -> bytes:
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(word)
                while part := connection.recv(65536):
                    answer += part
        except OSError:
            pass
        return answer

    def forget(self) -> None:
        """Remove all data, including sessions. Only while it is stopped."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)


class ConsulServer(LocalServer):
    """One Consul agent in development mode, which keeps nothing on disk: a restart forgets everything."""

    ports_needed = 4

    def __init__(self, folder: str | Path, program: str = "consul") -> None:
        """Run `program`, a path or a name to look up."""
        super().__init__(folder)
        self.program = program

    def command(self, ports: list[int]) -> list[str]:
        """Return the command of the agent, without services that tests do not use."""
        names = ("-http-port", "-server-port", "-serf-lan-port", "-serf-wan-port")
        numbers = [part for name, port in zip(names, ports, strict=True) for part in (name, str(port))]
        return [self.program, "agent", "-dev", "-bind", "127.0.0.1", "-client", "127.0.0.1", *numbers,
                "-grpc-port", "-1", "-dns-port", "-1"]  # fmt: skip

    def answers(self) -> bool:
        """Whether it has chosen itself as leader."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/v1/status/leader", timeout=1) as response:
                return len(response.read()) > len('""')
        except (OSError, urllib.error.URLError):
            return False


class KafkaServer(LocalServer):
    """One broker of Kafka 0.9 from its jars, with a ZooKeeper server that is started before."""

    CLIENT = {"api.version.request": "false", "broker.version.fallback": "0.9.0.1", "enable.idempotence": "false"}
    """Settings of librdkafka that so old a broker needs."""

    def __init__(self, folder: str | Path, jars: str | Path, zookeeper: ZooKeeperServer) -> None:
        """`jars`: the folder of the broker's jars."""
        super().__init__(folder)
        self.jars, self.zookeeper = Path(jars), zookeeper

    def command(self, ports: list[int]) -> list[str]:
        """Java with the broker's jars, and a configuration file."""
        (self.folder / "server.properties").write_text(
            f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{ports[0]}\nadvertised.host.name=127.0.0.1\n"
            f"advertised.port={ports[0]}\nlog.dirs={self.folder / 'data'}\nzookeeper.connect={self.zookeeper.address}\n"
            "zookeeper.session.timeout.ms=2000\noffsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
            "log.retention.check.interval.ms=500\nlog.segment.delete.delay.ms=100\n"
        )
        return [*self._java(), "kafka.Kafka", "server.properties"]

    def start(self) -> Self:
        """Start, and return when it answers. A broker ends at once while the session of one that was killed lives on."""
        deadline = time.monotonic() + _START_SECS
        while self._process is None and self._is_registered() and time.monotonic() < deadline:
            time.sleep(0.05)
        return super().start()

    def answers(self) -> bool:
        """Whether it is registered and accepts connections."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return self._is_registered()
        except OSError:
            return False

    def _is_registered(self) -> bool:
        return self.zookeeper.has_session("/brokers/ids/0")

    def create_topic(self, name: str, partitions: int, **config: str) -> None:
        """Make a topic with Kafka's own tool. `config` has names with underscores for their dots."""
        given = [part for key, value in config.items() for part in ("--config", f"{key.replace('_', '.')}={value}")]
        self._topics("--create", "--topic", name, "--partitions", str(partitions), "--replication-factor", "1", *given)

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic `count` partitions, more than it has."""
        self._topics("--alter", "--topic", topic, "--partitions", str(count))

    def _topics(self, *arguments: str) -> None:
        command = [*self._java(), "kafka.admin.TopicCommand", "--zookeeper", self.zookeeper.address, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=_START_SECS, check=False
        )
        if done.returncode:
            raise ServerStartError(f"{' '.join(arguments)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def _java(self) -> list[str]:
        opened = [
            part
            for name in ("sun.nio.ch", "java.nio", "java.lang")
            for part in ("--add-opens", f"java.base/{name}=ALL-UNNAMED")
        ]
        return ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", *opened, "-cp", f"{self.jars}/*"]


class RedisServer(LocalServer):
    """One Redis server, from the Debian package `redis-server`. Every write is on disk before it is acknowledged."""

    def __init__(self, folder: str | Path, *, durable: bool = True, password: str | None = None) -> None:
        """Without `durable`, a restart forgets everything."""
        super().__init__(folder)
        self.durable, self.password = durable, password

    @staticmethod
    def missing() -> str:
        """What is not installed, empty if it can be started."""
        return "" if shutil.which("redis-server") else "the package redis-server"

    def command(self, ports: list[int]) -> list[str]:
        """Return the command of the server, with its data in our folder."""
        durable = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else []
        password = ["--requirepass", self.password] if self.password else []
        return ["redis-server", "--port", str(ports[0]), "--bind", "127.0.0.1", "--save", "", *durable, *password]

    def answers(self) -> bool:
        """Whether it answers, if only that a password is needed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
