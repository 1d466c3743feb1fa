"""The moments a run can be restored to: its checkpoints, and the segments of its log that hold the dense state."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log import SegmentInfo
from monolith.log.segment_format import segment_name, sequence_of
from monolith.state.manifest import Manifest
from monolith.state.model_dir import LOG, ModelDir
from monolith.state.paths import base_name, parent_folder
from monolith.state.storage import Folder, StrPath
from monolith.state_bytes import State

__all__ = [
    "BASENAME",
    "Moment",
    "RestorePoint",
    "find_restore_point",
    "restore_point_at",
    "restore_point_of",
    "restore_points",
    "step_of_name",
]

BASENAME = "model.ckpt"
"""What the names of a run's checkpoints begin with."""


def step_of_name(path: str) -> int | None:
    """Return the step in the name of a checkpoint, or None if it has none.

    Example:
        >>> step_of_name("/runs/ctr-2/model.ckpt-30"), step_of_name("/runs/ctr-2/model.ckpt")
        (30, None)
    """
    _, dash, digits = base_name(path).rpartition("-")
    return int(digits) if dash and digits.isascii() and digits.isdigit() else None


def _as_moment(text: str) -> str:
    if not re.fullmatch(r"(step|time|sequence)=[0-9]+(\.[0-9]+)?", text):
        raise ValueError(
            "expected step=N, sequence=N or time=SECONDS since 1970, as `date -d 2027-01-31 +%s` prints them"
        )
    return text


