"""A process that serves one table and takes pushes: `sync_target.py FOLDER FILE`. Asked to stop, it writes its rows to FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from followed_tables import rows_of, table
from monolith.original import DiscoveryBackend, ParameterSyncServer


def main(folder: str, file: str) -> None:
    served = table(mode="serving")
    with (
        ParameterSyncServer({"item": [served]}) as target,
        DiscoveryBackend(f"file={folder}") as backend,
        backend.announced("ps_0", 0, target.address),
    ):
        target.wait()
    Path(file).write_text(json.dumps({str(id_): row for id_, row in rows_of(served).items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
