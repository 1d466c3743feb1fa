"""The JSON text of the calls that save and restore a server, and that read its log."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from monolith.config import Config, Finite, NonNegative
from monolith.ps.protocol.messages import DeclaredTable, Time
from monolith.ps.protocol.ownership import BucketRange, BucketRanges
from monolith.state.paths import is_absolute
from monolith.table.table_file import FileEntry
from monolith.transport.addresses import Address
from monolith.transport.calls import Name, Whole

__all__ = [
    "Buckets",
    "CommitRestore",
    "Giving",
    "InstallBuckets",
    "Installed",
    "InstalledTable",
    "LogState",
    "MoveBuckets",
    "Moved",
    "OwnBuckets",
    "ReadLog",
    "RefuseTransfer",
    "Refused",
    "Restore",
    "Save",
    "SaveBegun",
    "Saved",
    "Segment",
    "Segments",
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


_CheckpointName = Annotated[Name, AfterValidator(_plain)]
_Path = Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
_Wait = Annotated[NonNegative, Field(le=LONGEST_WAIT)]


class Save(Config):
    """Begin a checkpoint called `name` in the server's folder. When the answer comes, what is in it is decided."""

    name: _CheckpointName
    step: Whole
    token: Whole
    """Drawn by whoever saves: the same one again begins nothing."""


class SaveBegun(Config):
    """Answer to `Save`. Arrays: the values of `dense` in the checkpoint, float32."""

    ranges: BucketRanges | None
    """The buckets that the server owned; None: it was never told which."""
    dense: tuple[Name, ...] = ()
    """The dense parameters that workers train there."""
    moving_dense: tuple[Name, ...] = ()
    """Those that it holds and was giving to another server."""
    gave_dense: tuple[Name, ...] = ()
    """Those that it gave away before."""


class WaitForSave(Config):
    """Whether the checkpoint of `token` is complete. Answer: `Saved`; its error if it failed."""

    token: Whole
    wait: _Wait = 0.0
    """Seconds after which the answer is "not yet"."""


class Saved(Config):
    """What became of a save."""

    done: bool
    folder: str = ""
    """The checkpoint's, absolute."""
    manifest: FileEntry | None = None


class Restore(Config):
    """Read the server's buckets, and all dense parameters, of a checkpoint; nothing changes yet. Answer: `Saved`, without a path.

    Asked again with the same token it tells whether it is done.
    """

    path: _Path
    """Of the checkpoint whose parts the servers have written, or of any other."""
    token: Whole
    wait: _Wait = 0.0
    aliases: dict[Name, Name] = {}
    """Old names of tables by their new ones."""
    allow_new_tables: bool = False
    allow_new_segments: bool = False
    reset_admission: bool = False
    clear_nn: bool = False
    """Restore rows only, and leave dense parameters as they are."""


class CommitRestore(Config):
    """Put in place what was read with this token. Answer as for `Restore`; when it is done it is durable."""

    token: Whole
    wait: _Wait = 0.0


class LogState(Config):
    """Answer: where a server's log is."""

    sequence: Whole
    """The last number committed."""
    folder: str
    """The server's folder, absolute."""
    changed: Whole
    """Ids whose rows are not committed."""


class ReadLog(Config):
    """Segments after number `since` on the newest line; answer: `Segments`. With `name`, the bytes of one: uint8."""

    since: Whole = 0
    name: str | None = None
    offset: Whole = 0
    size: Annotated[int, Field(gt=0, le=2**26)] = 2**22


class Segment(Config):
    """One file of a log."""

    name: str
    sequence: Whole
    size: Whole


class Segments(Config):
    """Files of a log, oldest first."""

    segments: tuple[Segment, ...]


_MoveWait = Annotated[float, Field(ge=0, le=300)]


class OwnBuckets(Config):
    """Own these from the start: refused if the server has ever owned others."""

    ranges: BucketRanges
    lost_dense: tuple[Name, ...] = ()
    """Dense parameters that the server gave to others that are lost: they may be declared anew."""


class Giving(Config):
    """Buckets, or dense parameters, on their way to another server: neither of the two answers for them."""

    number: Whole
    """Which transfer of the giver this is."""
    taker: Address
    server: Whole
    """The taker's identity."""
    durable: bool
    """Whether what the taker owns survives its process."""
    buckets: BucketRange | None = None
    dense: tuple[Name, ...] = ()
    """The names of the parameters; none: these are buckets."""
    positions: str = ""
    """How far each worker was in them when they were given, as a ledger. Not sent to clients that ask."""

    def __str__(self) -> str:
        """What it is, in words."""
        if self.buckets is not None:
            return f"the buckets {self.buckets}"
        return f"the dense parameters {', '.join(map(repr, self.dense[:3]))}{', ...' if len(self.dense) > 3 else ''}"


