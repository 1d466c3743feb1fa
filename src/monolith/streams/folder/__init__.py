"""Streams in a folder of a local disk: the embedded default, without a broker."""

from monolith.streams.folder.settings import FolderSettings
from monolith.streams.folder.stream import FolderStream, create_folder_stream

__all__ = ["FolderSettings", "FolderStream", "create_folder_stream"]
