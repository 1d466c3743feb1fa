"""Describe the machine that a number was measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path


def _field(path: str, pattern: str) -> str:
    match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    return match.group(1).strip() if match else "unknown"


def available_bytes() -> int:
    return int(_field("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")) * 1024


def _cache(level: str) -> str:
    sizes = [
        (index / "size").read_text().strip()
        for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        if (index / "level").read_text().strip() == level
        and (index / "type").read_text().strip() in ("Data", "Unified")
    ]
    return sizes[0] if sizes else "unknown"


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def describe() -> dict[str, str]:
    thp = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
    memory = _field("/proc/meminfo", r"^MemTotal:\s+(\d+) kB")
    return {
        "CPU": _field("/proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": f"L2 {_cache('2')}, L3 {_cache('3')}",
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "transparent huge pages": thp.group(1) if thp else "unknown",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "revision": _revision(),
        "load average at start": f"{os.getloadavg()[0]:.2f}",
    }
