"""The moments a run can go back to: its checkpoints, and the segments of its log that hold the dense state."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from monolith.checkpoint.checkpoint_folder import check_complete, read_state
from monolith.checkpoint.lineage import LOG, find_lineage
from monolith.checkpoint.manifest import MANIFEST, read_manifest
from monolith.checkpoint.paths import parent_folder
from monolith.checkpoint.save_names import step_of_name
from monolith.checkpoint.storage import StrPath, is_remote, open_folder
from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log import LogReader, SegmentInfo
from monolith.state_bytes import State

__all__ = ["RestorePoint", "find_restore_point", "restore_point_of", "restore_points"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestorePoint:
    """A moment whose tables, dense state and position in the data are all there."""

    model_dir: str
    step: int
    time: float
    """Seconds since 1970."""
    sequence: int
    """Of the log; 0 if there was none."""
    checkpoint: str | None
    """The path of the checkpoint; None: the log has it all."""
    parts: int = 0
    """How many parameter servers have written a part of it."""

    def state(self) -> dict[str, State]:
        """The dense state of that moment; from the log, with the position in the data under `source`."""
        if self.checkpoint is not None:
            return read_state(self.checkpoint)
        segment = LogReader(Path(self.model_dir) / LOG).read(self.sequence)
        dense, source = segment.dense(), segment.source()
        if not isinstance(dense, dict):
            raise CorruptFileError(f"{segment.path}: has no dense state; a run cannot go on from there")
        return dense if source is None else {**dense, "source": source}


def restore_points(model_dir: StrPath) -> list[RestorePoint]:
    """Every moment of `model_dir` that can be restored, the oldest first, lines that were abandoned included.

    Example:
        >>> from monolith.checkpoint.checkpoint_folder import write_checkpoint
        >>> _ = write_checkpoint("memory://run-7/model.ckpt-5", state={}, step=5, time=100.0)
        >>> [(point.step, point.time) for point in restore_points("memory://run-7")]
        [(5, 100.0)]
    """
    return _scan(model_dir)[0]


def find_restore_point(
    model_dir: StrPath, *, step: int | None = None, time: float | None = None, sequence: int | None = None
) -> RestorePoint:
    """The last restore point at or before a step, a time (seconds since 1970) or a sequence number; without any, the newest.

    Of several with the same step, as after a restore to an earlier one, it is that of the youngest line.
    """
    wanted = {"step": step, "time": time, "sequence": sequence}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgumentError(f"restore_to: expected one of step, time and sequence, got {', '.join(given)}")
    points, damaged = _scan(model_dir)
    name, limit = next(iter(given.items()), ("sequence", float("inf")))
    earlier = [point for point in points if getattr(point, name) <= limit]
    for point in sorted(earlier, key=lambda point: (getattr(point, name), *_age(point)), reverse=True):
        if point.checkpoint is not None or find_lineage(model_dir, point.sequence) is not None:
            if not given:
                _require_newest(point, damaged)
            return point
    if not given:
        _require_newest(None, damaged)
        raise InvalidArgumentError(f"{model_dir}: has no complete checkpoint, and no log to restore from")
    kept = ", ".join(str(getattr(point, name)) for point in points[:5]) or "none"
    raise InvalidArgumentError(
        f"restore_to: {model_dir} has nothing from {name} {limit} or before; the first it has are {kept}"
    )


def restore_point_of(path: StrPath) -> RestorePoint:
    """The restore point that the checkpoint at `path` is; `CorruptFileError` if it is not complete."""
    manifest = check_complete(path)
    return RestorePoint(
        model_dir=parent_folder(path),
        step=manifest.step,
        time=manifest.time,
        sequence=manifest.sequence,
        checkpoint=str(path),
        parts=len(manifest.parts),
    )


@dataclass(frozen=True, kw_only=True)
class _Damaged:
    """What would be a restore point, if it could be read."""

    step: int = 0
    """By the manifest of a checkpoint, or else by its name."""
    sequence: int = 0
    """By the name of a segment."""
    error: MonolithError


def _scan(model_dir: StrPath) -> tuple[list[RestorePoint], list[_Damaged]]:
    folder = open_folder(model_dir)
    points: list[RestorePoint] = []
    damaged: list[_Damaged] = []
    for name in folder.names():
        path = f"{folder}/{name}"
        try:
            points.append(restore_point_of(path))
        except (CorruptFileError, StorageError) as error:
            # Without a manifest it is an unfinished checkpoint, or none.
            if open_folder(path).size(MANIFEST) is not None:
                damaged.append(_damaged(path, error))
    if not is_remote(model_dir):
        reader = LogReader(Path(str(folder)) / LOG)
        for sequence in reader.sequences():
            try:
                info = reader.info(sequence)
            except LogGapError:
                continue  # removed since the folder was listed
            except CorruptFileError as error:
                damaged.append(_Damaged(sequence=sequence, error=error))
                continue
            if info.has_dense:
                points.append(_of_segment(str(folder), info))
    return sorted(points, key=_age), damaged


def _damaged(path: str, error: MonolithError) -> _Damaged:
    try:
        manifest = read_manifest(path)
    except (CorruptFileError, StorageError):
        step = step_of_name(path)
        if step is None:
            _log.warning("%s cannot be read, and its name does not say which step it is of: %s", path, error)
        return _Damaged(step=step or 0, error=error)
    return _Damaged(step=manifest.step, sequence=manifest.sequence, error=error)


def _of_segment(model_dir: str, info: SegmentInfo) -> RestorePoint:
    return RestorePoint(model_dir=model_dir, step=info.step, time=info.time, sequence=info.sequence, checkpoint=None)


def _require_newest(point: RestorePoint | None, damaged: Iterable[_Damaged]) -> None:
    """Going on from an older state than the newest must be somebody's decision, not the disk's."""
    newer = [other for other in damaged if point is None or other.step > point.step or other.sequence > point.sequence]
    if newer:
        error = max(newer, key=lambda other: (other.step, other.sequence)).error
        advice = "" if point is None else f"; to go on from step {point.step}, say restore_to step={point.step}"
        raise CorruptFileError(f"the newest state cannot be read: {error}{advice}") from error


def _age(point: RestorePoint) -> tuple[int, int, float, bool]:
    # Numbers of the log never go back, unlike steps and clocks. A checkpoint also has the admission filters.
    return point.sequence, point.step, point.time, point.checkpoint is not None