Moment = Annotated[str, AfterValidator(_as_moment)]
"""What `--restore-to` takes: step=N, time=UNIX_SECONDS or sequence=N."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestorePoint:
    """A moment whose tables, dense state and position in the data all exist."""

    model_dir: str
    step: int
    time: float
    """Seconds since 1970."""
    sequence: int
    """Of the log. 0 if there was none."""
    checkpoint: str | None
    """The path of the checkpoint. None if the log has everything."""
    parts: int = 0
    """How many parameter servers or ranks have written a part of it."""
    opened: ModelDir | None = field(default=None, repr=False, compare=False)
    """The model_dir in which it was found."""

    @property
    def home(self) -> ModelDir:
        """The model_dir, opened if need be."""
        return self.opened or ModelDir(self.model_dir)

    @property
    def location(self) -> str:
        """The path of the checkpoint, or of the segment that has everything. `restore_point_of` finds the point by it."""
        return self.checkpoint or f"{self.home}/{LOG}/{segment_name(self.sequence)}"

    @property
    def folder(self) -> Folder:
        """The folder of the checkpoint, or the model_dir if the log has everything."""
        if self.checkpoint is None:
            return self.home.folder
        return self.home.home_of(self.checkpoint).inside(base_name(self.checkpoint))

    def state(self) -> dict[str, State]:
        """Read the dense state of that moment. From the log, the position in the data is under `source`."""
        if self.checkpoint is not None:
            return self.home.home_of(self.checkpoint).state(base_name(self.checkpoint))
        with self.home.log.read(self.sequence) as segment:
            dense, source = segment.dense(), segment.source()
        if not isinstance(dense, dict):
            raise CorruptFileError(f"{segment.path}: has no dense state; a run cannot continue from there")
        return dense if source is None else {**dense, "source": source}


def restore_points(model_dir: StrPath | ModelDir) -> list[RestorePoint]:
    """Return every moment of `model_dir` that can be restored, the oldest first, including those of abandoned lines.

    Example:
        >>> from monolith.state import write_checkpoint
        >>> _ = write_checkpoint("memory://run-7/model.ckpt-5", state={}, step=5, time=100.0)
        >>> [(point.step, point.time) for point in restore_points("memory://run-7")]
        [(5, 100.0)]
    """
    return _scan(ModelDir.of(model_dir))[0]


def find_restore_point(
    model_dir: StrPath | ModelDir,
    *,
    step: int | None = None,
    time: float | None = None,
    sequence: int | None = None,
) -> RestorePoint:
    """Find the last restore point at or before a step, a time (seconds since 1970) or a sequence number, or the newest.

    Of several with the same step, as after a restore to an earlier one, it is the one of the youngest line. If a moment is given,
    a point that cannot be reached because a segment is missing is skipped with a warning.

    Raises:
        LogGapError: Without a moment: the log has committed more than the newest restore point that can be reached.
        CorruptFileError: Without a moment: there is something newer that is damaged.
        InvalidArgumentError: There is no such restore point.
    """
    wanted = {"step": step, "time": time, "sequence": sequence}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgumentError(f"restore_to: expected one of step, time and sequence, got {', '.join(given)}")
    home = ModelDir.of(model_dir)
    while True:
        there = _listing(home)
        try:
            return _find(home, given)
        except (CorruptFileError, LogGapError):
            # Training removes segments that a newer snapshot has made superfluous, perhaps since the folder was listed.
            if there == _listing(home):
                raise


def _find(model_dir: ModelDir, given: Mapping[str, float]) -> RestorePoint:
    points, damaged = _scan(model_dir, newest_only=not given)
    name, limit = next(iter(given.items()), ("sequence", float("inf")))
    earlier = [point for point in points if getattr(point, name) <= limit]
    earlier.sort(key=lambda point: (getattr(point, name), *_age(point)), reverse=True)
    point = next((point for point in earlier if _is_reachable(point, damaged)), None)
    if not given:
        _require_newest(point, damaged)
    else:
        _warn_of_unreachable(earlier, point, damaged)
    if point is not None:
        return point
    if not given:
        raise InvalidArgumentError(f"{model_dir}: has no complete checkpoint, and no log to restore from")
    kept = ", ".join(str(getattr(point, name)) for point in points[:5]) or "none"
    raise InvalidArgumentError(f"restore_to: {model_dir} has nothing from {name} {limit} or before; it has {kept}")


def restore_point_at(model_dir: StrPath | ModelDir, moment: str) -> RestorePoint:
    """Find the last restore point at or before a `Moment`, as `--restore-to` takes it. An earlier one is logged.

    Raises:
        InvalidArgumentError: The run never reached that step or sequence number, so its newest state is not what was asked for.

    Example:
        >>> from monolith.state import write_checkpoint
        >>> for step in (5, 9):
        ...     _ = write_checkpoint(f"memory://run-8/model.ckpt-{step}", state={}, step=step)
        >>> restore_point_at("memory://run-8", "step=7").step
        5
    """
    name, _, value = moment.partition("=")
    limit = float(value) if name == "time" else int(float(value))
    point = find_restore_point(model_dir, **{name: limit})  # type: ignore[arg-type]
    if getattr(point, name) == limit:
        return point
    newest = max(getattr(other, name) for other in restore_points(model_dir))
    if name != "time" and limit > newest:
        raise InvalidArgumentError(
            f"restore_to: {name}={limit} is beyond {name} {newest}, the newest restore point of {model_dir}; say "
            f"{name}={newest}, or leave restore_to out to continue from there"
        )
    _log.warning(
        "restore_to %s: restored step %d, sequence %d, the newest restore point that is no later",
        moment,
        point.step,
        point.sequence,
    )
    return point


def restore_point_of(path: StrPath, model_dir: ModelDir | None = None) -> RestorePoint:
    """Return the restore point whose `location` is `path`. Raises `CorruptFileError` for a checkpoint that is not complete."""
    if (sequence := sequence_of(base_name(path))) is not None:
        log = ModelDir.around(parent_folder(path)) if model_dir is None else model_dir.home_of(parent_folder(path))
        return _of_segment(log, log.log.info(sequence))
    home = ModelDir.around(path) if model_dir is None else model_dir.home_of(path)
    return _of_checkpoint(home, str(path), home.check(base_name(path)))


@dataclass(frozen=True, kw_only=True)
class _Damaged:
    """What would be a restore point, if it could be read."""

    step: int = 0
    """By the manifest of a checkpoint, or else by its name."""
    sequence: int = 0
    """By the name of a segment."""
    error: MonolithError


def _listing(model_dir: ModelDir) -> list[list[str]]:
    return [model_dir.folder.names(), model_dir.inside(LOG).names(), model_dir.snapshots()]


def _scan(model_dir: ModelDir, *, newest_only: bool = False) -> tuple[list[RestorePoint], list[_Damaged]]:
    """Find all restore points, or those that can be the newest: segments before the last checkpoint are then not opened."""
    points: list[RestorePoint] = []
    damaged: list[_Damaged] = []
    known: dict[int, int] = {}
    for name in model_dir.checkpoints():
        path = f"{model_dir}/{name}"
        try:
            manifest = model_dir.check(name)
        except (CorruptFileError, StorageError) as error:
            damaged.append(_damaged(model_dir, path, error))
            continue
        points.append(_of_checkpoint(model_dir, path, manifest))
        if manifest.segments:
            known[manifest.sequence] = int(manifest.segments[-1].checksum.rpartition(":")[2], 16)
    if model_dir.keeps_log:
        _scan_log(model_dir, points, damaged, known if newest_only else {})
    return sorted(points, key=_age), damaged


def _damaged(model_dir: ModelDir, path: str, error: MonolithError) -> _Damaged:
    try:
        manifest = model_dir.manifest(base_name(path))
    except (CorruptFileError, StorageError):
        step = step_of_name(path)
        if step is None:
            _log.warning("%s cannot be read, and its name does not have a step: %s", path, error)
        return _Damaged(step=step or 0, error=error)
    return _Damaged(step=manifest.step, sequence=manifest.sequence, error=error)


def _scan_log(
    model_dir: ModelDir, points: list[RestorePoint], damaged: list[_Damaged], known: Mapping[int, int]
) -> None:
    """Add the restore points of the log. `known` are the last segments of checkpoints, with their checksums."""
    reader = model_dir.log
    sequences = reader.sequences()
    try:
        if not reader.require_committed(known) and (unknown := reader.unknown_end()) is not None:
            _log.warning("%s", unknown)
    except LogGapError as error:
        damaged.append(_Damaged(sequence=reader.committed(), error=error))
    except CorruptFileError as error:
        damaged.append(_Damaged(sequence=reader.newest + 1, error=error))
    for sequence in sequences:
        if sequence <= max(known, default=0):
            continue
        try:
            info = reader.info(sequence)
        except LogGapError:
            continue  # removed since the folder was listed
        except CorruptFileError as error:
            damaged.append(_Damaged(sequence=sequence, error=error))
            continue
        if info.has_dense:
            points.append(_of_segment(model_dir, info))
        elif sequence == sequences[-1]:
            # Not a restore point, but what leads to it must not have a gap either.
            _is_reachable(_of_segment(model_dir, info), damaged)


def _of_checkpoint(model_dir: ModelDir, path: str, manifest: Manifest) -> RestorePoint:
    return RestorePoint(
        model_dir=parent_folder(path),
        step=manifest.step,
        time=manifest.time,
        sequence=manifest.sequence,
        checkpoint=path,
        parts=len(manifest.parts),
        opened=model_dir,
    )


def _of_segment(model_dir: ModelDir, info: SegmentInfo) -> RestorePoint:
    return RestorePoint(
        model_dir=str(model_dir),
        step=info.step,
        time=info.time,
        sequence=info.sequence,
        checkpoint=None,
        parts=len(info.parts),
        opened=model_dir,
    )


def _is_reachable(point: RestorePoint, damaged: list[_Damaged]) -> bool:
    """Return whether everything that leads to `point` exists. What is missing is added to `damaged`."""
    if point.checkpoint is not None:
        return True
    home = point.home
    try:
        if point.parts:
            return all(part.lineage(sequence) is not None for part, sequence in home.cut_parts(point.sequence))
        return home.lineage(point.sequence) is not None
    except (CorruptFileError, LogGapError) as error:
        damaged.append(_Damaged(sequence=point.sequence, error=error))
        return False


def _require_newest(point: RestorePoint | None, damaged: Iterable[_Damaged]) -> None:
    """Raise if something newer than `point` is damaged: an operator has to decide to continue from an older state."""
    newer = [other for other in damaged if point is None or other.step > point.step or other.sequence > point.sequence]
    if not newer:
        return
    error = max(newer, key=lambda other: (other.step, other.sequence)).error
    gap = next((other.error for other in newer if isinstance(other.error, LogGapError)), None)
    if point is None:
        advice = "no older state is left to restore"
    else:
        advice = (
            f"to continue without it from step {point.step} (sequence {point.sequence}), use --restore-to "
            f"{f'sequence={point.sequence}' if point.sequence else f'step={point.step}'}"
        )
    if gap is not None:
        raise LogGapError(f"a part of the log is missing: {gap}; put the file back; {advice}") from gap
    raise CorruptFileError(f"the newest state cannot be read: {error}; {advice}") from error


def _warn_of_unreachable(
    earlier: Iterable[RestorePoint], point: RestorePoint | None, damaged: Iterable[_Damaged]
) -> None:
    """Log which moments after `point`, up to the one asked for, cannot be restored."""
    skipped = {other.sequence: other.error for other in damaged if other.sequence}
    for other in itertools.takewhile(lambda other: other is not point, earlier):
        if other.sequence in skipped:
            _log.warning(
                "sequence %d cannot be restored, an earlier one is: %s", other.sequence, skipped[other.sequence]
            )


def _age(point: RestorePoint) -> tuple[int, int, float, bool]:
    # Numbers of the log never go back, unlike steps and clocks. A checkpoint also has the admission filters.
    return point.sequence, point.step, point.time, point.checkpoint is not None
