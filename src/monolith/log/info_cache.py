"""What segments say of themselves, read once per process: retention and checkpoints walk the same chains again and again."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

from monolith.log.segment import LogSegment
from monolith.log.segment_info import SegmentInfo, SegmentTable

__all__ = ["segment_info"]

# A file system's clock ticks every few milliseconds: within one tick a file can be changed without a trace.
_SETTLED_SECONDS = 2.0


def segment_info(path: Path) -> SegmentInfo:
    """`LogSegment(path).info`. A file that is still the same one is not read again; a young one always is."""
    try:
        found = path.stat()
    except OSError:
        return LogSegment(path).info  # which says what is wrong
    if time.time() - found.st_mtime < _SETTLED_SECONDS:
        return LogSegment(path).info
    return _settled_info(path, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=8192)
def _settled_info(path: Path, inode: int, size: int, modified: int) -> SegmentInfo:
    info = LogSegment(path).info
    return dataclasses.replace(info, tables=tuple(map(_with_shared_config, info.tables)))


def _with_shared_config(table: SegmentTable) -> SegmentTable:
    """Configurations are nearly all of what a header holds, and the same in every segment."""
    shared = _config(json.dumps(table.meta.config))
    return dataclasses.replace(table, meta=table.meta.model_copy(update={"config": shared}))


@functools.lru_cache(maxsize=256)
def _config(text: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text)
    return config
