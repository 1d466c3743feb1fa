"""Remote predict, as the original's entry asks its `ps_i`: names, signatures and outcomes over embedding shards."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    MonolithError,
    OverloadedError,
    OwnershipChangedError,
    ServerError,
    UnavailableError,
)
from monolith.ps.protocol.messages import DeclaredTable, TableRead
from monolith.serve.shards.addresses import SHARD_SERVICE, discovered_shards
from monolith.serve.shards.messages import ShardCall, ShardDescription, ShardLookup
from monolith.serve.shards.shard_map import ServedShard, choose_replica
from monolith.serve.shards.shard_replica import ShardClientConfig, ShardReplica
from monolith.table.arrays import Ids
from monolith.table.buckets import NUM_BUCKETS, bucket_of, bucket_owners, bucket_ranges
from monolith.transport.frames import Frame

__all__ = ["AgentHeartbeat", "RemotePredictOutput", "StatusCode", "ps_of", "remote_predict", "shard_models"]

REFRESH_SECS = 15.0
"""Seconds between two queries for addresses."""

_log = logging.getLogger(__name__)


class StatusCode(IntEnum):
    """The outcome of a remote predict, by the numbers of gRPC."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14


_CODES: tuple[tuple[type[MonolithError], StatusCode], ...] = (
    (DeadlineExceededError, StatusCode.DEADLINE_EXCEEDED),
    (OverloadedError, StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, StatusCode.UNAVAILABLE),
    (OwnershipChangedError, StatusCode.NOT_FOUND),
    (InvalidArgumentError, StatusCode.INVALID_ARGUMENT),
    (ConfigError, StatusCode.INVALID_ARGUMENT),
)


@dataclass(frozen=True, kw_only=True)
class RemotePredictOutput:
    """What a remote predict returned."""

    status_code: StatusCode
    status_error_message: str
    output_tensors: tuple[torch.Tensor, ...]
    """One for each alias that was asked for. Empty scalars, float32 [], if the call failed and failures are not raised."""


def ps_of(ids: Ids, num_ps: int) -> np.ndarray:
    """Return which of `num_ps` shards has each id: the owner of its bucket, not id modulo `num_ps` as in the original.

    Example:
        >>> ps_of([0, 1, 2**62], 2).tolist()
        [1, 1, 0]
    """
    owners = bucket_owners(bucket_ranges(num_ps), num_ps)
    found: np.ndarray = owners[bucket_of(ids)]
    return found


def shard_models(
    discovery: ServiceDiscovery, model: str = "", service: str = SHARD_SERVICE
) -> Callable[[], dict[str, tuple[str, ...]]]:
    """Return a function that finds the addresses of the shards that were announced, by the original's names for them.

    These are `<model>:ps_<i>`, or `ps:<i>` without a model, as agents of the first version name them.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     discovery.register("serving_shard_0", 0, "10.0.0.1:7200")
        ...     shard_models(discovery, "clicks")(), shard_models(discovery)()
        ({'clicks:ps_0': ('10.0.0.1:7200',)}, {'ps:0': ('10.0.0.1:7200',)})
    """
    find = discovered_shards(discovery, service)
    key = f"{model}:ps_" if model else "ps:"
    return lambda: {f"{key}{number}": found for number, found in enumerate(find(0)) if found}


