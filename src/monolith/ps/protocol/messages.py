"""The messages of workers to parameter servers: the JSON text of each call, as typed objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from monolith.cluster.coordination import Phase
from monolith.config import Config, Finite, Positive
from monolith.ps.protocol.dense_optimizers import DenseOptimizer
from monolith.ps.protocol.ownership import BucketRanges
from monolith.table.admission import ProbabilisticAdmission, SlidingAdmission
from monolith.table.config import TableConfig
from monolith.table.store import Position
from monolith.transport.calls import WireInt, WireName

__all__ = [
    "Apply",
    "ApplyDense",
    "AssignDense",
    "BucketsAt",
    "CountFrom",
    "CountSlots",
    "DeclareDense",
    "DeclareTables",
    "DeclaredTable",
    "DenseSettings",
    "DenseSettingsOf",
    "Evict",
    "Greet",
    "HeldPosition",
    "Hold",
    "Join",
    "Joined",
    "LoadDense",
    "Lookup",
    "Measure",
    "ParametersAt",
    "PlaceBarrier",
    "Push",
    "ReadDense",
    "ReadDenseSettings",
    "ReadEntries",
    "ReadKeys",
    "ReadRows",
    "SetKey",
    "TableGradient",
    "TableRead",
    "TableWrite",
    "Wire",
]


def _named_safely(config: TableConfig) -> TableConfig:
    _NAME.validate_python(config.name)
    return config


_NAME = TypeAdapter(WireName)
Time = Annotated[int, Field(ge=0, lt=2**32)]
Wire = Literal["float32", "float16", "bfloat16"]
"""The precision of rows and gradients between worker and server."""
Run = Annotated[str, Field(max_length=255)]
"""Name of the launch of a job that a worker belongs to. "" if it does not say. Only another launch may declare other settings."""
Pooling = Literal["sum", "mean", "sqrtn", "none"]
"""How a bag becomes one vector. "none": there are no bags, each id is a vector of its own."""


class HeldPosition(Position):
    """A position that a server has recorded, with the epoch of the worker that pushed it."""

    epoch: WireInt

    @classmethod
    def of(cls, position: Position, epoch: int) -> HeldPosition:
        """Return `position` as a server records it."""
        return cls(
            batches=position.batches, state=position.state, ended=position.ended, epochs=position.epochs, epoch=epoch
        )


class BucketsAt(Config):
    """Buckets in which a worker has reached the same position."""

    position: HeldPosition
    ranges: BucketRanges


class ParametersAt(Config):
    """Dense parameters in which a worker has reached the same position."""

    position: HeldPosition
    names: tuple[WireName, ...]


class WorkerPositionsAt(Config):
    """Answer to `POSITIONS`: where each worker is that the server has heard of, in its buckets and dense parameters."""

    workers: dict[str, tuple[HeldPosition, ...]]
    """Different positions of one worker are batches that only a part has had."""


class Push(Config):
    """Identifies a change, which is applied at most once."""

    worker: WireName
    epoch: WireInt
    """Grows with each incarnation of the worker."""
    sequence: WireInt
    """Counts the changes of this incarnation. Gaps are allowed."""


class Join(Config):
    """A worker starts. Pushes of its earlier epochs are refused from now on."""

    worker: WireName
    epoch: WireInt
    nonce: WireInt
    """Drawn by the process, to detect two processes with the same name and epoch."""


class Joined(Config):
    """Answer to `Join`: what the server knows about the worker.

    The source of a transfer reports it until the destination has it, so that a worker that asks all servers learns about every
    bucket.
    """

    restored: WireInt
    """The sequence number of the log to which the server has restored itself. 0 if it has not."""
    known: bool
    """Whether the server had met the worker in an earlier epoch."""
    ranges: BucketRanges
    """The buckets that the server owns or is moving away."""
    tables: tuple[BucketsAt, ...]
    """The positions of the worker in them. Buckets that are not named have had no batch."""
    parameters: tuple[WireName, ...]
    """The dense parameters that the server holds or is moving away."""
    gave: tuple[WireName, ...]
    """The dense parameters that it has moved to other servers."""
    dense: tuple[ParametersAt, ...]
    """The positions of the worker in its dense parameters. Those that are not named have had no batch."""


class DeclaredTable(Config):
    """A table to create on the server."""

    config: Annotated[TableConfig, AfterValidator(_named_safely)]
    admission: SlidingAdmission | ProbabilisticAdmission | None = None


class DeclareTables(Config):
    """Tables to create. Existing ones use the hyperparameters given here. Answer: `{"changes": [text]}`."""

    tables: tuple[DeclaredTable, ...]
    run: Run = ""


class TableRead(Config):
    """Bags of one table. Arrays: ids int64 [n], and unless pooling is "none", offsets int64 [bags + 1]."""

    table: WireName
    pooling: Pooling


class Lookup(Config):
    """Answer: for each table rows [bags or n, dim], in the precision of `wire`."""

    tables: tuple[TableRead, ...]
    wire: Wire = "float32"
    map: WireInt = 0
    """The version of the server's buckets that the client knows. 0: read without checking who owns what."""


