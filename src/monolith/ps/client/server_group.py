"""`ServerGroup`: a worker's connections to its servers, and the calls that go to all of them alike."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Annotated, ClassVar, Literal, NoReturn, Self, Unpack

from pydantic import Field

from monolith.config import Config, Positive
from monolith.errors import ConfigError, InvalidArgumentError, MonolithError, StorageError
from monolith.ps.client.routes import ask_buckets
from monolith.ps.client.saving import begin_server_saves, prepare_servers, save_servers
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import CountFrom, DeclaredTable, HeldPosition, Push, Wire
from monolith.table.buckets import mask_of
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable, TableStats
from monolith.table.store import RestoreChoices, StoreSave, WorkerProgress
from monolith.transport.addresses import distinct_addresses
from monolith.transport.calls import BasicCall, CallNumber, WireName
from monolith.transport.frames import Frame
from monolith.transport.link import Link, Transport, finish_all
from monolith.transport.tokens import Token, reveal

__all__ = ["ClientConfig", "ServerGroup", "follow_server", "link_to"]


def follow_server(
    link: Link, known: Sequence[str], find: Callable[[], Sequence[str]], connect: Callable[[str], Link]
) -> None:
    """Update the address of `link` if its server is at one of the addresses that `find` returns.

    Addresses in `known` belong to other servers. Addresses that do not answer are tried again the next time.
    """
    try:
        addresses = find()
    except MonolithError:
        return
    if link.address in addresses:
        return
    for address in addresses:
        if address not in known and _identity(connect(address)) == link.server:
            link.move_to(address)
            return


def _identity(link: Link) -> int | None:
    try:
        return ask_buckets(link).server
    except MonolithError:
        return None
    finally:
        link.close()


_log = logging.getLogger(__name__)

FIND_SECONDS = 2.0
"""How long to search for a missing server at an address."""


class ClientConfig(Config):
    """How a worker connects to its servers."""

    config_group: ClassVar[str] = "run"

    worker: WireName | None = None
    """The worker's name, kept when it is restarted. None: a random one, without a successor."""
    epoch: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    """Which incarnation of the worker this is, larger than all before. None: the time in nanoseconds."""
    run: messages.Run = ""
    """Name of the launch of the job that the worker belongs to. Workers of one launch must declare the same settings of tables
    and optimizers, and those of the next may declare others. "": servers use the last declaration, and log the change."""
    timeout: Positive = 30.0
    """Seconds that a call may take, including retries."""
    wire: Wire = "float32"
    """Precision of rows and gradients in messages. 16 bits halve the traffic, and round."""
    token: Token = None
    """The secret that the servers require."""
    tls_root_certs: Path | None = None
    """CA bundle (PEM) that signed the servers' certificates. None: no TLS."""
    transport: Transport | None = None
    """How frames are sent: "socket", or "flight", which can encrypt. None: Flight with `tls_root_certs`, sockets without. Must
    match the servers."""
    pool_on_servers: bool = True
    """Whether the servers sum bags with at least two ids for each server, which sends less. The worker then adds the sums of
    several servers, in another order than one table would. False: rows are sent, and always pooled by the worker."""
    ordered: bool = True
    """Whether a change waits for lookups that began before it, so that runs are reproducible bit for bit. False lets both run
    concurrently: prefetched rows may or may not have the update before them."""
    max_streams: Annotated[int, Field(ge=1)] = 4
    """Streams to each server, and so the number of threads of this process that can call it at the same time."""
    on_restart: Literal["rejoin", "raise"] = "rejoin"
    """What to do when a server was started again and has restored itself: rejoin it, or raise `ServerRestoredError`. A server
    that has lost its state always raises `ServerRestartedError`."""


def link_to(address: str, config: ClientConfig) -> Link:
    """Return a link to one server."""
    return Link(
        address,
        timeout=config.timeout,
        token=reveal(config.token),
        tls_root_certs=_certificates(config.tls_root_certs),
        max_streams=config.max_streams,
        transport=config.transport,
    )


