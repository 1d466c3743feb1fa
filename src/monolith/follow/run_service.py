"""How the service of a run is found: by two files in its model_dir."""

from __future__ import annotations

from pathlib import Path

from monolith.state.storage import is_remote, open_folder
from monolith.transport.tokens import read_secret_file, read_token

__all__ = ["ADDRESS_FILE", "TOKEN_FILE", "service_address", "service_token"]

ADDRESS_FILE = "controller_server_addr.txt"
"""The file in the model_dir with the address of the chief's service, while the run goes on."""
TOKEN_FILE = "controller_token"
"""The file in the model_dir with the token of the service, which only its owner can read."""


def service_address(model_dir: str) -> str | None:
    """Return the address of the service of the run in `model_dir`. None if no run goes on there."""
    home = open_folder(model_dir)
    if home.size(ADDRESS_FILE) is None:
        return None
    return home.read(ADDRESS_FILE).decode(errors="replace").strip()


def service_token(model_dir: str, token: str | None = None) -> str | None:
    """Return `token` or, if it is None, that of the run in `model_dir`. A remote model_dir has none: $MONOLITH_PS_TOKEN."""
    file = Path(model_dir, TOKEN_FILE)
    if token is None and not is_remote(model_dir) and file.exists():
        return read_secret_file(file, TOKEN_FILE).decode(errors="replace").strip()
    return read_token(None) if token is None else token
