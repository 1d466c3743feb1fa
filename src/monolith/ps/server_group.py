"""What a worker does with all of its servers alike: join, declare tables, ask for sizes, expire rows, end."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field

from monolith.config import Config, Positive
from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.ps import messages
from monolith.ps.frames import Frame
from monolith.ps.link import Link, finish_all
from monolith.ps.messages import Call, DeclaredTable, Push, Wire
from monolith.ps.stream_pool import Transport
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.config import TableConfig
from monolith.table.embedding_table import TableStats

__all__ = ["ClientConfig", "ServerGroup"]


class ClientConfig(Config):
    """How a worker talks to its servers.

    Example:
        >>> ClientConfig(worker="worker-0", epoch=2, wire="bfloat16").timeout
        30.0
    """

    worker: messages.Name | None = None
    """The worker's name, kept when it is started again; None: a new one, and nobody takes its place."""
    epoch: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    """Which life of the worker this is, larger than all before; None: the time in nanoseconds."""
    timeout: Positive = 30.0
    """Seconds a call may take, retries included."""
    wire: Wire = "float32"
    """Precision of rows and gradients on the way; the narrow ones halve the traffic, and round."""
    token: Annotated[str | None, Field(repr=False)] = None
    """What the servers ask for."""
    tls_root_certs: Path | None = None
    """PEM of whom the servers' certificates are signed by; None: no TLS."""
    transport: Transport | None = None
    """How frames travel: "socket", or "flight", which can encrypt; None: Flight with `tls_root_certs`, sockets without. The
    servers must do the same."""
    ordered: bool = True
    """Whether a change waits for lookups begun before it, so that a run can be repeated bit by bit. False lets both go on at
    the same time: rows read ahead then have the update before them, or not yet."""
    max_streams: Annotated[int, Field(ge=1)] = 4
    """Streams to each server: threads of this process that can be under way at once."""


def link_to(address: str, config: ClientConfig) -> Link:
    """The way to one server, as `config` says."""
    return Link(
        address,
        timeout=config.timeout,
        token=config.token,
        tls_root_certs=_certificates(config.tls_root_certs),
        max_streams=config.max_streams,
        transport=config.transport,
    )


