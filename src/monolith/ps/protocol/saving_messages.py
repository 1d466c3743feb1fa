"""The JSON text of the calls that save and restore a server, and that read its log."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from monolith.config import Config, NonNegative
from monolith.ps.protocol.ownership import BucketRanges
from monolith.state.paths import is_absolute
from monolith.table.table_file import FileEntry
from monolith.transport.calls import Name, Whole

__all__ = [
    "CommitRestore",
    "LogState",
    "ReadLog",
    "Restore",
    "Save",
    "SaveBegun",
    "Saved",
    "Segment",
    "Segments",
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
