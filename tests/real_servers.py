"""Servers that `tests/servers/install.sh` installs, for tests that talk to the real thing; without them those tests skip."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monolith.testing.servers import ConsulServer, KafkaServer, RedisServer, ZooKeeperServer

ROOT = Path(__file__).resolve().parents[1]
INSTALL = "run tests/servers/install.sh as root"


def zookeeper_server(folder: Path) -> ZooKeeperServer:
    missing = ZooKeeperServer.missing()
    if missing:
        pytest.skip(f"ZooKeeper cannot be started without {missing}; {INSTALL}")
    return ZooKeeperServer(folder)


def consul_server(folder: Path) -> ConsulServer:
    program = shutil.which("consul", path=ROOT / ".cache" / "servers") or shutil.which("consul")
    if program is None:
        pytest.skip(f"Consul cannot be started without the program consul; {INSTALL}")
    return ConsulServer(folder, program)


def kafka_server(folder: Path, zookeeper: ZooKeeperServer) -> KafkaServer:
    jars = ROOT / ".cache" / "servers" / "kafka"
    if not any(jars.glob("kafka_*.jar")):
        pytest.skip(f"Kafka cannot be started without its jars; {INSTALL}")
    return KafkaServer(folder, jars, zookeeper)


def redis_server(folder: Path, *, durable: bool = True, password: str | None = None) -> RedisServer:
    missing = RedisServer.missing()
    if missing:
        pytest.skip(f"Redis cannot be started without {missing}; {INSTALL}")
    return RedisServer(folder, durable=durable, password=password)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return when `condition` is true; it must become so, the time is only for machines that are slow."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
