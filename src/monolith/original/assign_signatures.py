"""The receiving end of parameter sync: assign signatures of serving tables, and a server that takes pushes.

Replicas that follow a run (`monolith serve --run`) need none of this. It is for processes that are synchronised as in the
original: a process that trains pushes rows to them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from google.protobuf.message import DecodeError

from monolith.config import Config
from monolith.errors import InvalidArgumentError, ProtocolError
from monolith.proto.parameter_sync_pb2 import DeltaEmbeddingHashTable, PushRequest, PushResponse
from monolith.serve.predictor import Predictor
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.calls import Answer, BasicCall, CallNumber, FrameCalls, WireInt, message_of
from monolith.transport.frames import Frame
from monolith.transport.server import FrameServer, ListenConfig

__all__ = [
    "HASHTABLE_ASSIGN",
    "ParameterSyncServer",
    "PushHeader",
    "RAW_ASSIGN",
    "SyncCall",
    "TargetTables",
    "apply_push",
    "hashtable_assign",
    "raw_assign",
    "target_tables",
]

HASHTABLE_ASSIGN = "hashtable_assign"
"""The signature that assigns rows of tables by name."""
RAW_ASSIGN = "raw_assign"
"""The signature of a multi table is its name, a slash and this."""
MAX_SENDERS = 1024
"""Processes that push, of which the last push is remembered."""

TargetTables = Mapping[str, Sequence[EmbeddingTable]]
"""Tables by the name that pushes call them by. Those of one name are copies."""


class SyncCall(CallNumber):
    """The calls of a target of parameter sync. 192..199 are reserved."""

    PUSH = 192

    @property
    def changes_state(self) -> bool:
        """Every push does."""
        return True


class PushHeader(Config):
    """The text of a push. Its array is the serialized `PushRequest`."""

    sender: WireInt
    """Drawn by the process that pushes."""
    sequence: WireInt
    """Grows with every request of a sender. A request that comes late, after a newer one, is refused: its rows are old."""


def target_tables(predictor: Predictor) -> TargetTables:
    """Return the tables of a predictor by the names that a run has for them.

    A run with several stores puts the number of the store before the name.
    """
    found: dict[str, list[EmbeddingTable]] = {}
    for number, store in enumerate(predictor.stores.values()):
        for name, table in store.tables.items():
            found.setdefault(name, []).append(table)
            if len(predictor.stores) > 1:
                found.setdefault(f"{number}/{name}", []).append(table)
    if not found:
        raise InvalidArgumentError("predictor: its tables are in other processes; let these take the pushes")
    return found


def hashtable_assign(tables: TargetTables, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assign rows of several tables: `<T>_id` int64 [n] and `<T>_value` float32 [n, dim] for each table T.

    Ids without a row get one. Rows of zeros are removed if the table skips them (`TableConfig.skip_zero_rows`).

    Returns:
        `<T>_result`: the number of ids.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(2, name="item"))
        >>> hashtable_assign({"item": [table]}, {"item_id": torch.tensor([7]), "item_value": torch.ones(1, 2)})
        {'item_result': tensor(1)}
        >>> table.lookup([7]).tolist()
        [[1.0, 1.0]]
    """
    results = {}
    for key in inputs:
        name, _, kind = key.rpartition("_")
        if kind not in ("id", "value") or f"{name}_id" not in inputs or f"{name}_value" not in inputs:
            raise InvalidArgumentError(f"inputs: expected <table>_id and <table>_value for every table, got {key!r}")
        if kind == "id":
            ids, values = inputs[key].reshape(-1).numpy(), inputs[f"{name}_value"].numpy()
            _assign(_copies(tables, name), name, ids, values)
            results[f"{name}_result"] = torch.tensor(len(ids))
    return results


