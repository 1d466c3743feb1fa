"""Measure how an empty table grows: inserts per second, the longest call, and memory per row over time."""

from __future__ import annotations

import gc
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peers import GrowingPeer
from workload import BATCH, IdArray

Times = npt.NDArray[np.float64]

SAMPLE_ROWS = 250_000
WINDOW_ROWS = 1_000_000  # "sustained" is the slowest stretch of this many rows, not the average


def payload_bytes(dim: int) -> int:
    """Weights and one Adagrad slot, in float32."""
    return 4 * dim * 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def warm_memory(size: int) -> None:
    """Allocate memory, touch it and free it.

    A virtual machine gets its memory from the host at first touch, many times slower than from its own kernel. The first
    measurement would pay for all, so memory is touched before every measurement. Free memory may
    return to the host within seconds, so it is touched again right before every part of a measurement.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = np.frombuffer(memory, dtype=np.uint8)
        view.fill(1)
        del view


def warm_for(rows: int, dim: int) -> None:
    """Touch twice the memory of that many rows, and the slabs that a table requests from the system at once."""
    warm_memory(2 * rows * (payload_bytes(dim) + 16) + (64 << 20))


def timed_inserts(table: GrowingPeer, ids: IdArray, step: int) -> Times:
    """[2, calls]: seconds on the clock and seconds of this thread's work, of each insert of `step` ids.

    A virtual machine that is frozen for ten seconds (seen) is a pause on the clock; in the thread's time it is none.
    """
    times = np.empty((2, ids.size // step))
    for n in range(ids.size // step):
        prepared = table.prepare(ids[n * step : (n + 1) * step])
        start, worked = time.perf_counter(), time.thread_time()
        table.insert(prepared)
        times[:, n] = time.perf_counter() - start, time.thread_time() - worked
    return times


def summary(times: Times) -> dict[str, float]:
    clock, worked = times
    return {
        "calls": clock.size,
        "median_ms": float(np.median(clock)) * 1e3,
        "p99_99_ms": float(np.quantile(clock, 0.9999)) * 1e3,
        "longest_ms": float(clock.max()) * 1e3,
        "longest_at_call": int(clock.argmax()),
        "longest_work_ms": float(worked.max()) * 1e3,
        "longest_work_at_call": int(worked.argmax()),
    }


def grow_in_batches(make: type[GrowingPeer], ids: IdArray, dim: int, threads: int) -> dict[str, Any]:
    # A first small table loads what is loaded lazily, so that only the measured table's memory is counted.
    timed_inserts(make(dim, threads), ids[: 4 * BATCH], BATCH)
    gc.collect()
    baseline = resident_bytes()
    table = make(dim, threads)
    ids = ids[: ids.size // BATCH * BATCH]
    chunk = -(-SAMPLE_ROWS // BATCH) * BATCH
    seconds, samples, peak = [], [], 0
    for first in range(0, ids.size, chunk):
        warm_for(chunk, dim)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        seconds.append(timed_inserts(table, ids[first : first + chunk], BATCH))
        peak = max(peak, peak_resident_bytes())
        rows = table.rows()
        ideal = rows * (payload_bytes(dim) + 16)
        reported = table.bytes()
        samples.append(
            {
                "rows": rows,
                "resident_bytes_per_row": (resident_bytes() - baseline) / rows,
                "resident_ratio": (resident_bytes() - baseline) / ideal,
                "reported_bytes_per_row": None if reported is None else reported / rows,
                "reported_ratio": None if reported is None else reported / ideal,
            }
        )
    times = np.concatenate(seconds, axis=1)
    calls = times[0]
    window = max(1, WINDOW_ROWS // BATCH)
    windows = np.add.reduceat(calls, np.arange(0, calls.size - calls.size % window or 1, window))
    return {
        "versions": table.versions,
        "rows": table.rows(),
        "inserts_m_per_s": ids.size / calls.sum() / 1e6,
        "slowest_window_m_per_s": min(window, calls.size) * BATCH / windows.max() / 1e6,
        "batch_call": summary(times),
        "samples": samples,
        "peak_resident_ratio": (peak - baseline) / (table.rows() * (payload_bytes(dim) + 16)),
    }


def grow_by_single_rows(make: type[GrowingPeer], ids: IdArray, dim: int, threads: int) -> dict[str, Any]:
    """Every growth of the table falls into some one-row call; the longest shows it."""
    gc.collect()
    gc.disable()
    table = make(dim, threads)
    growing = []
    for first in range(0, ids.size, SAMPLE_ROWS):
        warm_for(SAMPLE_ROWS, dim)
        growing.append(timed_inserts(table, ids[first : first + SAMPLE_ROWS], 1))
    # The same calls on ids that are there already cannot grow anything: their longest is the machine's own noise.
    steady = timed_inserts(table, ids[: min(ids.size, 1_000_000)], 1)
    gc.enable()
    return {"growing": summary(np.concatenate(growing, axis=1)), "steady": summary(steady)}


def measure(make: type[GrowingPeer], ids: IdArray, dim: int, threads: int, one_row_steps: int) -> dict[str, Any]:
    result = grow_in_batches(make, ids, dim, threads)
    if one_row_steps:
        gc.collect()
        result["one_row"] = grow_by_single_rows(make, ids[:one_row_steps], dim, threads)
    return result
