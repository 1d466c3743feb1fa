"""The moments a run can go back to: its checkpoints, and the segments of its log that hold the dense state."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log import LogReader, SegmentInfo
from monolith.state.checkpoint_folder import check_complete, read_state
from monolith.state.lineage import LOG, find_lineage
from monolith.state.manifest import MANIFEST, read_manifest
from monolith.state.paths import parent_folder
from monolith.state.save_names import step_of_name
from monolith.state.snapshot import SNAPSHOTS
from monolith.state.storage import StrPath, is_remote, open_folder
from monolith.state_bytes import State

__all__ = ["Moment", "RestorePoint", "find_restore_point", "restore_point_at", "restore_point_of", "restore_points"]


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
        >>> from monolith.state.checkpoint_folder import write_checkpoint
        >>> _ = write_checkpoint("memory://run-7/model.ckpt-5", state={}, step=5, time=100.0)
        >>> [(point.step, point.time) for point in restore_points("memory://run-7")]
        [(5, 100.0)]
    """
    return _scan(model_dir)[0]


def find_restore_point(
    model_dir: StrPath, *, step: int | None = None, time: float | None = None, sequence: int | None = None
) -> RestorePoint:
    """The last restore point at or before a step, a time (seconds since 1970) or a sequence number; without any, the newest.

    Of several with the same step, as after a restore to an earlier one, it is that of the youngest line. One that a missing
    segment has cut off is passed over, with a warning, if a moment was asked for.

    Raises:
        LogGapError: Without a moment: the log has committed more than the newest restore point that can be reached.
        CorruptFileError: Without a moment: there is something newer that is damaged.
        InvalidArgumentError: There is no such restore point.
    """
    wanted = {"step": step, "time": time, "sequence": sequence}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgumentError(f"restore_to: expected one of step, time and sequence, got {', '.join(given)}")
    while True:
        there = _listing(model_dir)
        try:
            return _find(model_dir, given)
        except (CorruptFileError, LogGapError):
            # Training removes segments that a newer snapshot has made superfluous, perhaps between two looks at the folder.
            if there == _listing(model_dir):
                raise


def _find(model_dir: StrPath, given: Mapping[str, float]) -> RestorePoint:
    points, damaged = _scan(model_dir)
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


def restore_point_at(model_dir: StrPath, moment: str) -> RestorePoint:
    """The last restore point at or before a `Moment`, as `--restore-to` gives it. One that is earlier is logged.

    Raises:
        InvalidArgumentError: the run never reached that step or sequence number, so its newest state is not what was asked for.

    Example:
        >>> from monolith.state.checkpoint_folder import write_checkpoint
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


def _listing(model_dir: StrPath) -> list[list[str]]:
    top = open_folder(model_dir)
    return [top.names(), top.inside(LOG).names(), top.inside(SNAPSHOTS).names()]


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
        _scan_log(str(folder), points, damaged)
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


def _scan_log(model_dir: str, points: list[RestorePoint], damaged: list[_Damaged]) -> None:
    reader = LogReader(Path(model_dir) / LOG)
    try:
        reader.require_committed()
        if (unknown := reader.unknown_end()) is not None:
            _log.warning("%s", unknown)
    except LogGapError as error:
        damaged.append(_Damaged(sequence=reader.committed(), error=error))
    except CorruptFileError as error:
        damaged.append(_Damaged(sequence=reader.newest + 1, error=error))
    sequences = reader.sequences()
    for sequence in sequences:
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
            # No restore point, but what leads to it must not have a hole either.
            _is_reachable(_of_segment(model_dir, info), damaged)


def _of_segment(model_dir: str, info: SegmentInfo) -> RestorePoint:
    return RestorePoint(model_dir=model_dir, step=info.step, time=info.time, sequence=info.sequence, checkpoint=None)


def _is_reachable(point: RestorePoint, damaged: list[_Damaged]) -> bool:
    """Whether everything that leads to `point` is there. What was there and is missing is added to `damaged`."""
    if point.checkpoint is not None:
        return True
    try:
        return find_lineage(point.model_dir, point.sequence) is not None
    except (CorruptFileError, LogGapError) as error:
        damaged.append(_Damaged(sequence=point.sequence, error=error))
        return False


def _require_newest(point: RestorePoint | None, damaged: Iterable[_Damaged]) -> None:
    """Continuing from an older state than the newest must be an operator's decision, not the disk's."""
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
