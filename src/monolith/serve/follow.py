"""A replica that follows a run: its rows and weights are those of training a moment ago, or of an earlier moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, InvalidArgumentError, UnavailableError
from monolith.follow.follower import Follower, FollowTarget, Writer
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
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_point_at
from monolith.state.tables import TableSource, open_source
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.link import Link
from monolith.transport.server import read_pem
from monolith.transport.tokens import read_token

__all__ = ["RunFollower", "RunWriters", "SavedState", "TrainingFollower", "server_writers", "set_followed_weights"]

_CONNECT_SECS = 5.0

_CHUNK_ROWS = 2**22
"""About how many rows are read into memory at a time, besides those that are served."""
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
            connect=lambda: Link(address, timeout=_CONNECT_SECS, token=secret, tls_root_certs=pem, max_streams=1),
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
        return Link(address, timeout=_CONNECT_SECS, token=token or self._token, tls_root_certs=self._pem, max_streams=1)

    def _connect(self) -> Link:
        address = service_address(self.model_dir)
        if address is None:
            raise UnavailableError(
                f"{self.model_dir}: no run answers here, there is no {ADDRESS_FILE}. It has ended, or has not begun"
            )
        token = service_token(self.model_dir) or self._token
        return Link(address, timeout=_CONNECT_SECS, token=token, tls_root_certs=self._pem, max_streams=1)


def _tables_of(predictor: Predictor) -> dict[str, list[EmbeddingTable]]:
    """Return the tables of a predictor by the names they have in its run.

    Raises `InvalidArgumentError` if its rows are in other processes.
    """
    stores = predictor.stores
    found: dict[str, list[EmbeddingTable]] = {}
    for number, store in enumerate(stores.values()):
        if not store.tables and store.configs():
            raise InvalidArgumentError("the rows of this model are in other processes, which follow the run themselves")
        for name, table in store.tables.items():
            # A run with several stores puts their number before the name. Two collections may also share a store.
            found.setdefault(name, []).append(table)
            if len(stores) > 1:
                found.setdefault(f"{number}/{name}", []).append(table)
    return found


class SavedState:
    """A state of a run that was saved, checked and ready to be put into a predictor.

    Args:
        point: A checkpoint or a moment of the log.
        tables: The serving tables by the names they have in the run.

    Raises:
        CorruptFileError: Something of it is damaged.
        InvalidArgumentError: It does not fit the tables.
    """

    def __init__(self, point: RestorePoint, tables: Mapping[str, Sequence[EmbeddingTable]]) -> None:
        self.point = point
        self._source = open_source(point)
        self._tables = {name: copies for name, copies in tables.items() if name in self._source.tables}
        for name, copies in self._tables.items():
            saved = self._source.tables[name].config
            if saved.dim != copies[0].dim:
                raise InvalidArgumentError(
                    f"table {name!r}: {point.location} has rows of {saved.dim} values, the model has {copies[0].dim}"
                )
        state = point.state().get("model")
        if not isinstance(state, dict):
            raise CorruptFileError(f"{point.location}: has no dense weights")
        self._weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        # Every file is read and verified before the first row changes.
        for buckets in self._chunks():
            self._filled(buckets)

    def put_into(self, predictor: Predictor) -> None:
        """Replace all rows and weights. Requests are answered meanwhile, some of them with rows of both states."""
        for buckets in self._chunks():
            for name, saved in self._filled(buckets).items():
                entries = saved.entries()
                ids = entries.ids.numpy()
                for copy in self._tables[name]:
                    gone = np.setdiff1d(copy.rows_of_buckets(buckets).ids, ids)
                    if len(gone):
                        copy.erase(gone)
                    if len(ids):
                        copy.assign(ids, entries.values)
        predictor.set_weights(self._weights, ignore_unknown=True)

    def _chunks(self) -> list[range]:
        rows = sum(self._source.rows_in(name, range(NUM_BUCKETS)) for name in self._tables)
        step = max(1, NUM_BUCKETS * _CHUNK_ROWS // max(_CHUNK_ROWS, rows))
        return [range(first, min(first + step, NUM_BUCKETS)) for first in range(0, NUM_BUCKETS, step)]

    def _filled(self, buckets: range) -> dict[str, EmbeddingTable]:
        source: TableSource = self._source
        empty = {
            name: EmbeddingTable(source.tables[name].config.model_copy(update={"initial_capacity": 0}))
            for name in self._tables
        }
        source.fill(empty, buckets)
        return empty


class _ServedModel:
    """The tables and weights of a predictor."""

    def __init__(self, predictor: Predictor, tables: Mapping[str, Sequence[EmbeddingTable]]) -> None:
        self._predictor, self._tables = predictor, tables
        self.seen: set[str] = set()
        """Names of all weights that were published."""

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        return self._tables

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.seen |= weights.keys()
        set_followed_weights(self._predictor, weights)


def set_followed_weights(predictor: Predictor, weights: Mapping[str, np.ndarray]) -> None:
    """Give a predictor the weights of a feed, of which it may not need all."""
    known = predictor.weights
    tensors = {name: torch.from_numpy(array) for name, array in weights.items() if name in known}
    predictor.set_weights({name: tensor.to(known[name].dtype) for name, tensor in tensors.items()})


class RunFollower:
    """Keeps copies of rows and weights at the state of a run, until `close`.

    Args:
        target: What is kept up to date.
        writers: The processes that hold the rows.
        find_writer: Returns a server by its address, for servers that are added while the run goes on.
        find_writers: Returns all writers there are now. Asked every second.
        buckets: Keep only rows of these.
        run: The identity of the run that the target was exported from. Empty: not known.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        target: FollowTarget,
        writers: Sequence[Writer],
        *,
        find_writer: Callable[[str], Writer] | None = None,
        find_writers: Callable[[], Sequence[Writer]] | None = None,
        buckets: range = range(NUM_BUCKETS),
        run: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._follower = Follower(
            writers, target, find_writer=find_writer, find_writers=find_writers, buckets=buckets, run=run, clock=clock
        )

    def wait_until_read(self, timeout: float) -> bool:
        """Wait until the rows of all writers were read once. Returns whether that happened in time."""
        return self._follower.wait_until_read(timeout)

    def lag(self) -> Lag:
        """Return how far the copies are behind the run. Before the first rows, their age counts from the start."""
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

    def describe(self) -> dict[str, dict[str, object]]:
        """Return the state of each writer by name, for people."""
        return {name: dict(vars(one)) for name, one in self._follower.progress.items()}

    def close(self) -> None:
        """Stop following. The copies keep what they have."""
        self._follower.close()


