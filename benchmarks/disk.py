"""Compare saving and loading a table with a plain sequential write and read of as many bytes on the same disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from growth import warm_memory
from workload import IdArray

BLOCK = 8 << 20


def plain_write(path: Path, size: int) -> None:
    block = np.random.default_rng(5).bytes(BLOCK)  # nothing on the way can compress it
    with path.open("wb", buffering=0) as file:
        written = 0
        while written < size:
            written += file.write(memoryview(block)[: size - written])
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            pass


def drop_from_cache(path: Path) -> float:
    """Asks the kernel to forget the file (no root needed, no other file touched); returns the share still cached."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = path.stat().st_size
        pages = -(-size // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) != 0:
                return 1.0
        return float(np.mean(np.frombuffer(memoryview(resident), dtype=np.uint8) & 1))


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(ids: IdArray, dim: int, threads: int, directory: Path, rounds: int) -> dict[str, Any]:
    from peers.monolith_table import SavedMonolith

    directory.mkdir(parents=True, exist_ok=True)
    saved, plain = directory / "table.bench", directory / "plain.bench"
    table = SavedMonolith(ids, dim, threads)
    result: dict[str, Any] = {"save": [], "write": [], "load": [], "read": [], "cached_share": 0.0}
    try:
        for _ in range(rounds):
            result["save"].append(seconds_of(lambda: table.save(saved)))
            size = saved.stat().st_size
            result["write"].append(seconds_of(partial(plain_write, plain, size)))
            for name, path, call in (
                ("load", saved, lambda: table.load(saved)),
                ("read", plain, lambda: plain_read(plain)),
            ):
                warm_memory(
                    2 * size
                )  # reading a table takes memory, a plain read hardly any: neither waits for the host
                result["cached_share"] = max(result["cached_share"], drop_from_cache(path))
                result[name].append(seconds_of(call))
            # A new file each time: overwriting in place would be another test.
            saved.unlink()
            plain.unlink()
    finally:
        saved.unlink(missing_ok=True)
        plain.unlink(missing_ok=True)
    return result | {"versions": table.versions, "bytes": size, "rows": ids.size}