class ServerGroup:
    """Links to servers, joined as one worker. Base of `RemoteStore` and `ServerStore`."""

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Iterable[TableConfig | DeclaredTable] = (),
        *,
        config: ClientConfig | None = None,
    ) -> None:
        self.config = config or ClientConfig()
        self.addresses = _distinct(addresses)
        self._worker = self.config.worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._epoch = time.time_ns() if self.config.epoch is None else self.config.epoch
        self._nonce = secrets.randbits(63)
        self._sequences = itertools.count(1)
        self._declared: dict[str, DeclaredTable] = {}
        self.links = [link_to(address, self.config) for address in self.addresses]
        try:
            self._join()
            self.declare(tables)
        except BaseException:
            self.close()
            raise

    @property
    def worker(self) -> str:
        """The name it has joined with."""
        return self._worker

    @property
    def epoch(self) -> int:
        """The epoch it has joined in."""
        return self._epoch

    def declare(self, tables: Iterable[TableConfig | DeclaredTable]) -> None:
        """Let every server make these tables, unless they are there with the same configuration."""
        declared = [t if isinstance(t, DeclaredTable) else DeclaredTable(config=t) for t in tables]
        if declared:
            self._ask_all(Call.DECLARE_TABLES, messages.DeclareTables(tables=tuple(declared)).model_dump_json())
            self._declared |= {table.config.name: table for table in declared}

    def configs(self) -> dict[str, TableConfig]:
        """The configuration of every table on the servers."""
        return {table.config.name: table.config for table in self._served()}

    def stats(self) -> dict[str, TableStats]:
        """The size of every table, all servers together."""
        answers = [json.loads(frame.text)["tables"] for frame in self._ask_all(Call.STATS)]
        return {name: TableStats.total([TableStats(**answer[name]) for answer in answers]) for name in answers[0]}

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at `now`, by default the newest event time of each; how many, by table."""
        stats = self.stats()
        if now is None:
            moments = {name: one.max_event_time for name, one in stats.items()}
        else:
            moments = dict(now) if isinstance(now, Mapping) else dict.fromkeys(stats, now)
        text = messages.Evict(push=self.next_push(), now=moments).model_dump_json()
        counts = [json.loads(frame.text)["evicted"] for frame in self._ask_all(Call.EVICT, text)]
        return {name: sum(count[name] for count in counts) for name in moments}

    def health(self) -> list[dict[str, object]]:
        """What each server says about itself: tables, bytes, whether it is initialised, seconds since it started."""
        return [json.loads(frame.text) for frame in self._ask_all(Call.HEALTH)]

    def is_initialised(self) -> bool:
        """Whether every server has been given its state since it started."""
        return all(json.loads(frame.text)["initialised"] for frame in self._ask_all(Call.IS_INITIALISED))

    def mark_initialised(self) -> None:
        """From now on, until it is started anew, each server has state that is worth keeping."""
        self._ask_all(Call.MARK_INITIALISED)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Refused: a worker does not have the rows. What servers hold is lost with them."""
        raise InvalidArgumentError(f"save to {folder}: tables on servers cannot be saved through a worker")

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Refused, as `save` is."""
        self.prepare_restore(folder)()

    def prepare_restore(
        self, folder: str | os.PathLike[str], *, buckets: range = range(NUM_BUCKETS)
    ) -> Callable[[], None]:
        """Refused, as `save` is."""
        raise InvalidArgumentError(f"restore from {folder}: tables on servers cannot be restored through a worker")

    def rejoin(self) -> None:
        """After `ServerRestartedError`: take the servers as they are now, and declare the tables to those that are new."""
        for link in self.links:
            link.instance = 0
        self._join()
        self.declare(list(self._declared.values()))

    def shut_down_servers(self) -> None:
        """Ask all servers to end."""
        self._ask_all(Call.SHUTDOWN)

    def close(self) -> None:
        """Close all connections; the servers go on."""
        for link in self.links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.addresses))}, worker={self._worker!r})"

    def _join(self) -> None:
        join = messages.Join(worker=self._worker, epoch=self._epoch, nonce=self._nonce)
        self._ask_all(Call.JOIN, join.model_dump_json())

    def next_push(self) -> Push:
        """The number of the next change this worker makes."""
        return Push(worker=self._worker, epoch=self._epoch, sequence=next(self._sequences))

    def _ask_all(self, call: Call, text: str = "{}") -> list[Frame]:
        return finish_all([link.begin(call, text)[0] for link in self.links])

    def _served(self) -> tuple[DeclaredTable, ...]:
        # The servers were given the same declarations; the first speaks for all.
        return messages.DeclareTables.from_json(self.links[0].call(Call.CONFIGS).text).tables


def _distinct(addresses: Sequence[str]) -> tuple[str, ...]:
    if isinstance(addresses, str) or not addresses:
        raise InvalidArgumentError(f"addresses: expected a list of host:port, got {addresses!r}")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or "/" in address:
            raise InvalidArgumentError(f"addresses: expected host:port, got {address!r}")
    if len(set(addresses)) != len(addresses):
        raise InvalidArgumentError(f"addresses: expected each server once, got {', '.join(addresses)}")
    return tuple(addresses)


def _certificates(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"ClientConfig.tls_root_certs: cannot read {path}: {error.strerror}") from error


def require_known(names: Iterable[str], declared: Mapping[str, DeclaredTable]) -> None:
    """Raise unless all tables have been declared by this worker."""
    for name in names:
        if name not in declared:
            known = ", ".join(map(repr, declared)) or "none"
            raise ConfigError(f"table: this store has not declared {name!r}; it has {known}")
