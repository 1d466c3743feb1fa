"""Finds packages that `benchmarks/setup_peers.sh online` has installed besides those of this environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".venv-bench" / "online"


def require(package: str) -> None:
    """Make `package` importable, or raise `ImportError`."""
    if importlib.util.find_spec(package) is None and FOLDER.is_dir() and str(FOLDER) not in sys.path:
        # Behind everything else: NumPy and what else is there twice comes from this environment.
        sys.path.append(str(FOLDER))
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed; benchmarks/setup_peers.sh online installs it", name=package)