class Buckets(Config):
    """Answer to the question what a server owns."""

    server: Whole
    """Its identity: kept with its folder, and by no other server."""
    version: Whole
    """Grows when it gives buckets away or gains some. 0: it has never owned any."""
    ranges: BucketRanges
    giving: Giving | None = None
    gave: tuple[Address, ...] = ()
    """Servers that buckets were given to: where to ask for what is missing."""
    durable: bool = False
    """Whether what it owns survives its process."""
    dense: tuple[Name, ...] = ()
    """The dense parameters it holds."""
    dense_bytes: tuple[Whole, ...] = ()
    """The size of each."""
    gave_dense: tuple[Name, ...] = ()
    """Dense parameters that it gave to others."""


class MoveBuckets(Config):
    """Give the first piece of what the server owns of `buckets`, or of `dense`, to the server at `taker`. Answer: `Moved`."""

    buckets: BucketRange | None = None
    dense: tuple[Name, ...] = ()
    """Names of dense parameters; neither these nor buckets: whoever moves has done."""
    taker: Address
    rebalance: Whole
    """Drawn by whoever moves: two who move at the same time are told apart."""
    wait: _MoveWait
    """Seconds after which the answer is "not yet"."""


class Moved(Config):
    """What became of a move."""

    buckets: BucketRange | None = None
    dense: tuple[Name, ...] = ()
    """The piece that was given, buckets or dense parameters; neither: nothing was left to give, or the taker is missing."""
    missing: str | None = None
    """Why the taker cannot be asked; nothing has changed."""
    pending: bool = False
    """It is still on its way; ask again."""


class InstalledTable(Config):
    """A table that rows come from, and what it knows besides them.

    Arrays: ids int64 [n], times int64 [n], rows uint8 [n, row_bytes].
    """

    declared: DeclaredTable
    max_event_time: Time
    updates: Time
    hashnet_scales: tuple[Finite, ...]


class InstallBuckets(Config):
    """Own these buckets from now on, with these rows, or these dense parameters. Answer: `Installed`.

    A transfer that comes again changes nothing. Arrays: those of the tables; or, of dense parameters, their packed state:
    structure and tensors, uint8.
    """

    giver: Whole
    """Its identity."""
    number: Whole
    """Counts its transfers."""
    server: Whole
    """The taker that is meant."""
    rebalance: Whole
    """As in `MoveBuckets`; 0: not known any more, since the giver was started again."""
    buckets: BucketRange | None = None
    tables: tuple[InstalledTable, ...] = ()
    dense: tuple[Name, ...] = ()
    positions: str
    """As in `Giving`."""
    coordination: str = ""
    """With the first bucket: what workers know in common."""
    base_step: int | None = None
    """With the first bucket: what is added to the batches of all workers to get the global step."""

    @model_validator(mode="after")
    def _one_kind(self) -> InstallBuckets:
        if (self.buckets is None) != bool(self.dense):
            raise ValueError("expected either buckets or dense parameters")
        return self


class Installed(Config):
    """What became of an install."""

    again: bool
    """It had been done before."""


class RefuseTransfer(Config):
    """Never install this transfer, unless that has happened. Answer: `Refused`."""

    giver: Whole
    number: Whole
    server: Whole
    """As in `InstallBuckets`."""


class Refused(Config):
    """Who owns the buckets of a transfer from now on."""

    installed: bool
    """The taker: it had installed them, and that is durable."""


class TakeBack(Config):
    """Own again the piece that is on its way, if there is one and its taker has not got it. Answer: `TakenBack`."""

    lost: Address | None = None
    """The taker, if it does not answer and never will: what it may have had is given up."""
    rebalance: Whole
    """As in `MoveBuckets`."""
    wait: _MoveWait


class TakenBack(Config):
    """What became of the piece that was on its way."""

    found: bool = False
    """Whether there was one."""
    arrived: bool = False
    """The taker has it, and keeps it."""
    missing: str | None = None
    """Why the taker cannot be asked; the piece is still on its way."""
    pending: bool = False
    """The taker is being asked; ask again."""