class ServerGroup:
    """Links to servers, joined as one worker. Base of `ServerStore`."""

    remote = True
    collective: frozenset[str] = frozenset()
    tables: Mapping[str, EmbeddingTable] = MappingProxyType({})

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Iterable[TableConfig | DeclaredTable] = (),
        *,
        config: ClientConfig | None = None,
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self.config = config or ClientConfig()
        self._find = find
        self._rejoining = threading.RLock()
        self._worker = self.config.worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._epoch = time.time_ns() if self.config.epoch is None else self.config.epoch
        self._nonce = secrets.randbits(63)
        self._sequences = itertools.count(1)
        self._declared: dict[str, DeclaredTable] = {}
        self.links = [self._linked(address) for address in distinct_addresses(addresses)]
        try:
            self._join()
            self.declare(tables)
        except BaseException:
            self.close()
            raise

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise InvalidArgumentError(
            "deepcopy: the rows are on parameter servers, and two copies of the model would train the same ones; build a second "
            "model over a store of its own, or export this one"
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(link.address for link in self.links)

    @property
    def worker(self) -> str:
        """The name under which it has joined."""
        return self._worker

    @property
    def epoch(self) -> int:
        """The epoch in which it has joined."""
        return self._epoch

    def declare(self, tables: Iterable[TableConfig | DeclaredTable]) -> None:
        """Let every server make these tables. Those that are there take the hyperparameters given here, and keep their rows.

        Raises:
            ConfigError: a table is there with rows of another layout, seed or mode, or another worker of the same launch has
                declared it with other settings.
        """
        declared = [t if isinstance(t, DeclaredTable) else DeclaredTable(config=t) for t in tables]
        if declared:
            frames = self._ask_all(
                Call.DECLARE_TABLES,
                messages.DeclareTables(tables=tuple(declared), run=self.config.run).model_dump_json(),
            )
            for text in dict.fromkeys(text for frame in frames for text in json.loads(frame.text)["changes"]):
                _log.warning("%s: the code's value is used", text)
            self._declared |= {table.config.name: table for table in declared}

    def configs(self) -> dict[str, TableConfig]:
        """Return the configuration of every table on the servers."""
        return {table.config.name: table.config for table in self._served()}

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table, all servers together."""
        answers = [json.loads(frame.text)["tables"] for frame in self._ask_all(Call.STATS)]
        return {name: TableStats.total([TableStats(**answer[name]) for answer in answers]) for name in answers[0]}

    def slot_counts(self, table: str) -> dict[int, int]:
        """Count the rows of each slot of a table whose ids have slots, all servers together."""
        require_known([table], self._declared)
        counts: Counter[int] = Counter()
        for frame in self._ask_all(Call.COUNT_SLOTS, messages.CountSlots(table=table).model_dump_json()):
            counts.update({int(slot): rows for slot, rows in json.loads(frame.text)["slots"].items()})
        return dict(sorted(counts.items()))

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove rows of all tables that have expired at `now`, by default the newest event time of each. Returns how many, by
        table."""
        stats = self.stats()
        if now is None:
            moments = {name: one.max_event_time for name, one in stats.items()}
        else:
            moments = dict(now) if isinstance(now, Mapping) else dict.fromkeys(stats, now)
        text = messages.Evict(push=self.next_push(), now=moments).model_dump_json()
        counts = [json.loads(frame.text)["evicted"] for frame in self._ask_all(Call.EVICT, text)]
        return {name: sum(count[name] for count in counts) for name in moments}

    def health(self) -> list[dict[str, object]]:
        """Return the health report of each server: tables, bytes and their limit, seconds since it started, and more.

        `out_of_memory` says why the server would refuse another row, and is empty if it would not.
        """
        return [json.loads(frame.text) for frame in self._ask_all(BasicCall.HEALTH)]

    def is_initialised(self) -> bool:
        """Whether every server holds trained or restored state since it started."""
        return all(json.loads(frame.text)["initialised"] for frame in self._ask_all(Call.IS_INITIALISED))

    def mark_initialised(self) -> None:
        """Mark the state of every server as initialised, until it is started again."""
        self._ask_all(Call.MARK_INITIALISED)

    def count_from(self, step: int) -> None:
        """Set the global step that servers derive from pushes to `step`, on those that do not know it yet."""
        self._ask_all(Call.COUNT_FROM, CountFrom(step=step).model_dump_json())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Let the servers save what they hold, each in its own folder. `folder` becomes the checkpoint that names them.

        All servers need a folder, `monolith ps --folder`, on a disk that readers of the checkpoint can access.
        """
        save_servers(self.links, folder)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Let the servers restore a checkpoint of any number of servers. On an error nothing has changed."""
        self.prepare_restore(folder)()

    def prepare_restore(self, folder: str | os.PathLike[str], *, only_fresh: bool = False) -> Callable[[], None]:
        """Let every server read the buckets it owns. Returns a function that puts them in place on all servers."""
        return prepare_servers(self.links, folder, only_fresh=only_fresh)

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Let the servers begin their parts of the checkpoint `path`."""
        return begin_server_saves(self.links, path, step=step)

    def open_log(self, model_dir: str) -> None:
        """Do nothing: a server logs into its own folder from its start."""

    def begin_cut(self, *, step: int) -> None:
        """Return None: every server commits when it decides to, so no step is in all of their logs."""

    def begin_restore(
        self, path: str | None, *, only_fresh: bool, rows_only: bool = False, **choices: Unpack[RestoreChoices]
    ) -> Callable[[], None]:
        """Let the servers read their parts of the checkpoint `path`. Returns a function that puts them in place.

        None: the function lets the servers drop all that they hold.
        """
        return prepare_servers(self.links, path, only_fresh=only_fresh, rows_only=rows_only, **choices)

    def lost(self, checkpoint: str, *, trained: bool) -> list[str]:
        """Return the addresses of servers that hold nothing, although more was trained on them than `checkpoint` has."""
        health = dict(zip(self.addresses, self.health(), strict=True))
        if trained or any(one["initialised"] and one["checkpoint"] != checkpoint for one in health.values()):
            # A server that owns nothing, as one that has just been added, has nothing to lose.
            return [address for address, one in health.items() if not one["initialised"] and one["owns"]]
        return []

    def moved_on(self, checkpoint: str) -> list[str]:
        """Return the addresses of servers that hold something other than `checkpoint`, "" for nothing at all."""
        health = zip(self.addresses, self.health(), strict=True)
        # One that is not initialised is restored anyway, if there is something to restore.
        return [a for a, one in health if one["checkpoint"] != checkpoint and (one["initialised"] or not checkpoint)]

    def refresh_routes(self) -> None:
        """Find the servers that now own these buckets. A group without buckets has nothing to find."""

    def rejoin(self) -> None:
        """Rejoin all servers after a `ServerRestartedError`, and declare the tables to those that are new."""
        for link in self.links:
            link.instance = 0
        self._join()
        self.declare(list(self._declared.values()))

    def positions(self) -> tuple[list[HeldPosition], list[HeldPosition]]:
        """Return the positions of this worker that the servers have recorded, in buckets and in dense parameters.

        Each is that of all buckets, or parameters, of a server that have had the same batches. Buckets that have had no batch,
        of a server that has met the worker in an earlier epoch, are at batch 0.
        """
        buckets: list[HeldPosition] = []
        parameters: list[HeldPosition] = []
        for joined in self._joined_all():
            buckets += [at.position for at in joined.tables]
            parameters += [at.position for at in joined.dense]
            seen = mask_of(pair for at in joined.tables for pair in at.ranges)
            if joined.known and (mask_of(joined.ranges) & ~seen).any():
                buckets.append(HeldPosition(batches=0, epoch=0))
        return buckets, parameters

    def progress(self) -> WorkerProgress | None:
        """Return the last positions of this worker that the servers acknowledged. None if the worker has no fixed name."""
        if self.config.worker is None:
            return None
        buckets, parameters = self.positions()
        found = [*buckets, *parameters]
        last_batch = max((position.batches for position in found), default=0)
        told = last_batch or any(position.state is not None for position in found)
        if not told or any(position.epoch == self.epoch for position in found):
            return WorkerProgress(last_batch=last_batch, worker=self.config.worker, everyone=self.everyone)
        # Only pushes to tables record the end of the data, so of a batch that everything has had the buckets know more.
        # Before its first batch a worker on a stream tells where it begins, which a bucket may not have heard.
        order = [(position.batches, position.state is None, position.ended, at) for at, position in enumerate(buckets)]
        last = [buckets[min(order)[-1]]] if buckets else []
        behind = min([*last, *parameters], key=lambda position: position.batches)
        ahead = {position.batches: position for position in found if position.batches > behind.batches}
        return WorkerProgress(
            behind=behind,
            last_batch=last_batch,
            ahead=tuple(ahead[batch] for batch in sorted(ahead)),
            worker=self.config.worker,
            everyone=self.everyone,
        )

    def everyone(self) -> dict[str, list[tuple[int, HeldPosition]]]:
        """Return the positions of all workers that the servers have heard of, by name and with their epochs."""
        found: dict[str, list[tuple[int, HeldPosition]]] = {}
        for frame in self._ask_all(Call.POSITIONS):
            for name, positions in messages.WorkerPositionsAt.from_json(frame.text).workers.items():
                found.setdefault(name, []).extend((position.epoch, position) for position in positions)
        return found

    def shut_down_servers(self) -> None:
        """Ask all servers to stop."""
        self._ask_all(BasicCall.SHUTDOWN)

    def close(self) -> None:
        """Close all connections. The servers keep running."""
        for link in self.links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.addresses))}, worker={self._worker!r})"

    def _linked(self, address: str) -> Link:
        link = link_to(address, self.config)
        if self.config.on_restart == "rejoin":
            link.on_restored = lambda meant: self._join_restored(link, meant)
        link.on_unavailable = lambda: self._look_for(link)
        return link

    def _join(self) -> None:
        self._joined()
        if self._find is not None:
            for link in self.links:
                link.server = ask_buckets(link).server

    def _joined_all(self) -> list[messages.Joined]:
        """Return what the servers know about this worker. Together they cover all buckets and parameters."""
        return self._joined()

    def _joined(self) -> list[messages.Joined]:
        """Return what each server knows about this worker."""
        return [messages.Joined.from_json(frame.text) for frame in self._ask_all(Call.JOIN, self._join_text())]

    def _join_text(self) -> str:
        return messages.Join(worker=self._worker, epoch=self._epoch, nonce=self._nonce).model_dump_json()

    def _join_restored(self, link: Link, meant: int) -> None:
        """Rejoin a server that has restored itself since the incarnation `meant`."""
        with self._rejoining:
            if link.instance != meant:
                return  # another thread has rejoined it
            link.instance = 0
            link.call(Call.JOIN, self._join_text())
            self._declare_to(link)
            _log.info("the server at %s was restarted and has restored itself: joined it again", link.address)

    def _declare_to(self, link: Link) -> None:
        if self._declared:
            declare = messages.DeclareTables(tables=tuple(self._declared.values()), run=self.config.run)
            link.call(Call.DECLARE_TABLES, declare.model_dump_json())

    def _look_for(self, link: Link) -> None:
        """Check whether the server of `link` has moved to another address."""
        if self._find is not None:
            soon = self.config.model_copy(update={"timeout": min(self.config.timeout, FIND_SECONDS)})
            follow_server(link, self.addresses, self._find, lambda address: link_to(address, soon))

    def next_push(self) -> Push:
        """Return the number of the next change this worker makes."""
        return Push(worker=self._worker, epoch=self._epoch, sequence=next(self._sequences))

    def push_by_round(self) -> Callable[[int], Push]:
        """Return a function that numbers the rounds of a change that is sent in parts. All parts of a round have one number."""
        made: dict[int, Push] = {}

        def push_of(attempt: int) -> Push:
            if attempt not in made:
                made[attempt] = self.next_push()
            return made[attempt]

        return push_of

    def _ask_all(self, call: CallNumber, text: str = "{}") -> list[Frame]:
        return finish_all([link.begin(call, text) for link in self.links])

    def _served(self) -> tuple[DeclaredTable, ...]:
        # All servers have the same declarations.
        return messages.DeclareTables.from_json(self.links[0].call(Call.CONFIGS).text).tables


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
