"""Servers that give buckets to each other, over links that lose transfers or their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from monolith.errors import ServerError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.server_group import link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets, MoveBuckets
from monolith.table import Bags
from monolith.testing import sgd_table_config
from monolith.transport.link import Exchange, Link
from same_port import started_again

__all__ = ["BAGS", "IDS", "DeafLink", "MuteLink", "asked", "filled", "moved", "mover_done", "started", "wait_for"]

TABLE = sgd_table_config(1, name="t")
IDS = np.arange(300)
BAGS = Bags(table="t", ids=IDS, offsets=np.arange(301))


class DeafLink(Link):
    """Delivers transfers and does not hear the answers, or does not even deliver them."""

    delivers = True

    def begin(
        self, call: Call, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Exchange:
        """As any link, but for transfers."""
        exchange = super().begin(call, text, arrays, timeout=timeout)
        if call == Call.INSTALL_BUCKETS:
            if self.delivers:
                exchange.finish()
            raise UnavailableError("the answer got lost")
        return exchange


class MuteLink(DeafLink):
    delivers = False


def started(folder: Path | None, port: int = 0) -> ParameterServer:
    # Nothing is written by itself: what must be durable is committed where it must be.
    return started_again(ServerConfig(folder=folder, port=port))


def asked(address: str) -> Buckets:
    link = link_to(address, ClientConfig())
    try:
        return Buckets.from_json(link.call(Call.BUCKETS).text)
    finally:
        link.close()


def moved(giver: str, taker: str, *, wait: float) -> dict[str, object]:
    link = link_to(giver, ClientConfig())
    try:
        move = MoveBuckets(buckets=(0, 2048), taker=taker, rebalance=3, wait=wait)
        answer: dict[str, object] = json.loads(link.call(Call.MOVE_BUCKETS, move.model_dump_json()).text)
        return answer
    finally:
        link.close()


def mover_done(giver: str) -> None:
    """Whoever called `moved` moves nothing any more, and others may."""
    link = link_to(giver, ClientConfig())
    try:
        done = MoveBuckets(buckets=None, taker=giver, rebalance=3, wait=0.0)
        link.call(Call.MOVE_BUCKETS, done.model_dump_json())
    finally:
        link.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def filled(giver: ParameterServer) -> ServerStore:
    store = ServerStore([giver.address], [TABLE])
    store.assign("t", IDS, torch.ones(len(IDS), 1))
    return store


def rebalance_until_done(store: ServerStore, addresses: list[str], outcome: list[BaseException]) -> None:
    """Try until it is done: a kill may end an attempt."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            store.rebalance(addresses)
            return
        except ServerError:
            time.sleep(0.1)
        except BaseException as error:
            outcome.append(error)
            return
    outcome.append(TimeoutError("the rebalance never ended"))
