"""Danger: open windows that take all memory of the machine, or a limit that counts something else than memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from join_oracle import Acted, Shown, config_for, join_all, joined, labels_by_key, write_events, written
from monolith.data.join import Joiner
from monolith.errors import ConfigError, MemoryLimitError

GROWTH = """
import gc, json, os, sys
from pathlib import Path
from monolith.data.join.lmdb_store import LmdbStore
from monolith.data.join.state import Windows
folder, limit, keys, spill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "spill"

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

store = LmdbStore(folder, epoch=1, max_bytes=1 << 32) if spill else None
windows = Windows(bucket_ms=1000, limit=limit, store=store)
before, most, counted = anonymous(), 0, 0
for number in range(keys):
    key = b"key-%020d" % (number * 2654435761 % (1 << 40))
    windows.put(key, bytes(9) + os.urandom(300), due=number)
    if windows.is_full and spill:
        windows.commit(b"{}")
    if number % 2000 == 0:
        most, counted = max(most, anonymous() - before), max(counted, windows.size)
print(json.dumps({"most": most, "counted": counted}))
"""


def growth(folder: Path, limit: int, keys: int, how: str) -> dict[str, int]:
    command = [sys.executable, "-c", GROWTH, str(folder), str(limit), str(keys), how]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, int] = json.loads(ended.stdout)
    return found


def test_the_limit_counts_what_the_process_takes(tmp_path: Path) -> None:
    found = growth(tmp_path, 1 << 30, 60_000, "memory")
    # A dict doubles when it grows, so a little before it has taken less than is counted for its slots.
    assert 0.6 * found["counted"] < found["most"] < 1.2 * found["counted"]


def test_memory_stays_within_the_limit_while_spilling(tmp_path: Path) -> None:
    limit = 16 << 20
    found = growth(tmp_path, limit, 120_000, "spill")
    assert found["counted"] <= limit + (1 << 20)
    # 90 MB went through it.
    assert found["most"] < 1.3 * limit


def test_windows_on_disk_give_the_same_examples(tmp_path: Path) -> None:
    shown = [Shown(f"k{n}", 1_000_000 + n) for n in range(4500)]
    acted = [Acted(f"k{n}", 1_000_000 + n + 5000, "click") for n in range(0, 4500, 3)]
    write_events(tmp_path, shown, acted)
    config = config_for(tmp_path, state={"folder": f"{tmp_path}/state", "spill": True, "memory_mb": 1}, lead_secs=20)
    join_all(config)
    assert labels_by_key(written(tmp_path / "examples")) == joined(shown, acted, config)


def test_without_a_disk_too_many_windows_are_an_error_that_loses_nothing(tmp_path: Path) -> None:
    shown = [Shown(f"k{n}", 1_000_000 + n) for n in range(4500)]
    write_events(tmp_path, shown, [])
    with pytest.raises(MemoryLimitError, match=r"state\.memory_mb: .* open windows .* set state\.spill"):
        join_all(config_for(tmp_path, state={"folder": f"{tmp_path}/state", "memory_mb": 1}))
    config = config_for(tmp_path, state={"folder": f"{tmp_path}/state", "memory_mb": 1, "spill": True})
    join_all(config)
    assert labels_by_key(written(tmp_path / "examples")) == joined(shown, [], config)
    with (
        pytest.raises(ConfigError, match=r"state\.spill: .* has windows on disk"),
        Joiner(config_for(tmp_path, state={"folder": f"{tmp_path}/state"})) as joiner,
    ):
        joiner.run(until_end=True)


def test_windows_move_from_memory_to_disk(tmp_path: Path) -> None:
    """Open windows of a joiner in memory are there when it begins to spill."""
    shown = [Shown(f"k{n}", 1_000_000 + 1000 * n) for n in range(30)]
    write_events(tmp_path, shown, [])
    with Joiner(config_for(tmp_path)) as joiner:
        joiner.run(until_end=True)
    more = [Shown(f"later{n}", 1_060_000 + 1000 * n) for n in range(5)]
    write_events(tmp_path, [*more, *shown], [Acted("k29", 1_030_000, "click")])
    config = config_for(tmp_path, state={"folder": f"{tmp_path}/state", "spill": True}, late="drop")
    counts = join_all(config)
    # Repeats of what the first joiner had are known as such, as far as they are remembered.
    assert counts["duplicate_impressions"] > 0
    assert counts["late_actions"] == 1
    assert set(labels_by_key(written(tmp_path / "examples"))) == {one.key for one in (*shown, *more)}
    assert not list((tmp_path / "state").rglob("*.windows"))
