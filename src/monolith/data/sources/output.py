"""The file under a writer: opened by URL, compressed by its suffix, closed by `with`."""

from __future__ import annotations

import gzip
import zlib
from types import TracebackType
from typing import IO, Self, cast

import fsspec

from monolith.data.sources.streams import compression_of
from monolith.errors import InvalidArgumentError, StorageError
from monolith.urls import checked_location

__all__ = ["OutputFile"]


class OutputFile:
    """A file being written; the base of `TFRecordWriter` and `RecordWriter`. An existing one is replaced."""

    def __init__(self, url: str) -> None:
        kind = compression_of(url, "infer")
        if kind not in ("none", "gzip", "zlib"):
            raise InvalidArgumentError(f"url: {url!r} would be {kind}; writers compress with gzip (.gz) and zlib (.zz)")
        self._url = url
        try:
            self._file = cast("IO[bytes]", fsspec.open(checked_location(url), "wb").open())
        except OSError as error:
            raise StorageError(f"{url}: cannot write: {error}") from error
        self._gzip = gzip.GzipFile(fileobj=self._file, mode="wb") if kind == "gzip" else None
        self._zlib = zlib.compressobj() if kind == "zlib" else None

    def _write(self, data: bytes) -> None:
        try:
            if self._gzip is not None:
                self._gzip.write(data)
            else:
                self._file.write(data if self._zlib is None else self._zlib.compress(data))
        except OSError as error:
            raise StorageError(f"{self._url}: cannot write: {error}") from error

    def close(self) -> None:
        """Write what is still held back and close the file; closing again does nothing."""
        if self._file.closed:
            return
        try:
            if self._gzip is not None:
                self._gzip.close()
            if self._zlib is not None:
                self._file.write(self._zlib.flush())
            self._file.close()
        except OSError as error:
            raise StorageError(f"{self._url}: cannot write: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