class AgentHeartbeat:
    """The addresses of sub-models, queried again every 15 seconds, with connections that stay open. Thread-safe.

    Unlike in the original, a query that fails or returns nothing does not replace addresses that work, and no key can have an
    empty list.

    Args:
        query: returns the addresses of each sub-model, such as `shard_models(discovery, model)`.
        config: how to connect.
        refresh_secs: seconds between two queries.
        clock: seconds.
    """

    def __init__(
        self,
        query: Callable[[], Mapping[str, Sequence[str]]],
        *,
        config: ShardClientConfig | None = None,
        refresh_secs: float = REFRESH_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._query, self._refresh_secs, self._clock = query, refresh_secs, clock
        self._config = config or ShardClientConfig()
        self._lock = threading.Lock()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._replicas: dict[str, ShardReplica] = {}
        self._queried_at = clock()
        self._ask()
        self.api_version = int(any(":ps" in key for key in self._addresses))
        """1 if keys are `<model>:ps_<i>`, 0 if they are `ps:<i>`. Decided once, at the start."""

    def key_of(self, model_name: str, old_model_name: str = "") -> str:
        """Return the key of a sub-model. With version 0 it is the old name with its first "_" replaced by ":"."""
        return model_name if self.api_version else (old_model_name or model_name).replace("_", ":", 1)

    def replicas(self, key: str) -> tuple[ShardReplica, ...]:
        """Return the replicas of a sub-model. Raises `UnavailableError` if none is known."""
        with self._lock:
            if self._clock() - self._queried_at >= self._refresh_secs:
                self._queried_at = self._clock()
                self._ask()
            addresses = self._addresses.get(key, ())
            if not addresses:
                known = ", ".join(sorted(self._addresses)) or "none"
                raise UnavailableError(f"remote predict: no address of {key!r} is known; known are {known}")
            for address in addresses:
                if address not in self._replicas:
                    self._replicas[address] = ShardReplica(address, self._config)
            return tuple(self._replicas[address] for address in addresses)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for replica in self._replicas.values():
                replica.close()

    def _ask(self) -> None:
        try:
            found = self._query()
        except MonolithError as error:
            _log.warning("the addresses of sub-models cannot be queried, those known before are used: %s", error)
            return
        for key, addresses in found.items():
            if addresses:
                self._addresses[key] = tuple(addresses)
        for key in self._addresses.keys() - {key for key, addresses in found.items() if addresses}:
            _log.warning("%s is not listed any more; its last addresses are used", key)


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[torch.Tensor],
    output_tensor_alias: Sequence[str],
    *,
    agent: AgentHeartbeat,
    model_name: str | None = None,
    old_model_name: str = "",
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: int = 30,
    signature_name: str = "lookup",
) -> RemotePredictOutput:
    """Ask a sub-model `ps_i` for embeddings, as the original's entry does.

    Two signatures exist. `lookup` takes an int64 vector of ids for each table, under its name, and returns a float matrix under
    the same name. `raw_lookup` takes `id` (the ids of all tables, in the order in which they were exported) and `id_split`
    (where those of each table begin, and the end), and returns `flat_emb`, all rows behind each other. Ids that the shard does
    not hold read as unseen: see `ps_of`.

    Args:
        input_tensor_alias: names of the inputs.
        input_tensors: the inputs.
        output_tensor_alias: names of the outputs.
        agent: knows the addresses.
        model_name: the sub-model, such as `clicks:ps_0`.
        old_model_name: its name for agents of the first version, `ps_0`.
        model_version: the version of the export that must answer. -1: the one that is served.
        fail_op_on_rpc_error: raise errors. False: return their code and text.
        max_rpc_deadline_millis: time for all attempts, which is really applied. Other replicas are tried within it.
        signature_name: `lookup` or `raw_lookup`.

    Raises:
        ValueError: `model_name` is None.
    """
    if model_name is None:
        raise ValueError("model_name: expected the name of a sub-model, such as 'clicks:ps_0', got None")
    deadline = time.monotonic() + max_rpc_deadline_millis / 1000
    try:
        if len(input_tensor_alias) != len(input_tensors):
            raise InvalidArgumentError(
                f"input_tensors: expected {len(input_tensor_alias)}, one per alias, got {len(input_tensors)}"
            )
        inputs = dict(zip(input_tensor_alias, input_tensors, strict=True))
        replicas = agent.replicas(agent.key_of(model_name, old_model_name))
        outputs = _ask_any(replicas, _Signature(signature_name, inputs, model_name, model_version), deadline)
        missing = [alias for alias in output_tensor_alias if alias not in outputs]
        if missing:
            raise InvalidArgumentError(
                f"output_tensor_alias: {signature_name} returns {', '.join(outputs)}, not {missing[0]!r}"
            )
    except MonolithError as error:
        if fail_op_on_rpc_error:
            raise
        code = next((code for kind, code in _CODES if isinstance(error, kind)), StatusCode.INTERNAL)
        empty = tuple(torch.zeros(()) for _ in output_tensor_alias)
        return RemotePredictOutput(status_code=code, status_error_message=str(error), output_tensors=empty)
    found = tuple(outputs[alias] for alias in output_tensor_alias)
    return RemotePredictOutput(status_code=StatusCode.OK, status_error_message="", output_tensors=found)


