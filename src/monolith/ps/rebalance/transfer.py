"""Transfers of buckets and dense parameters: the payload, the destination's side, and the lease of the client that moves them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, MemoryLimitError, ProtocolError
from monolith.ps.protocol.control_messages import (
    InstallBuckets,
    Installed,
    InstalledTable,
    OutgoingTransfer,
    Refused,
    RefuseTransfer,
)
from monolith.ps.server.dense_parameters import DenseParameters
from monolith.ps.server.ledger_state import put_progress, read_ledger
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.served_tables import ServedTables, require_count
from monolith.ps.server.state import ServerState
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.buckets import bucket_of, mask_of
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import TableState

__all__ = [
    "BucketInstalls",
    "MoverLease",
    "REFUSALS",
    "dense_chunk",
    "drop_rows",
    "packed_dense",
    "packed_rows",
    "put_dense",
    "put_rows",
    "transfer_size",
    "unpacked_dense",
]

SECONDS = 60.0
"""Seconds without a call after which another client may move buckets."""
ENDED_MOVERS = 64
"""Clients that have finished, whose delayed messages are refused."""


class MoverLease:
    """Lets one client at a time move the buckets of a server, and refuses delayed messages of those that have finished.

    Example:
        >>> lease = MoverLease()
        >>> lease.require(5)
        >>> lease.end(5)
        >>> lease.require(6)
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mover, self._until = 0, 0.0
        self._ended: deque[int] = deque(maxlen=ENDED_MOVERS)

    def require(self, rebalance: int) -> None:
        """Let `rebalance` move something now, and no other client for a while."""
        if rebalance in self._ended:
            # A delayed message: what it asks for may have been undone since.
            raise InvalidArgumentError("rebalance: it has ended")
        now = self._clock()
        if rebalance != self._mover and now < self._until:
            raise InvalidArgumentError(
                "rebalance: another client is moving buckets of this server; let it finish, or wait a minute if it has died"
            )
        self._mover, self._until = rebalance, now + SECONDS

    def end(self, rebalance: int) -> None:
        """Record that `rebalance` has finished."""
        self._ended.append(rebalance)
        if rebalance == self._mover:
            self._until = 0.0


REFUSALS = (ConfigError, InvalidArgumentError, MemoryLimitError, ProtocolError)
"""Errors of a destination that has not installed a transfer and never will."""


