"""Stores whose rows are on parameter servers, as a training run sees them: saved, restored and resumed by the servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from monolith.ps.client.server_checkpoints import begin_server_saves, prepare_servers
from monolith.ps.client.server_group import ServerGroup
from monolith.state.manifest import FileEntry
from monolith.state.restore import RestoreChoices
from monolith.table.store import Store

__all__ = ["ServedSaves", "begin_saves", "lost_servers", "mark_initialised", "prepare_stores", "served_stores"]

_log = logging.getLogger(__name__)


def served_stores(stores: Iterable[Store]) -> list[ServerGroup]:
    """Those of `stores` that are on servers.

    Example:
        >>> from monolith.table import LocalStore
        >>> served_stores([LocalStore([])])
        []
    """
    return [store for store in stores if isinstance(store, ServerGroup)]


@dataclass(frozen=True, kw_only=True)
class ServedSaves:
    """What servers are writing of a checkpoint."""

    dense: Mapping[str, np.ndarray]
    """The values that the dense parameters on servers have in it."""
    finish: Callable[[], tuple[FileEntry, ...]] | None
    """Waits until it is written. None: there are no servers."""


def begin_saves(stores: Sequence[ServerGroup], path: str, *, step: int) -> ServedSaves:
    """Let the servers decide what is in the checkpoint at `path`."""
    if not stores:
        return ServedSaves(dense={}, finish=None)
    saves = [begin_server_saves(store.links, path, step=step) for store in stores]
    return ServedSaves(
        dense={name: values for save in saves for name, values in save.dense.items()},
        finish=lambda: tuple(entry for save in saves for entry in save.finish()),
    )


def prepare_stores(
    stores: Sequence[ServerGroup],
    path: str,
    *,
    only_fresh: bool,
    clear_nn: bool = False,
    **choices: Unpack[RestoreChoices],
) -> Callable[[], None]:
    """Let the servers read what they get of the checkpoint at `path`; calling the answer puts it in place.

    With `only_fresh`, servers that hold a state worth keeping keep it, also if it is newer than the checkpoint's. With `clear_nn`
    their dense parameters stay as they are.
    """
    if not stores:
        return lambda: None
    prepared = [
        prepare_servers(store.links, path, only_fresh=only_fresh, clear_nn=clear_nn, **choices) for store in stores
    ]

    def put_in_place() -> None:
        for put in prepared:
            put()

    return put_in_place


def lost_servers(stores: Sequence[ServerGroup], checkpoint: str, *, trained: bool) -> list[str]:
    """Return the addresses of servers that hold nothing, although more was trained on them than `checkpoint` has.

    More was trained if the run says so itself (`trained`), or if the servers that still hold their part are not at that
    checkpoint; its name is "" if there is none.
    """
    lost: list[str] = []
    for store in stores:
        health = dict(zip(store.addresses, store.health(), strict=True))
        if trained or any(one["initialised"] and one["checkpoint"] != checkpoint for one in health.values()):
            # A server that owns nothing, as one that has just been added, has nothing to lose.
            lost += [address for address, one in health.items() if not one["initialised"] and one["owns"]]
    return lost


def mark_initialised(stores: Sequence[ServerGroup]) -> None:
    """Say that what the servers hold from now on is worth keeping."""
    for store in stores:
        store.mark_initialised()