@dataclass(frozen=True)
class _Signature:
    """A call of one signature, as a lookup of a shard."""

    name: str
    inputs: Mapping[str, torch.Tensor]
    model_name: str
    model_version: int

    def ids(self, described: ShardDescription) -> dict[str, np.ndarray]:
        """Return the ids of each table."""
        tables = [table.config.name for table in self._collection(described)]
        if self.name == "lookup":
            unknown = [alias for alias in self.inputs if alias not in tables]
            if unknown:
                raise InvalidArgumentError(
                    f"input_tensor_alias: no table {unknown[0]!r}; known are {', '.join(tables)}"
                )
            return {alias: tensor.reshape(-1).long().numpy() for alias, tensor in self.inputs.items()}
        if self.name != "raw_lookup" or self.inputs.keys() != {"id", "id_split"}:
            raise InvalidArgumentError(
                f"signature_name: expected lookup, or raw_lookup with id and id_split, got {self.name!r} with "
                f"{', '.join(self.inputs)}"
            )
        ids, splits = self.inputs["id"].reshape(-1).long().numpy(), self.inputs["id_split"].reshape(-1).tolist()
        rising = all(0 <= first <= end for first, end in itertools.pairwise(splits))
        if len(splits) != len(tables) + 1 or not rising or splits[0] != 0 or splits[-1] != len(ids):
            raise InvalidArgumentError(
                f"id_split: expected {len(tables) + 1} rising offsets from 0 to {len(ids)}, one more than tables, got {splits}"
            )
        return {name: ids[splits[at] : splits[at + 1]] for at, name in enumerate(tables)}

    def _collection(self, described: ShardDescription) -> Sequence[DeclaredTable]:
        if self.model_version not in (-1, described.version):
            raise OwnershipChangedError(
                f"model_version: {self.model_name} serves version {described.version}, expected {self.model_version}"
            )
        if len(described.collections) != 1:
            raise InvalidArgumentError(
                f"model_name: {self.model_name} has {len(described.collections)} collections, expected 1; use ShardStore"
            )
        return described.collections[0].tables

    def outputs(self, ids: Mapping[str, np.ndarray], frame: Frame) -> dict[str, torch.Tensor]:
        """Return the tensors of an answer by alias."""
        rows = [torch.from_numpy(array.copy()) for array in frame.arrays]
        if self.name == "lookup":
            return dict(zip(ids, rows, strict=True))
        return {"flat_emb": torch.cat([torch.zeros(0), *(row.reshape(-1) for row in rows)])}


def _ask_any(replicas: Sequence[ShardReplica], signature: _Signature, deadline: float) -> dict[str, torch.Tensor]:
    """Ask replicas, one after the other, until one answers or the deadline is over."""
    shard = ServedShard(ranges=((0, NUM_BUCKETS),), replicas=tuple(replicas))
    tried: list[ShardReplica] = []
    error: ServerError = UnavailableError(f"{signature.model_name}: no replica of {len(replicas)} answers")
    while len(tried) < 2 * len(replicas):
        fresh = [replica for replica in replicas if replica.described is None and replica not in tried]
        # A replica that failed before is asked again by the requests after its pause.
        due = [one for one in replicas if one.failures and time.monotonic() >= one.retry_at and one not in tried]
        replica = choose_replica(shard, tried) or next(iter([*fresh, *due]), None)
        left = deadline - time.monotonic()
        if replica is None or left <= 0:
            break
        limit = left / max(1, len(replicas) - len(tried))
        tried.append(replica)
        began = time.monotonic()
        try:
            return _ask_one(replica, signature, limit)
        except ServerError as failure:
            error = failure
            if isinstance(failure, OwnershipChangedError):
                replica.described = None  # of another version, which may change: it is asked for its version again
            else:
                replica.failed(failure, began)
    if time.monotonic() >= deadline and not isinstance(error, OwnershipChangedError):
        raise DeadlineExceededError(f"{signature.model_name}: no answer before the deadline: {error}")
    raise error


def _ask_one(replica: ShardReplica, signature: _Signature, limit: float) -> dict[str, torch.Tensor]:
    began = time.monotonic()
    described = replica.described
    if described is None:
        described = ShardDescription.from_json(replica.ask(ShardCall.DESCRIBE, limit=limit).text)
        replica.recovered(described)
    ids = signature.ids(described)
    tables = tuple(TableRead(table=name, pooling="none") for name in ids)
    lookup = ShardLookup(tables=tables, export=described.export, collection=0)
    attempt = replica.begin(ShardCall.LOOKUP, lookup.model_dump_json(), list(ids.values()), limit=limit)
    try:
        attempt.send()
        outputs = signature.outputs(ids, attempt.finish())
    finally:
        replica.ended()
    replica.answered(began)
    return outputs
