"""`FolderSettings`: what can be chosen about a folder stream."""

from __future__ import annotations

from pydantic import Field

from monolith.config import Config

__all__ = ["FolderSettings"]


class FolderSettings(Config):
    """Settings of a folder stream. Those given when it is created are kept with it, others are for one process.

    Example:
        >>> FolderSettings.from_texts({"retention_bytes": "1000000000"}).retention_bytes
        1000000000
    """

    fsync: bool = True
    """Whether `flush` waits until the records are on disk. False only for demonstrations and tests: a power cut may lose
    records that were flushed, and leave the stream unreadable."""
    linger_ms: float = Field(default=1.0, ge=0, le=1000)
    """How long a writer waits for more records before it writes the first one, in milliseconds."""
    segment_bytes: int = Field(default=64 << 20, ge=4096, le=1 << 30)
    """Size at which a new file is begun."""
    retention_bytes: int | None = Field(default=None, ge=1)
    """Size of a partition beyond which its oldest files are removed. None keeps all. The newest file is always kept."""
    retention_secs: float | None = Field(default=None, gt=0)
    """Files are removed so long after the last record was written to them. None keeps all."""
    max_pending_bytes: int = Field(default=64 << 20, ge=1)
    """`append` waits while this many bytes are not written yet."""