def raw_assign(
    tables: TargetTables,
    names: Sequence[str],
    *,
    id: torch.Tensor,  # noqa: A002 - the name in the original's signature
    id_split: torch.Tensor,
    flat_value: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Assign rows of a multi table.

    Args:
        tables: the target.
        names: the sub-tables, in the order of `id_split`.
        id: int64 [n], the ids of all sub-tables.
        id_split: int64 [tables + 1], where the ids of each begin, and the end.
        flat_value: float32, all rows behind each other.

    Returns:
        `result`: 0.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> tables = {name: [EmbeddingTable(sgd_table_config(2, name=name))] for name in ("user", "item")}
        >>> raw_assign(
        ...     tables, ["user", "item"], id=torch.tensor([7]), id_split=torch.tensor([0, 0, 1]), flat_value=torch.ones(2)
        ... )
        {'result': tensor(0)}
        >>> len(tables["user"][0]), len(tables["item"][0])
        (0, 1)
    """
    splits = id_split.reshape(-1).tolist()
    if len(splits) != len(names) + 1 or splits != sorted(splits) or splits[0] != 0 or splits[-1] != id.numel():
        raise InvalidArgumentError(
            f"id_split: expected {len(names) + 1} rising offsets from 0 to {id.numel()}, one more than tables, got {splits}"
        )
    ids, flat, at = id.reshape(-1).numpy(), flat_value.reshape(-1).numpy(), 0
    parts = []
    for number, name in enumerate(names):
        some = ids[splits[number] : splits[number + 1]]
        dim = _copies(tables, name)[0].dim
        parts.append((name, some, flat[at : at + len(some) * dim].reshape(-1, dim)))
        at += len(some) * dim
    if at != len(flat):
        raise InvalidArgumentError(f"flat_value: expected {at} numbers for these ids, got {len(flat)}")
    for name, some, values in parts:
        _assign(_copies(tables, name), name, some, values)
    return {"result": torch.tensor(0)}


def apply_push(tables: TargetTables, request: PushRequest) -> PushResponse:
    """Apply a push. Tables that the target does not have are named in `error_message` and left out.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="item"))
        >>> delta = DeltaEmbeddingHashTable(unique_id="item", dim_size=1, fids=[7, 8], embeddings=[0.5, 0.25])
        >>> apply_push({"item": [table]}, PushRequest(signature_name="hashtable_assign", delta_hash_tables=[delta])).update_num
        2
    """
    deltas = [*request.delta_hash_tables, *request.delta_multi_hash_tables]
    known = [delta for delta in deltas if delta.unique_id in tables]
    # All are checked before any is applied.
    values = [_values(tables[delta.unique_id][0], delta) for delta in known]
    for delta, rows in zip(known, values, strict=True):
        _apply(tables[delta.unique_id], delta, rows)
    missing = sorted({delta.unique_id for delta in deltas} - set(tables))
    return PushResponse(
        status_code=0,
        error_message=f"tables that are not served here: {', '.join(missing)}" if missing else "",
        update_num=sum(len(delta.fids) for delta in known),
    )


def _values(table: EmbeddingTable, delta: DeltaEmbeddingHashTable) -> np.ndarray:
    if delta.dim_size != table.dim or len(delta.embeddings) != len(delta.fids) * table.dim:
        raise InvalidArgumentError(
            f"{delta.unique_id}: expected {len(delta.fids)} rows of {table.dim} numbers, got {len(delta.embeddings)} numbers of "
            f"dim {delta.dim_size}"
        )
    return np.array(delta.embeddings, dtype=np.float32).reshape(-1, table.dim)


def _apply(copies: Sequence[EmbeddingTable], delta: DeltaEmbeddingHashTable, values: np.ndarray) -> None:
    ids, erased = np.array(delta.fids, dtype=np.int64), np.array(delta.erased_fids, dtype=np.int64)
    if delta.HasField("end_bucket"):
        if not delta.first_bucket <= delta.end_bucket <= NUM_BUCKETS:
            raise InvalidArgumentError(
                f"end_bucket: expected {delta.first_bucket} to {NUM_BUCKETS}, got {delta.end_bucket}"
            )
        held = copies[0].rows_of_buckets(range(delta.first_bucket, delta.end_bucket)).ids
        erased = np.union1d(erased, np.setdiff1d(held, ids))
    scales = tuple(delta.scales)
    for table in copies:
        if len(erased):
            table.erase(erased)
        state = table.state()
        if scales and tuple(state.hashnet_scales) != scales:
            table.set_state(type(state)(max_event_time=0, updates=state.updates, hashnet_scales=scales))
    _assign(copies, delta.unique_id, ids, values)


def _assign(copies: Sequence[EmbeddingTable], name: str, ids: np.ndarray, values: np.ndarray) -> None:
    if values.shape != (len(ids), copies[0].dim):
        raise InvalidArgumentError(
            f"{name}_value: expected [{len(ids)}, {copies[0].dim}], one row for each id, got {list(values.shape)}"
        )
    if len(ids):
        for table in copies:
            table.assign(ids, values)


def _copies(tables: TargetTables, name: str) -> Sequence[EmbeddingTable]:
    if name not in tables:
        raise InvalidArgumentError(f"inputs: there is no table {name!r}; known are {', '.join(tables)}")
    return tables[name]


class _PushCalls(FrameCalls):
    def __init__(self, tables: TargetTables, *, max_frame_bytes: int) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self._tables = tables
        self._applying = threading.Lock()
        self._newest: OrderedDict[int, int] = OrderedDict()
        self._handlers |= {BasicCall.HEALTH: lambda frame: Answer(), SyncCall.PUSH: self._push}

    def _push(self, frame: Frame) -> Answer:
        header = message_of(PushHeader, frame)
        if len(frame.arrays) != 1 or frame.arrays[0].dtype != np.uint8:
            raise ProtocolError("push: expected one array of bytes, a serialized PushRequest")
        try:
            request = PushRequest.FromString(frame.arrays[0].tobytes())
        except DecodeError as error:
            raise ProtocolError(f"push: not a PushRequest: {error}") from None
        with self._applying:
            newest = self._newest.get(header.sender, 0)
            if header.sequence < newest:
                raise InvalidArgumentError(
                    f"sequence: {header.sequence} comes after {newest}; its rows are older and not applied"
                )
            self._newest[header.sender] = header.sequence
            self._newest.move_to_end(header.sender)
            while len(self._newest) > MAX_SENDERS:
                self._newest.popitem(last=False)
            response = apply_push(self._tables, request)
        return Answer(arrays=(np.frombuffer(response.SerializeToString(), np.uint8),))


class ParameterSyncServer(FrameServer):
    """Takes pushes for serving tables until `close`: a target of parameter sync.

    Anybody can call the original's assign signatures. This listens on this machine only, unless it has TLS and a token.

    Args:
        tables: what is served, such as `target_tables(predictor)`.
        config: where to listen.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> with ParameterSyncServer({"item": [EmbeddingTable(sgd_table_config(1, name="item"))]}) as target:
        ...     target.address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, tables: TargetTables, config: ListenConfig | None = None) -> None:
        config = config or ListenConfig()
        super().__init__(config, _PushCalls(tables, max_frame_bytes=config.max_message_bytes))
