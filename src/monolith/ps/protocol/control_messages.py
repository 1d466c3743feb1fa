"""The messages of calls that save and restore servers, read their logs, and move buckets: the JSON text as typed objects."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from monolith.config import Config, Finite, NonNegative
from monolith.ps.protocol.messages import DeclaredTable, Time
from monolith.ps.protocol.ownership import BucketRange, BucketRanges
from monolith.state.paths import is_absolute
from monolith.table.table_file import FileEntry
from monolith.transport.addresses import Address
from monolith.transport.calls import WireInt, WireName

__all__ = [
    "Buckets",
    "CommitRestore",
    "InstallBuckets",
    "Installed",
    "InstalledTable",
    "LogFile",
    "LogFiles",
    "LogState",
    "MoveBuckets",
    "Moved",
    "OutgoingTransfer",
    "OwnBuckets",
    "ReadLog",
    "RefuseTransfer",
    "Refused",
    "Restore",
    "Save",
    "SaveBegun",
    "Saved",
    "TakeBack",
    "TakenBack",
    "WaitForSave",
]

LONGEST_WAIT = 10.0


def _plain(name: str) -> str:
    if "/" in name or name.startswith("."):
        raise ValueError("expected a name without slashes that does not begin with a dot")
    return name


def _absolute(path: str) -> str:
    if not is_absolute(path) or ".." in path.split("/") or "\0" in path:
        raise ValueError("expected an absolute path without '..'")
    return path


_CheckpointName = Annotated[WireName, AfterValidator(_plain)]
_Path = Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
_Wait = Annotated[NonNegative, Field(le=LONGEST_WAIT)]


class Save(Config):
    """Begin a checkpoint called `name` in the server's folder. Its contents are fixed when the answer arrives."""

    name: _CheckpointName
    step: WireInt
    token: WireInt
    """Drawn by the client. A retry with the same token does not begin another save."""


class SaveBegun(Config):
    """Answer to `Save`. Arrays: the values of `dense` in the checkpoint, float32."""

    ranges: BucketRanges | None
    """The buckets that the server owned. None: it was never given any."""
    dense: tuple[WireName, ...] = ()
    """The dense parameters that workers train there."""
    moving_dense: tuple[WireName, ...] = ()
    """Those that were in transit to another server."""
    gave_dense: tuple[WireName, ...] = ()
    """Those that were moved away before."""


class WaitForSave(Config):
    """Whether the checkpoint of `token` is complete. Answer: `Saved`, or the error of the save."""

    token: WireInt
    wait: _Wait = 0.0
    """Seconds after which the answer is "not yet"."""


class Saved(Config):
    """The state of a save."""

    done: bool
    folder: str = ""
    """The folder of the checkpoint, absolute."""
    manifest: FileEntry | None = None


class Restore(Config):
    """Read the server's buckets and all dense parameters of a checkpoint without changing anything. Answer: `Saved`, without a
    path.

    A retry with the same token returns whether it is done.
    """

    path: _Path | None
    """A checkpoint of any number of servers, or of none. None: drop everything, as when the server was new."""
    token: WireInt
    wait: _Wait = 0.0
    aliases: dict[WireName, WireName] = {}
    """Old names of tables by their new ones."""
    allow_new_tables: bool = False
    allow_new_segments: bool = False
    reset_admission: bool = False
    clear_nn: bool = False
    """Restore rows only, and leave dense parameters as they are."""


class CommitRestore(Config):
    """Put in place what was read with this token. Answer as for `Restore`. It is durable when it is done."""

    token: WireInt
    wait: _Wait = 0.0


class LogState(Config):
    """Answer: the state of a server's log."""

    sequence: WireInt
    """The last number committed."""
    folder: str
    """The server's folder, absolute."""
    changed: WireInt
    """Ids whose rows are not committed."""


class ReadLog(Config):
    """Segments after number `since` on the newest line. Answer: `LogFiles` or, with `name`, the bytes of that one, uint8."""

    since: WireInt = 0
    name: str | None = None
    offset: WireInt = 0
    size: Annotated[int, Field(gt=0, le=2**26)] = 2**22


class LogFile(Config):
    """One file of a log."""

    name: str
    sequence: WireInt
    size: WireInt


class LogFiles(Config):
    """Files of a log, oldest first."""

    segments: tuple[LogFile, ...]


_MoveWait = Annotated[float, Field(ge=0, le=300)]


class OwnBuckets(Config):
    """Own these buckets from the start. Refused if the server has ever owned others."""

    ranges: BucketRanges
    lost_dense: tuple[WireName, ...] = ()
    """Dense parameters that were moved to servers that are lost. They may be declared again."""


