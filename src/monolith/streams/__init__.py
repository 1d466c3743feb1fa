"""Streams: partitioned, append-only logs of records, in a folder or on a broker."""

from monolith.streams.folder import FolderSettings, FolderStream, create_folder_stream
from monolith.streams.opening import open_stream
from monolith.streams.stream import END, START, Headers, Records, Stream, StreamReader, StreamWriter

__all__ = [
    "END",
    "FolderSettings",
    "FolderStream",
    "Headers",
    "Records",
    "START",
    "Stream",
    "StreamReader",
    "StreamWriter",
    "create_folder_stream",
    "open_stream",
]
