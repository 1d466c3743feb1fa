"""A replica that follows a run: its rows and weights are those of training a moment ago."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from monolith.errors import InvalidArgumentError, MonolithError, UnavailableError
from monolith.follow.follower import Follower, Writer
from monolith.follow.run_service import (
    ADDRESS_FILE,
    rank_feeds,
    rank_service,
    servers_token,
    service_address,
    service_token,
)
from monolith.serve.predictor import Predictor
from monolith.serve.replica import Lag
from monolith.table import EmbeddingTable
from monolith.transport.link import Link
from monolith.transport.server import read_pem
from monolith.transport.tokens import read_token

__all__ = ["RunWriters", "TrainingFollower", "server_writers"]

CONNECT_SECS = 5.0

_log = logging.getLogger(__name__)


def server_writers(
    addresses: Sequence[str], *, token: str | None = None, tls_root_certs: Path | None = None
) -> tuple[list[Writer], Callable[[str], Writer]]:
    """Return the parameter servers at `addresses` as writers, and a function that finds further ones by their address."""
    if not addresses:
        raise InvalidArgumentError("servers: expected addresses such as 10.0.0.1:7100,10.0.0.2:7100")
    pem = None if tls_root_certs is None else read_pem(tls_root_certs, "tls_root_certs")
    secret = read_token(None) if token is None else token

    def writer(address: str) -> Writer:
        return Writer(
            name=f"server {address}",
            connect=lambda: Link(address, timeout=CONNECT_SECS, token=secret, tls_root_certs=pem, max_streams=1),
        )

    return [writer(address) for address in addresses], writer


class RunWriters:
    """Finds the processes of a run by its model_dir, also after they were started again elsewhere.

    Args:
        model_dir: Of the run.
        token: What its service and its servers require, where no file of the model_dir says it. None: $MONOLITH_PS_TOKEN.
        tls_root_certs: CA bundle (PEM) that signed its certificate.
    """

    def __init__(self, model_dir: str, *, token: str | None = None, tls_root_certs: Path | None = None) -> None:
        self.model_dir = model_dir
        self._token, self._tls_root_certs = token, tls_root_certs
        self._pem = None if tls_root_certs is None else read_pem(tls_root_certs, "tls_root_certs")

    def writer(self) -> Writer:
        """Return the chief of the run. Its address is read again for every connection."""
        return Writer(name=f"run {self.model_dir}", connect=self._connect)

    def writers(self) -> list[Writer]:
        """Return the chief, and the other ranks if rows are spread over ranks."""
        ranks = rank_feeds(self.model_dir)
        return [self.writer(), *(Writer(name=f"rank {n}", connect=partial(self._connect_to_rank, n)) for n in ranks)]

    def server(self, address: str) -> Writer:
        """Return a parameter server of the run. The chief knows its address."""
        token = servers_token(self.model_dir) or self._token
        _, find = server_writers([address], token=token, tls_root_certs=self._tls_root_certs)
        return find(address)

    def _connect_to_rank(self, rank: int) -> Link:
        address, token = rank_service(self.model_dir, rank)
        return Link(address, timeout=CONNECT_SECS, token=token or self._token, tls_root_certs=self._pem, max_streams=1)

    def _connect(self) -> Link:
        address = service_address(self.model_dir)
        if address is None:
            raise UnavailableError(
                f"{self.model_dir}: no run answers here, there is no {ADDRESS_FILE}. It has ended, or has not begun"
            )
        token = service_token(self.model_dir) or self._token
        return Link(address, timeout=CONNECT_SECS, token=token, tls_root_certs=self._pem, max_streams=1)


class _ServedTables:
    """The tables and weights of a predictor, by the names they have in the run."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        stores = predictor.stores
        self._tables: dict[str, list[EmbeddingTable]] = {}
        for number, store in enumerate(stores.values()):
            if not store.tables:
                raise InvalidArgumentError(
                    "follow: the tables of this model are in other processes, which follow the run"
                )
            for name, table in store.tables.items():
                # A run with several stores puts their number before the name. Two collections may also share a store.
                self._tables.setdefault(name, []).append(table)
                if len(stores) > 1:
                    self._tables.setdefault(f"{number}/{name}", []).append(table)

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        return self._tables

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        known = self._predictor.weights
        tensors = {name: torch.from_numpy(array) for name, array in weights.items() if name in known}
        self._predictor.set_weights({name: tensor.to(known[name].dtype) for name, tensor in tensors.items()})


class TrainingFollower:
    """Keeps a predictor at the state of a run, until `close`.

    Args:
        predictor: Its tables must be in this process.
        writers: The processes that hold the rows.
        find_writer: Returns a server by its address, for servers that are added while the run goes on.
        find_writers: Returns all writers there are now. Asked every second.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        predictor: Predictor,
        writers: Sequence[Writer],
        *,
        find_writer: Callable[[str], Writer] | None = None,
        find_writers: Callable[[], Sequence[Writer]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._follower = Follower(
            writers, _ServedTables(predictor), find_writer=find_writer, find_writers=find_writers, clock=clock
        )

    @classmethod
    def of_run(cls, predictor: Predictor, run: RunWriters) -> TrainingFollower:
        """Follow a run wherever its rows are: in its process, on servers or on ranks."""
        return cls(predictor, run.writers(), find_writer=run.server, find_writers=run.writers)

    def wait_until_read(self, timeout: float) -> bool:
        """Wait until the rows of all writers were read once. Returns whether that happened in time."""
        return self._follower.wait_until_read(timeout)

    def lag(self) -> Lag:
        """Return how far the predictor is behind the run. Before the first rows, its age counts from the start."""
        now, found = self._clock(), self._follower.progress
        each = list(found.values())
        return Lag(
            seconds=now - min(self._began if one.as_of is None else one.as_of for one in each),
            step=max(one.step for one in each),
            event_time=max(one.event_time for one in each),
            sequence=min(one.sequence for one in each),
            positions={name: one.sequence for name, one in found.items()},
            connected=all(one.connected for one in each),
        )

    def describe(self) -> dict[str, object]:
        """Return the state of each writer, for people."""
        return {name: json.loads(json.dumps(vars(one))) for name, one in self._follower.progress.items()}

    def close(self) -> None:
        """Stop following. The predictor keeps what it has."""
        try:
            self._follower.close()
        except MonolithError as error:
            _log.warning("following did not end cleanly: %s", error)