class BucketInstalls:
    """The calls of a server as the destination of transfers. `commit` makes everything durable, if the server has a folder."""

    def __init__(
        self, state: ServerState, owned: OwnedBuckets, lease: MoverLease, *, commit: Callable[[], object]
    ) -> None:
        self._state, self._owned, self._lease, self._commit = state, owned, lease, commit

    def install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Installed:
        """Own the contents of a transfer from now on. Idempotent."""
        again = self._install(install, arrays)
        # Also for a retry: the lost answer may have been that it could not be made durable.
        self._commit()
        return Installed(again=again)

    def refuse(self, transfer: RefuseTransfer) -> Refused:
        """Never own the buckets of a transfer, unless they are owned already."""
        with self._state.gate.closed(changes=True):
            installed = self._owned.refuse(transfer)
        if installed:
            # The source deletes its rows after this answer.
            self._commit()
        return Refused(installed=installed)

    def _install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> bool:
        with self._state.gate.closed(changes=True):
            try:
                if self._owned.has_installed(install):
                    return True
                if install.rebalance:
                    self._lease.require(install.rebalance)
                self._put(install, arrays)
            except (*REFUSALS, MemoryError):
                self._owned.refuse(install)
                raise
            if install.coordination:
                # The global step is that of the first bucket.
                self._state.pushes.base_step = install.base_step
            self._owned.install(install)
            self._state.initialised = True
            return False

    def _put(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
        """Hold the contents of a transfer, and the positions of workers in it. On an error nothing has changed."""
        try:
            positions = read_ledger(install.positions, "install_buckets")
            if install.coordination:
                # Before the rows: if those are refused, this server does not own the first bucket, and nobody reads it here.
                self._state.coordination.take(install.coordination)
        except CorruptFileError as error:
            raise InvalidArgumentError(str(error)) from None
        if install.buckets is None:
            put_dense(self._state.dense, install, arrays)
            put_progress(self._state.pushes, positions, names=install.dense)
        else:
            put_rows(self._state.tables, install, arrays)
            put_progress(self._state.pushes, positions, buckets=mask_of([install.buckets]))


def transfer_size(tables: ServedTables, owned: int, limit: int) -> int:
    """Return how many of `owned` buckets hold about `limit` bytes of rows, at least one."""
    stored = sum(len(table) * (table.row_bytes + 16) for table in tables.all())
    return max(1, limit * owned // stored) if stored else owned


def packed_rows(
    tables: ServedTables, giving: OutgoingTransfer, *, giver: int, rebalance: int
) -> tuple[InstallBuckets, list[np.ndarray]]:
    """Return the message that sends buckets, and its arrays."""
    assert giving.buckets is not None
    tables_sent, arrays = [], []
    for declared, table in zip(tables.declared(), tables.all(), strict=True):
        found, state = table.rows_of_buckets(range(*giving.buckets)), table.state()
        arrays += [found.ids, found.times.astype(np.int64), found.rows]
        tables_sent.append(
            InstalledTable(
                declared=declared,
                max_event_time=state.max_event_time,
                updates=state.updates,
                hashnet_scales=state.hashnet_scales,
            )
        )
    install = InstallBuckets(
        giver=giver,
        number=giving.number,
        server=giving.server,
        rebalance=rebalance,
        buckets=giving.buckets,
        tables=tuple(tables_sent),
        positions=giving.positions,
    )
    return install, arrays


def put_rows(tables: ServedTables, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
    """Replace the rows of the buckets of a transfer. On an error these buckets are empty."""
    assert install.buckets is not None
    _require_rows(tables, install, install.buckets, arrays)
    drop_rows(tables, install.buckets)
    try:
        for index, one in enumerate(install.tables):
            ids, times, rows = arrays[3 * index : 3 * index + 3]
            table = tables.writable(one.declared.config.name, ids)
            table.insert_rows(ids, times.astype(np.uint32), rows)
            _catch_up(table, one)
    except BaseException:
        drop_rows(tables, install.buckets)
        raise


def _require_rows(
    tables: ServedTables, install: InstallBuckets, piece: tuple[int, int], arrays: Sequence[np.ndarray]
) -> None:
    """Create the tables of a transfer if needed, and raise unless its rows fit them."""
    require_count(arrays, 3 * len(install.tables))
    tables.declare([one.declared for one in install.tables])
    for index, one in enumerate(install.tables):
        ids, times, rows = arrays[3 * index : 3 * index + 3]
        table = tables.writable(one.declared.config.name, ids)
        fits = times.dtype == np.int64 and times.shape == ids.shape and rows.dtype == np.uint8
        if not fits or rows.shape != (len(ids), table.row_bytes):
            raise InvalidArgumentError(
                f"rows of table {table.name!r}: expected {len(ids)} of {table.row_bytes} bytes, and a time for each"
            )
        buckets, (first, end) = bucket_of(ids), piece
        if ((buckets < first) | (buckets >= end)).any() or ((times < 0) | (times >= 2**32)).any():
            raise InvalidArgumentError(f"rows of table {table.name!r}: expected ids of the buckets {piece}")
        if len(one.hashnet_scales) != len(table.state().hashnet_scales):
            raise InvalidArgumentError(f"table {table.name!r}: expected a scale for each of its segments")


def drop_rows(tables: ServedTables, buckets: tuple[int, int]) -> None:
    """Remove the rows of `buckets` from all tables."""
    for table in tables.all():
        table.erase(table.rows_of_buckets(range(*buckets)).ids)


def _catch_up(table: EmbeddingTable, sent: InstalledTable) -> None:
    """Take over the counters of the source, if they are newer: all servers of a group see every step."""
    mine = table.state()
    newer = sent.updates > mine.updates
    table.set_state(
        TableState(
            max_event_time=max(mine.max_event_time, sent.max_event_time),
            updates=sent.updates if newer else mine.updates,
            hashnet_scales=sent.hashnet_scales if newer else mine.hashnet_scales,
        )
    )


def dense_chunk(sizes: Mapping[str, int], names: Iterable[str], limit: int) -> tuple[str, ...]:
    """Return the first of `names` that are held, up to about `limit` bytes, at least one if there is one.

    Example:
        >>> dense_chunk({"a": 4, "b": 4, "c": 4}, ["b", "c", "d"], 6)
        ('b',)
    """
    held = [name for name in names if name in sizes]
    # Values and, at most, two numbers of optimizer state for each.
    ends = np.cumsum([3 * sizes[name] for name in held])
    return tuple(held[: max(1, int(np.searchsorted(ends, limit, side="right")))])


def packed_dense(
    dense: DenseParameters, giving: OutgoingTransfer, *, giver: int, rebalance: int
) -> tuple[InstallBuckets, list[np.ndarray]]:
    """Return the message that sends dense parameters, and its arrays."""
    packed = pack_state(dense.state(giving.dense))
    install = InstallBuckets(
        giver=giver,
        number=giving.number,
        server=giving.server,
        rebalance=rebalance,
        dense=giving.dense,
        positions=giving.positions,
    )
    return install, [np.frombuffer(data, dtype=np.uint8) for data in (packed.structure, packed.tensor_bytes())]


def unpacked_dense(names: Sequence[str], arrays: Sequence[np.ndarray]) -> dict[str, State]:
    """Return the state of the parameters `names` that came as two arrays of bytes, or raise `InvalidArgumentError`."""
    require_count(arrays, 2)
    if any(array.dtype != np.uint8 or array.ndim != 1 for array in arrays):
        raise InvalidArgumentError("dense parameters: expected their structure and tensors as bytes")
    try:
        found = unpack_state(arrays[0].tobytes(), arrays[1].tobytes(), "dense parameters")
    except CorruptFileError as error:
        raise InvalidArgumentError(str(error)) from None
    if not isinstance(found, dict) or set(found) != set(names):
        raise InvalidArgumentError(f"dense parameters: expected the state of {', '.join(names)}")
    return found


def put_dense(dense: DenseParameters, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
    """Train the parameters of a transfer here. On an error nothing has changed."""
    try:
        dense.take_over(unpacked_dense(install.dense, arrays))
    except CorruptFileError as error:
        raise InvalidArgumentError(str(error)) from None