class TrainingFollower(RunFollower):
    """Keeps a predictor at the state of a run, or at an earlier one that an operator asks for, until `close`.

    Args:
        predictor: Its tables must be in this process.
        writers: The processes that hold the rows.
        find_writer: Returns a server by its address, for servers that are added while the run goes on.
        find_writers: Returns all writers there are now. Asked every second.
        model_dir: Of the run, to go back to what it has saved. None: that is not possible.
        held_file: Remembers the moment that an operator has gone back to, so that a restart stays there. None: it does not.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        predictor: Predictor,
        writers: Sequence[Writer],
        *,
        find_writer: Callable[[str], Writer] | None = None,
        find_writers: Callable[[], Sequence[Writer]] | None = None,
        model_dir: str | None = None,
        held_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predictor, self._model_dir, self._held_file = predictor, model_dir, held_file
        self._held: RestorePoint | None = None
        self._base_step = predictor.signature.step
        self._tables = _tables_of(predictor)
        self._target = target = _ServedModel(predictor, self._tables)
        origin = predictor.signature.run
        super().__init__(
            target,
            writers,
            find_writer=find_writer,
            find_writers=find_writers,
            run="" if origin is None else origin.identity,
            clock=clock,
        )
        if held_file is not None and held_file.exists():
            self._go_back(held_file.read_text().strip())

    @classmethod
    def of_run(cls, predictor: Predictor, run: RunWriters, *, held_file: Path | None = None) -> TrainingFollower:
        """Follow a run wherever its rows are: in its process, on servers or on ranks."""
        return cls(
            predictor,
            run.writers(),
            find_writer=run.server,
            find_writers=run.writers,
            model_dir=run.model_dir,
            held_file=held_file,
        )

    def unfollowed(self) -> list[str]:
        """List weights of the predictor that no writer has published so far. They stay as they were exported."""
        return sorted(name for name in self._predictor.weights.keys() - self._target.seen if "constant/" not in name)

    def catch_up(self) -> RestorePoint | None:
        """Take the newest state that the run has saved, if it is newer than the export and no writer has answered yet.

        Returns what was taken, or None.
        """
        if self._model_dir is None or any(one.as_of is not None for one in self._follower.progress.values()):
            return None
        try:
            point = find_restore_point(self._model_dir)
        except InvalidArgumentError:
            return None  # nothing was saved yet
        if point.step <= self._predictor.signature.step:
            return None
        saved = SavedState(point, self._tables)
        with self._follower.changing:
            if self._follower.has_rows:
                return None  # a writer has answered meanwhile, with newer rows
            saved.put_into(self._predictor)
        self._base_step = point.step
        return point

    def rollback_to(self, moment: str) -> str:
        """Go back to the newest saved state at or before `moment`, and stay there until `rollback_to("now")`.

        Args:
            moment: step=N, sequence=N, time=SECONDS since 1970, or "now" to follow the run again.

        Returns:
            A sentence that says what is served now.

        Raises:
            InvalidArgumentError: The run has saved nothing as old as that. Nothing has changed.
        """
        if moment == "now":
            if self._held_file is not None:
                self._held_file.unlink(missing_ok=True)
            self._held = None
            self._follower.resume()
            return "following the run again"
        point = self._go_back(moment)
        if self._held_file is not None:
            # The sequence number stands for the same state for ever, a time perhaps not.
            exact = f"sequence={point.sequence}" if point.sequence else f"step={point.step}"
            write_durably(self._held_file, exact.encode())
        return f"serving step {point.step}, sequence {point.sequence} of the log, until told to follow again"

    def lag(self) -> Lag:
        """Return how far the predictor is behind the run."""
        lag, held = super().lag(), self._held
        if held is None:
            return replace(lag, step=max(lag.step, self._base_step))
        return replace(lag, step=held.step, connected=False, held=f"step={held.step}")

    def _go_back(self, moment: str) -> RestorePoint:
        if self._model_dir is None:
            raise InvalidArgumentError(
                "rollback: this replica knows no model_dir; start it with --run to go back to what the run has saved"
            )
        point = restore_point_at(self._model_dir, moment)
        saved = SavedState(point, self._tables)
        self._follower.hold()
        with self._follower.changing:
            saved.put_into(self._predictor)
        self._held = point
        _log.warning("went back to step %d of the run, and does not follow it until told to", point.step)
        return point