class TableGradient(Config):
    """Gradients of one table. Arrays: ids int64 [n], offsets as in `TableRead`, values [bags or n, dim]."""

    table: WireName
    pooling: Pooling
    learning_rates: tuple[Finite, ...] | None = None


class Apply(Config):
    """Make one optimizer step for each table and id."""

    push: Push
    position: Position | None = None
    """The batch that the gradients belong to. Buckets that have had it from an earlier epoch of the worker do not get it
    again."""
    tables: tuple[TableGradient, ...]
    step: WireInt = 0
    event_time: Time = 0
    map: WireInt = 0
    """The version of the server's buckets that the client knows. 0: apply without checking who owns what."""


class TableWrite(Config):
    """assign, assign_add (arrays: ids int64 [n], values float32 [n, dim]), reinitialize (ids, answer: int32 [n]) and
    erase (ids, answer: how many rows there were)."""

    push: Push
    table: WireName
    event_time: Time = 0
    map: WireInt = 0
    """The version of the server's buckets that the client knows. 0: write without checking who owns what."""


class ReadRows(Config):
    """All rows of some buckets of a table. Answer: ids int64 [n], stored weights float32 [n, dim]."""

    table: WireName
    ranges: BucketRanges
    map: WireInt = 0
    """The version of the server's buckets that the client knows. 0: read without checking who owns what."""


class ReadEntries(Config):
    """Whole rows, for debugging. Arrays: ids int64 [n].

    Answer: `{"slots": [names]}`, found uint8 [n], stored weights float32 [n, dim], times int64 [n], and [n, width] for each slot.
    """

    table: WireName
    map: WireInt = 0
    """The version of the server's buckets that the client knows. 0: read without checking who owns what."""


class CountSlots(Config):
    """Count the rows of each slot of a table. Answer: `{"slots": {slot: rows}}`."""

    table: WireName


class Evict(Config):
    """Remove the rows that have expired at the time given for each table."""

    push: Push
    now: dict[WireName, Time]


class DenseSettings(Config):
    """The optimizer of a dense parameter, as declared by the code of a run, and as changed since by a scheduler."""

    declared: DenseOptimizer
    current: DenseOptimizer

    @model_validator(mode="after")
    def _is_one_optimizer(self) -> DenseSettings:
        if self.declared.name != self.current.name:
            raise ValueError(f"it is declared as {self.declared.name} and is {self.current.name}")
        return self


class _Grouped(Config):
    """Dense parameters in groups that have the same hyperparameters."""

    names: tuple[WireName, ...]
    group_of: tuple[WireInt, ...] = ()
    """The index of the group of each name."""

    def _require_groups(self, groups: int) -> None:
        if groups and len(self.group_of) != len(self.names):
            raise ValueError(
                f"group_of: expected {len(self.names)} numbers, one for each name, got {len(self.group_of)}"
            )
        if any(number >= groups for number in self.group_of):
            raise ValueError(f"group_of: expected numbers below {groups}, that of groups, got {max(self.group_of)}")


