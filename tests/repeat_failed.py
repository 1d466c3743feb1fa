"""Repeat the failed tests of the last run, one by one: `python tests/repeat_failed.py`.

Hundreds of tests start processes, kill them and wait, while others use all processors. One that fails there and passes alone is
not a reason to hold back a change, but it must not be forgotten either: its first failure stays in the output, and the last
lines name it. More than a few are no accident.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/monolith/failed")
MOST = 5


def main() -> int:
    """Return 0 if the tests pass now, and 1 if one fails again or there are too many to try."""
    failed: list[str] = json.loads(FAILED.read_text())
    if not 0 < len(failed) <= MOST:
        return 1
    print(f"\nRepeating what has failed, one by one: {len(failed)}", flush=True)
    if subprocess.run([sys.executable, "-m", "pytest", "-n0", "-q", *failed]).returncode:
        return 1
    print("FLAKY, failed next to other tests and passed alone. Find out why:")
    print(*failed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
