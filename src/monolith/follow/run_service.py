"""How the service of a run is found: by two files in its model_dir."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from monolith.errors import CorruptFileError, MonolithError, StorageError, UnavailableError
from monolith.state.storage import open_folder
from monolith.transport.tokens import read_secret_file, read_token
from monolith.urls import is_remote

__all__ = [
    "ADDRESS_FILE",
    "TOKEN_FILE",
    "announce_rank",
    "announce_servers",
    "forget_rank",
    "forget_ranks",
    "known_identity",
    "rank_feeds",
    "rank_service",
    "run_identity",
    "servers_token",
    "service_address",
    "service_token",
    "write_private",
]

ADDRESS_FILE = "controller_server_addr.txt"
"""The file in the model_dir with the address of the chief's service, while the run goes on."""
TOKEN_FILE = "controller_token"
"""The file in the model_dir with the token of the service, which only its owner can read."""


_SERVERS = "servers"
FEEDS = "feeds"
"""The folder in the model_dir with the address and the token of each rank but the chief."""


RUN_ID = "run_id"
"""The file in the model_dir with the identity of the run, for as long as there is a run."""


def run_identity(model_dir: str) -> str:
    """Return the identity of the run in `model_dir`, which is drawn when it is first asked for.

    Example:
        >>> run_identity("memory://run-9") == run_identity("memory://run-9")
        True
    """
    home = open_folder(model_dir)
    if home.size(RUN_ID) is None:
        home.write(RUN_ID, secrets.token_hex(16).encode())
    # Read back: another process may have written its own at the same time.
    return known_identity(model_dir)


def known_identity(model_dir: str) -> str:
    """Return the identity of the run in `model_dir`, "" if none was drawn yet.

    Example:
        >>> known_identity("memory://run-10")
        ''
    """
    home = open_folder(model_dir)
    return "" if home.size(RUN_ID) is None else home.read(RUN_ID).decode(errors="replace").strip()


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


def write_private(folder: Path, name: str, text: str) -> None:
    """Write a file that only its owner can read, at no moment anybody else."""
    temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        temporary.replace(folder / name)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{folder / name}: cannot be written: {error.strerror}") from error


def announce_rank(model_dir: str, rank: int, address: str, token: str | None) -> None:
    """Let followers find a rank: write its address, and its token for its owner's eyes alone."""
    write_private(Path(model_dir) / FEEDS, str(rank), json.dumps({"address": address, "token": token}))


def announce_servers(model_dir: str, token: str | None) -> None:
    """Let followers of the same user have the token of the parameter servers of a run."""
    write_private(Path(model_dir) / FEEDS, _SERVERS, json.dumps({"token": token}))


def servers_token(model_dir: str) -> str | None:
    """Return the token of the parameter servers of a run, if it is known here."""
    path = Path(model_dir) / FEEDS / _SERVERS
    if is_remote(model_dir) or not path.exists():
        return None
    try:
        token = json.loads(read_secret_file(path, FEEDS).decode())["token"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: expected the token of the servers: {error}") from None
    return None if token is None else str(token)


def forget_rank(model_dir: str, rank: int, address: str) -> None:
    """Let nobody look for a rank that ends, unless a successor has announced itself."""
    with suppress(MonolithError, OSError):
        if rank_service(model_dir, rank)[0] == address:
            (Path(model_dir) / FEEDS / str(rank)).unlink()


def forget_ranks(model_dir: str, *, since: int) -> None:
    """Let nobody look for ranks with the number `since` or a greater one."""
    for rank in rank_feeds(model_dir):
        if rank >= since:
            (Path(model_dir) / FEEDS / str(rank)).unlink(missing_ok=True)


def rank_feeds(model_dir: str) -> list[int]:
    """List the ranks of a run that are announced, in order."""
    if is_remote(model_dir):
        return []
    return sorted(int(path.name) for path in (Path(model_dir) / FEEDS).glob("*") if path.name.isdecimal())


def rank_service(model_dir: str, rank: int) -> tuple[str, str | None]:
    """Return the address and the token of a rank."""
    path = Path(model_dir) / FEEDS / str(rank)
    try:
        found = json.loads(read_secret_file(path, FEEDS).decode())
        return str(found["address"]), found["token"]
    except StorageError:
        raise UnavailableError(f"{path}: the rank is not there, it has ended or has not begun") from None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: expected the address and the token of a rank: {error}") from None
