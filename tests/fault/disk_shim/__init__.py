"""A disk that loses power, runs full and fails, for programs that believe in it: see disk_shim.c and power_cut.py."""

from disk_shim.journal import Op, Record, read_journal
from disk_shim.power_cut import Disk, contents_of, write_image
from disk_shim.run import DiskShim, Ended, Nursery, compile_shim

__all__ = [
    "Disk",
    "DiskShim",
    "Ended",
    "Nursery",
    "Op",
    "Record",
    "compile_shim",
    "contents_of",
    "read_journal",
    "write_image",
]