class DeclareDense(_Grouped):
    """Dense parameters to make, unless they are there with the same shape and class of optimizer. Arrays: their first values.

    All must be new or all must be there. Of those that are there, hyperparameters that were declared otherwise take the new
    values. Answer: `{"created": bool}`.
    """

    groups: Annotated[tuple[DenseSettings, ...], Field(min_length=1)]
    replace_other: bool = False
    """Start a parameter again from these values if another class of optimizer trains it, instead of refusing."""
    run: Run = ""

    @model_validator(mode="after")
    def _has_groups(self) -> DeclareDense:
        self._require_groups(len(self.groups))
        return self


class ReadDense(Config):
    """Read values. Answer: the values, in order."""

    names: tuple[WireName, ...]


class ReadDenseSettings(Config):
    """Read the optimizers. Answer: `DenseSettingsOf` the names."""

    names: tuple[WireName, ...]


class DenseSettingsOf(Config):
    """Answer to `ReadDenseSettings`."""

    settings: tuple[DenseSettings, ...]
    changed: tuple[bool, ...]
    """Whether each has been trained, assigned or restored since it was declared."""


class ApplyDense(_Grouped):
    """Make one step of their optimizer for each parameter. Arrays: gradients, in order."""

    push: Push
    position: Position | None = None
    """The batch that the gradients belong to. Parameters that have had it from an earlier epoch of the worker do not get it
    again."""
    groups: tuple[DenseOptimizer, ...] = ()
    """The hyperparameters of this and the following steps. None: those of the step before."""
    unchanged: tuple[WireName, ...] = ()
    """Parameters without a gradient in this batch. They count as having had it."""

    @model_validator(mode="after")
    def _has_groups(self) -> ApplyDense:
        self._require_groups(len(self.groups))
        return self


class LoadDense(Config):
    """Replace parameters, with the state of their optimizers. Arrays: structure and tensors of that state, as bytes."""

    push: Push
    names: tuple[WireName, ...]


class AssignDense(Config):
    """Set the values. Arrays: values, in order."""

    push: Push
    names: tuple[WireName, ...]
    add: bool = False
    """Add to the current values."""


class Measure(Config):
    """Measure the speed of the server. Answer: `{"throughput": rounds per second}`."""

    seconds: Annotated[Positive, Field(le=300)]


_Value = Annotated[str, Field(max_length=65536)]


class Greet(Config):
    """Identifies the calling worker. Every call has it and renews the worker's lease, so a restarted server soon knows its
    workers.

    Answer of a call that has no other: `Seen`.
    """

    index: Annotated[int, Field(ge=0, lt=65536)]
    """Number of the worker. 0 is the chief."""
    epoch: WireInt
    """The incarnation of the worker. Once a larger one was seen, smaller ones are refused."""
    lease: Annotated[Positive, Field(le=86400)]
    """Seconds for which the worker counts as alive after each call."""
    phase: Phase = "joined"
    run: Annotated[str, Field(max_length=255)] = ""
    """Name of this launch of the job. Members of an earlier launch are forgotten when a worker of the next one calls."""


class PlaceBarrier(Config):
    """Hold all workers. Answer: `{"placed": bool, "barrier": Barrier}`, with the current barrier."""

    who: Greet
    action: Annotated[str, Field(max_length=255)] = ""
    token: WireInt
    """Drawn by the client. A retry with the same token finds the barrier placed."""


class Hold(Config):
    """A worker that is held by a barrier asks whether it still has to wait. Answer: `{"held": bool}`."""

    who: Greet
    number: WireInt


class CountFrom(Config):
    """The chief has restored global step `step`. Changes nothing on a server that knows the global step already."""

    step: WireInt


class ReadKeys(Config):
    """Answer: `{"values": {key: value}}` of all keys that begin with `prefix`."""

    prefix: Annotated[str, Field(max_length=255)]


class SetKey(Config):
    """Set a key that has no value yet. Answer: `{"value": the one it has then}`."""

    key: WireName
    value: _Value