class OutgoingTransfer(Config):
    """Buckets or dense parameters in transit to another server. Neither of the two servers answers for them."""

    number: WireInt
    """Counts the transfers of the source."""
    taker: Address
    server: WireInt
    """The destination's identity."""
    durable: bool
    """Whether the destination has a folder, so that what it owns survives its process."""
    buckets: BucketRange | None = None
    dense: tuple[WireName, ...] = ()
    """The names of the parameters. Empty if these are buckets."""
    positions: str = ""
    """The positions of each worker in them at the time of the transfer, as a ledger. Not sent to clients."""

    def __str__(self) -> str:
        """Describe it in words."""
        if self.buckets is not None:
            return f"the buckets {self.buckets}"
        return f"the dense parameters {', '.join(map(repr, self.dense[:3]))}{', ...' if len(self.dense) > 3 else ''}"


class Buckets(Config):
    """Answer to `Call.BUCKETS`: what a server owns."""

    server: WireInt
    """Its identity, which is unique and kept in its folder."""
    version: WireInt
    """Grows when it loses or gains buckets. 0: it has never owned any."""
    ranges: BucketRanges
    giving: OutgoingTransfer | None = None
    gave: tuple[Address, ...] = ()
    """Servers that buckets were moved to, where clients look for missing buckets."""
    durable: bool = False
    """Whether it has a folder, so that what it owns survives its process."""
    dense: tuple[WireName, ...] = ()
    """The dense parameters it holds."""
    dense_bytes: tuple[WireInt, ...] = ()
    """The size of each."""
    gave_dense: tuple[WireName, ...] = ()
    """Dense parameters that were moved to other servers."""


class MoveBuckets(Config):
    """Move a first part of the buckets, or dense parameters, to the server at `taker`, the destination. Answer: `Moved`."""

    buckets: BucketRange | None = None
    dense: tuple[WireName, ...] = ()
    """Names of dense parameters. Neither these nor buckets: the client has finished moving."""
    taker: Address
    rebalance: WireInt
    """Drawn by the client, to tell concurrent clients apart."""
    wait: _MoveWait
    """Seconds after which the answer is "not yet"."""


class Moved(Config):
    """The state of a move."""

    buckets: BucketRange | None = None
    dense: tuple[WireName, ...] = ()
    """What was moved, buckets or dense parameters. Neither: nothing was left, or the destination does not answer."""
    missing: str | None = None
    """Why the destination cannot be reached. Nothing has changed."""
    pending: bool = False
    """It is still in transit. Ask again."""


class InstalledTable(Config):
    """A table whose rows are sent, and its counters.

    Arrays: ids int64 [n], times int64 [n], rows uint8 [n, row_bytes].
    """

    declared: DeclaredTable
    max_event_time: Time
    updates: Time
    hashnet_scales: tuple[Finite, ...]


class InstallBuckets(Config):
    """Own these buckets with these rows, or these dense parameters, from now on. Idempotent. Answer: `Installed`.

    Arrays: those of the tables or, for dense parameters, their packed state: structure and tensors, uint8.
    """

    giver: WireInt
    """The identity of the source."""
    number: WireInt
    """Counts the transfers of the source."""
    server: WireInt
    """The identity of the destination."""
    rebalance: WireInt
    """As in `MoveBuckets`. 0 if it is not known because the source was started again."""
    buckets: BucketRange | None = None
    tables: tuple[InstalledTable, ...] = ()
    dense: tuple[WireName, ...] = ()
    positions: str
    """As in `OutgoingTransfer`."""
    coordination: str = ""
    """With the first bucket: the members, barriers and keys of the run."""
    base_step: int | None = None
    """With the first bucket: what is added to the batches of all workers to get the global step."""

    @model_validator(mode="after")
    def _one_kind(self) -> InstallBuckets:
        if (self.buckets is None) != bool(self.dense):
            raise ValueError("expected either buckets or dense parameters")
        return self


class Installed(Config):
    """Answer to `InstallBuckets`."""

    again: bool
    """Whether it was installed before."""


class RefuseTransfer(Config):
    """Never install this transfer, unless it is installed already. Answer: `Refused`."""

    giver: WireInt
    number: WireInt
    server: WireInt
    """As in `InstallBuckets`."""


class Refused(Config):
    """Answer to `RefuseTransfer`."""

    installed: bool
    """Whether the destination had installed the transfer, durably, and owns it."""


class TakeBack(Config):
    """Own the transfer in transit again, if there is one and its destination does not have it. Answer: `TakenBack`."""

    lost: Address | None = None
    """The destination, if it is lost for good. What it may have had is given up."""
    rebalance: WireInt
    """As in `MoveBuckets`."""
    wait: _MoveWait


class TakenBack(Config):
    """Answer to `TakeBack`."""

    found: bool = False
    """Whether a transfer was in transit."""
    arrived: bool = False
    """Whether the destination has it, and keeps it."""
    missing: str | None = None
    """Why the destination cannot be reached. The transfer is still in transit."""
    pending: bool = False
    """The destination is being asked. Ask again."""
