"""`ShardServer`: holds the rows of some buckets of an export, and answers lookups of them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, NoReturn, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from monolith import _core
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, OwnershipChangedError
from monolith.ps.protocol.calls import CHANGES
from monolith.ps.protocol.calls import Call as ServerCall
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ps.server.served_tables import ServedTables, require_count
from monolith.serve.manifest import CollectionSpec, ExportManifest, Signature, read_export_manifest, version_folder
from monolith.serve.replica import Lag
from monolith.serve.shards.messages import ServedCollection, ShardCall, ShardDescription, ShardLookup, ShardRead
from monolith.table.buckets import NUM_BUCKETS, bucket_ranges
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import TableState
from monolith.table.table_file import read_rows_into
from monolith.transport.calls import Answer, BasicCall, CallNumber, FrameCalls, FrameMemory, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.server import FrameServer, ListenConfig, require_safe
from monolith.urls import LocalPath

__all__ = ["ShardCalls", "ShardConfig", "ShardServer", "ShardTables", "load_shard"]

MAX_CACHED_TEXT = 16384
"""Characters of the longest text of a lookup that is cached, so that clients cannot fill the memory."""
FRAME_BYTES = 2**30
"""Bytes of requests and answers in memory. Further ones are refused, and clients ask another replica."""

LAG_SECS = 0.02
"""Seconds for which answers repeat the lag that was measured last."""

_log = logging.getLogger(__name__)


class ShardConfig(ListenConfig):
    """Which rows a shard holds, where it listens, which clients it accepts, and its limits.

    Example:
        >>> ShardConfig(export=Path("exported_models/7"), shard=1, shards=2).buckets
        range(2048, 4096)
    """

    config_group: ClassVar[str] = "serve"

    export: LocalPath
    """Folder of an export, or of numbered exports, of which the newest complete one is served."""
    shard: Annotated[int, Field(ge=0)] = 0
    """Number of the shard."""
    shards: Annotated[int, Field(ge=1, le=NUM_BUCKETS)] = 1
    """How many shards hold the export together."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.shard >= self.shards:
            raise ValueError(f"shard must be below shards, {self.shard} < {self.shards}")
        return self

    @property
    def buckets(self) -> range:
        """The buckets whose rows it holds."""
        return bucket_ranges(self.shards)[self.shard]


@dataclass(frozen=True, kw_only=True)
class ShardTables:
    """The rows of a shard in memory."""

    description: ShardDescription
    collections: tuple[ServedTables, ...]
    """The tables of each collection."""
    step: int
    """Global step of the export."""
    run: str = ""
    """The identity of the run that was exported. Empty: not known."""

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(len(table) for tables in self.collections for table in tables.all())


def load_shard(export: str | Path, shard: int = 0, shards: int = 1) -> ShardTables:
    """Read the rows of one of `shards` shards from the table files of an export.

    Files are read block by block, and rows of other shards are not kept, so memory is needed for the rows of this shard only.
    Every file is checked against the manifest first.

    Raises:
        CorruptFileError: the export is damaged or incomplete.
    """
    folder = version_folder(Path(export))
    manifest = read_export_manifest(folder)
    try:
        signature = Signature.from_json((folder / "signature.json").read_text())
    except (ConfigError, FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{folder}: {error}") from None
    buckets = bucket_ranges(shards)[shard]
    collections = tuple(_load_collection(spec, folder, manifest, buckets) for spec in signature.collections)
    description = ShardDescription(
        version=signature.version,
        export=manifest.checksum,
        shard=shard,
        shards=shards,
        ranges=((buckets.start, buckets.stop),),
        collections=tuple(
            ServedCollection(path=spec.path, tables=tuple(tables.declared()))
            for spec, tables in zip(signature.collections, collections, strict=True)
        ),
    )
    run = "" if signature.run is None else signature.run.identity
    return ShardTables(description=description, collections=collections, step=signature.step, run=run)


def _load_collection(spec: CollectionSpec, folder: Path, manifest: ExportManifest, buckets: range) -> ServedTables:
    unlisted = [file for file in spec.tables.values() if file not in manifest.files]
    if unlisted:
        raise CorruptFileError(f"{folder / 'signature.json'}: names {unlisted[0]!r}, which the manifest does not list")
    paths = [folder / file for file in spec.tables.values()]
    served = ServedTables()
    served.declare([DeclaredTable(config=_config_in(path, buckets)) for path in paths])
    for table, path in zip(served.all(), paths, strict=True):
        _fill(table, path, buckets)
    return served


def _config_in(path: Path, buckets: range) -> TableConfig:
    file = _core.TableFile(str(path))
    try:
        config = TableConfig.from_json(file.metadata.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: its configuration cannot be read: {error}") from None
    # No more than its share of the rows fills: a damaged file must not make us ask for all memory.
    capacity = min(config.initial_capacity, file.rows) * len(buckets) // NUM_BUCKETS
    return config.model_copy(update={"initial_capacity": capacity})


def _fill(table: EmbeddingTable, path: Path, buckets: range) -> None:
    read_rows_into(table, path, buckets)
    max_event_time, updates, scales = _core.TableFile(str(path)).state
    table.set_state(TableState(max_event_time=max_event_time, updates=updates, hashnet_scales=tuple(scales)))


class ShardCalls(FrameCalls):
    """Answers the frames of a shard, without the network. Nothing that a client sends changes a row.

    A request names the export that its client serves. Apart from that it does not matter which incarnation of a shard answers.

    Args:
        tables: the rows.
        max_frame_bytes: larger requests and answers are refused.
        lag: returns how far the rows are behind training. None if they stay as they were exported.
    """

    def __init__(
        self, tables: ShardTables, *, max_frame_bytes: int = 2**28, lag: Callable[[], Lag | None] = lambda: None
    ) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self.tables = tables
        self.frames = FrameMemory(FRAME_BYTES)
        self._lag, self._started = lag, time.monotonic()
        self._lag_told = (-LAG_SECS, "{}")
        self._described = tables.description.model_dump_json()
        self._handlers |= {
            BasicCall.HEALTH: self._health,
            ShardCall.DESCRIBE: self._describe,
            ShardCall.STATS: self._stats,
            ShardCall.READ_ROWS: self._read_rows,
            ShardCall.READ_ENTRIES: self._read_entries,
            ShardCall.COUNT_SLOTS: self._count_slots,
        }
        self._handlers.update((ServerCall(call), _refuse) for call in CHANGES)

    def _require_mine(self, frame: Frame) -> None:
        """Accept requests for any incarnation: the rows are those of the export that each request names."""

    def _answered(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        # Rows are written into the answer itself.
        return self._lookup(frame, out) if frame.call == ShardCall.LOOKUP else super()._answered(frame, out)

    def _known(self) -> list[CallNumber]:
        return sorted([*super()._known(), ShardCall.LOOKUP])

    def _lookup(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        text = frame.text
        lookup = (_cached_lookup if len(text) <= MAX_CACHED_TEXT else ShardLookup.from_json)(text)
        return self._collection(lookup).answer(
            lookup,
            frame,
            instance=self.instance,
            max_bytes=self._max_frame_bytes,
            memory=self.frames,
            text=self._lag_text(),
            out=out,
        )

    def _lag_text(self) -> str:
        """Return how far the rows are behind training, as JSON, not older than `LAG_SECS`."""
        now = time.monotonic()
        if now >= self._lag_told[0] + LAG_SECS:
            lag = self._lag()
            self._lag_told = (now, "{}" if lag is None else json.dumps(_as_json(lag)))
        return self._lag_told[1]

    def _collection(self, read: ShardLookup | ShardRead) -> ServedTables:
        mine = self.tables.description
        if read.export != mine.export:
            raise OwnershipChangedError(
                f"export: the shard serves {mine.export[:12]} (version {mine.version}), the request is for {read.export[:12]}; "
                "ask a replica of that export"
            )
        if read.collection >= len(self.tables.collections):
            raise InvalidArgumentError(
                f"collection: expected below {len(self.tables.collections)}, got {read.collection}"
            )
        return self.tables.collections[read.collection]

    def _health(self, frame: Frame) -> Answer:
        described, lag = self.tables.description, self._lag()
        held = [table.stats() for tables in self.tables.collections for table in tables.all()]
        return json_answer(
            version=described.version,
            export=described.export,
            shard=described.shard,
            shards=described.shards,
            ranges=described.ranges,
            tables=len(held),
            rows=sum(stats.rows for stats in held),
            bytes=sum(stats.bytes for stats in held),
            seconds=time.monotonic() - self._started,
            lag=None if lag is None else _as_json(lag),
        )

    def _describe(self, frame: Frame) -> Answer:
        return Answer(text=self._described)

    def _stats(self, frame: Frame) -> Answer:
        tables = self._collection(message_of(ShardRead, frame))
        return json_answer(tables={name: asdict(stats) for name, stats in tables.stats().items()})

    def _read_rows(self, frame: Frame) -> Answer:
        read = message_of(ShardRead, frame)
        return Answer(arrays=self._collection(read).rows(read.table, read.ranges))

    def _read_entries(self, frame: Frame) -> Answer:
        read = message_of(ShardRead, frame)
        require_count(frame.arrays, 1)
        entries = self._collection(read).entries(read.table, frame.arrays[0])
        arrays = (entries.found.to(torch.uint8), entries.values, entries.times, *entries.slots.values())
        return Answer(text=json.dumps({"slots": list(entries.slots)}), arrays=tuple(array.numpy() for array in arrays))

    def _count_slots(self, frame: Frame) -> Answer:
        read = message_of(ShardRead, frame)
        return json_answer(slots=self._collection(read).slot_counts(read.table))


def _refuse(frame: Frame) -> NoReturn:
    raise InvalidArgumentError(
        f"call: {ServerCall(frame.call).name.lower()} changes rows, and an embedding shard is read-only; "
        "train on parameter servers"
    )


def _as_json(lag: Lag) -> Mapping[str, object]:
    return {**asdict(lag), "positions": dict(lag.positions)}


# The lookups of a model differ in their arrays, rarely in their text.
_cached_lookup = lru_cache(maxsize=256)(ShardLookup.from_json)


class ShardServer(FrameServer):
    """An embedding shard: serves from its construction, which reads the rows, until `close`.

    Args:
        config: which rows it holds, and where it listens.
        tables: rows that were read before. None: read them from `config.export`.
        lag: returns how far the rows are behind training, for health checks. None if they stay as they were exported.

    Example:
        >>> from monolith.serve.shards.shard_server import ShardConfig, ShardServer
        >>> server = ShardServer(ShardConfig(export=Path("exported_models"), shard=0, shards=2))  # doctest: +SKIP
        >>> server.address  # doctest: +SKIP
        '127.0.0.1:41233'
    """

    def __init__(
        self,
        config: ShardConfig,
        tables: ShardTables | None = None,
        *,
        lag: Callable[[], Lag | None] = lambda: None,
    ) -> None:
        self.config = config
        require_safe(config)
        self.tables = load_shard(config.export, config.shard, config.shards) if tables is None else tables
        super().__init__(config, ShardCalls(self.tables, max_frame_bytes=config.max_message_bytes, lag=lag))
        described = self.tables.description
        _log.info(
            "shard %d of %d holds %d rows of version %d, export %s",
            described.shard,
            described.shards,
            self.tables.rows,
            described.version,
            described.export[:12],
        )
