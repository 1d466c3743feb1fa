"""A replica that follows a run: its rows and weights are those of training a moment ago, or of an earlier moment.

While the run does not answer, they are those that it has saved last, if that is newer or if the run has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError, UnavailableError
from monolith.follow.followed_writer import FollowedWriter
from monolith.follow.follower import Follower, FollowTarget, Writer
from monolith.follow.run_service import (
    ADDRESS_FILE,
    known_identity,
    rank_feeds,
    rank_service,
    servers_token,
    service_address,
    service_token,
)
from monolith.serve.predictor import Predictor
from monolith.serve.replica import Lag
from monolith.state.model_dir import ModelDir
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_point_at
from monolith.state.tables import TableSource, reading
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, ranges_of
from monolith.transport.link import Link
from monolith.transport.server import read_pem
from monolith.transport.tokens import read_token
from monolith.urls import is_remote

__all__ = ["RunFollower", "RunWriters", "SavedState", "TrainingFollower", "server_writers", "set_followed_weights"]

SILENT_SECS = 10.0
"""Seconds after which the saved state of a run that does not answer is looked at, by default."""
_CONNECT_SECS = 5.0
_LOOK_SECS = 1.0
_LOOK_SHARE = 0.1
"""The part of the time, at most, in which saved state is read, over and over again while a run saves and cannot be reached."""

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
    """A state of a run that was saved, for tables and weights that follow the run.

    It is a context manager: when the block is entered every file has been read and verified, and retention keeps the checkpoint
    until it is left.

    Args:
        point: A checkpoint or a moment of the log.
        tables: The serving tables by the names they have in the run.
        ranges: The buckets whose rows are wanted.
        closing: Set when reading must stop.

    Raises:
        CorruptFileError: Something of it is damaged.
        InvalidArgumentError: It does not fit the tables.
    """

    def __init__(
        self,
        point: RestorePoint,
        tables: Mapping[str, Sequence[EmbeddingTable]],
        ranges: Sequence[range] = (range(NUM_BUCKETS),),
        *,
        closing: threading.Event | None = None,
    ) -> None:
        self.point, self._ranges, self._closing = point, ranges, closing or threading.Event()
        self._wanted, self._tables = tables, dict(tables)
        self._weights: Mapping[str, np.ndarray] = {}
        self._source: TableSource | None = None
        self._kept = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._open(opening)
            self._kept = opening.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.close()

    def put_into(self, target: FollowTarget) -> None:
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
        target.set_weights(self._weights)

    def _open(self, opening: ExitStack) -> None:
        point = self.point
        if self._wanted and self._ranges:
            self._source = source = opening.enter_context(reading(point, self._ranges))
            self._tables = {name: copies for name, copies in self._wanted.items() if name in source.tables}
            for name, copies in self._tables.items():
                saved = source.tables[name].config
                if saved.dim != copies[0].dim:
                    raise InvalidArgumentError(
                        f"table {name!r}: {point.location} has rows of {saved.dim} values, the model has {copies[0].dim}"
                    )
        state = point.state().get("model")
        if not isinstance(state, dict):
            raise CorruptFileError(f"{point.location}: has no dense weights")
        self._weights = {name: _as_array(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
        for buckets in self._chunks():
            self._filled(buckets)

    def _chunks(self) -> Iterator[range]:
        if self._source is None:
            return
        rows = sum(self._source.rows_in(name, range(NUM_BUCKETS)) for name in self._tables)
        step = max(1, NUM_BUCKETS * _CHUNK_ROWS // max(_CHUNK_ROWS, rows))
        for wanted in self._ranges:
            for first in range(wanted.start, wanted.stop, step):
                if self._closing.is_set():
                    raise UnavailableError(
                        f"{self.point.location}: not read to its end, because the replica is closing"
                    )
                yield range(first, min(first + step, wanted.stop))

    def _filled(self, buckets: range) -> dict[str, EmbeddingTable]:
        assert self._source is not None
        empty = {
            name: EmbeddingTable(self._source.tables[name].config.model_copy(update={"initial_capacity": 0}))
            for name in self._tables
        }
        self._source.fill(empty, buckets)
        return empty


def _as_array(weight: torch.Tensor) -> np.ndarray:
    # NumPy has no bfloat16, and float32 holds all its values.
    return (weight.float() if weight.dtype == torch.bfloat16 else weight).cpu().numpy()


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
        step: The step of the export that the target was filled from.
        model_dir: Of the run, to read what it has saved when it does not answer. None: not known.
        silent_secs: Seconds without an answer after which that is read.
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
        step: int = 0,
        model_dir: str | None = None,
        silent_secs: float = SILENT_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._run, self._step, self._model_dir = target, run, step, model_dir
        self._clock, self._silent_secs = clock, silent_secs
        self._began = clock()
        self._home = None if model_dir is None else ModelDir(model_dir)
        self._taken: tuple[str, float] | None = None
        self._taken_buckets = np.zeros(NUM_BUCKETS, dtype=np.bool_)
        self._missing = ""
        self._catching_up = threading.Lock()
        self._closing = threading.Event()
        self._follower = Follower(
            writers, target, find_writer=find_writer, find_writers=find_writers, buckets=buckets, run=run, clock=clock
        )
        self._looking = threading.Thread(target=self._look, name="monolith-follow-saved", daemon=True)
        self._looking.start()

    def wait_until_read(self, timeout: float) -> bool:
        """Wait until the rows of all writers were read once. Returns whether that happened in time."""
        return self._follower.wait_until_read(timeout)

    def catch_up(self, silent_secs: float = 0.0) -> RestorePoint | None:
        """Take the newest state that the run has saved, where no writer has answered for so long. Returns it.

        It is taken if it is at least as new as the copies, or if the run has ended. None if it was not.
        """
        with self._catching_up:
            silent = self._follower.silent(silent_secs)
            if not silent or self._follower.held.is_set():
                self._note_missing("")
                return None
            try:
                point = self._take_saved(silent_secs)
            except (MonolithError, OSError) as error:
                self._note_missing(f"{', '.join(one.writer.name for one in silent)}: no answer, and {error}")
                return None
            self._note_missing("")
            return point

    def lag(self) -> Lag:
        """Return how far the copies are behind the run. Before the first rows, their age counts from the start."""
        now, found = self._clock(), self._follower.progress
        each = list(found.values())
        return Lag(
            seconds=now - min(self._began if one.as_of is None else one.as_of for one in each),
            step=max(one.step for one in each) or self._step,
            event_time=max(one.event_time for one in each),
            sequence=min(one.sequence for one in each),
            positions={name: one.sequence for name, one in found.items()},
            connected=all(one.connected for one in each),
            missing=self._missing,
        )

    def describe(self) -> dict[str, dict[str, object]]:
        """Return the state of each writer by name, for people."""
        return {name: dict(vars(one)) for name, one in self._follower.progress.items()}

    def close(self) -> None:
        """Stop following. The copies keep what they have."""
        self._closing.set()
        self._follower.close()
        self._looking.join()

    def _look(self) -> None:
        pause = _LOOK_SECS
        while not self._closing.wait(pause):
            began = time.monotonic()
            try:
                self.catch_up(self._silent_secs)
            except Exception:
                _log.exception("what the run has saved could not be taken, trying again")
            pause = max(_LOOK_SECS, (time.monotonic() - began) / _LOOK_SHARE)

    def _take_saved(self, silent_secs: float) -> RestorePoint | None:
        point, group = self._newest_saved(), self._follower
        silent = group.silent(silent_secs)
        if point is None or not silent or not self._is_news(point, silent):
            return None
        found, buckets = (point.location, point.time), group.unowned(silent)
        if found == self._taken:
            # The writers of a run end one after the other.
            buckets &= ~self._taken_buckets
            if not buckets.any():
                return None
        ranges = tuple(range(*pair) for pair in ranges_of(buckets))
        with SavedState(point, self._target.tables(), ranges, closing=self._closing) as saved, group.changing:
            if group.held.is_set() or not {*silent} <= {*group.silent(silent_secs)}:
                return None  # an operator goes back, or a writer has answered meanwhile
            group.leave_to(silent)
            saved.put_into(self._target)
            for one in silent:
                one.progress.step = point.step
        self._taken_buckets = buckets | self._taken_buckets if found == self._taken else buckets
        self._taken = found
        _log.warning(
            "%s: no answer; serving step %d, the newest that was saved",
            ", ".join(one.writer.name for one in silent),
            point.step,
        )
        return point

    def _is_news(self, point: RestorePoint, silent: Sequence[FollowedWriter]) -> bool:
        assert self._model_dir is not None
        ended = service_address(self._model_dir) is None
        if self._taken is None and all(one.progress.as_of is None for one in silent):
            # Nothing but the export was served so far.
            return point.step != self._step if ended else point.step > self._step
        # A run that was killed may come back with more than it has saved, one that has ended has saved everything.
        return ended or point.step >= max(one.progress.step for one in silent)

    def _newest_saved(self) -> RestorePoint | None:
        """Return the newest state that was saved. None if there is none yet."""
        folder, home = self._model_dir, self._home
        if folder is None or home is None:
            raise UnavailableError("the model_dir of the run is not known here; start the replica with --run")
        if not is_remote(folder) and not Path(folder).is_dir():
            raise UnavailableError(f"{folder}: there is no such folder here; make the model_dir of the run visible")
        identity = known_identity(folder)
        if self._run and identity and identity != self._run:
            raise InvalidArgumentError(
                f"{folder} has run {identity}, and the model was exported from run {self._run}; export it again"
            )
        try:
            return find_restore_point(home)
        except InvalidArgumentError:
            return None

    def _note_missing(self, reason: str) -> None:
        if reason and reason != self._missing:
            _log.warning("the last changes of the run may be missing. %s", reason)
        self._missing = reason


class TrainingFollower(RunFollower):
    """Keeps a predictor at the state of a run, or at an earlier one that an operator asks for, until `close`.

    Args:
        predictor: Its tables must be in this process.
        writers: The processes that hold the rows.
        find_writer: Returns a server by its address, for servers that are added while the run goes on.
        find_writers: Returns all writers there are now. Asked every second.
        model_dir: Of the run, for what it has saved. None: the replica cannot go back, and has only what writers say.
        held_file: Remembers the moment that an operator has gone back to, so that a restart stays there. None: it does not.
        silent_secs: Seconds without an answer of a writer after which what the run has saved is read.
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
        silent_secs: float = SILENT_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predictor, self._held_file = predictor, held_file
        self._held: RestorePoint | None = None
        self._served = served = _ServedModel(predictor, _tables_of(predictor))
        origin = predictor.signature.run
        super().__init__(
            served,
            writers,
            find_writer=find_writer,
            find_writers=find_writers,
            run="" if origin is None else origin.identity,
            step=predictor.signature.step,
            model_dir=model_dir,
            silent_secs=silent_secs,
            clock=clock,
        )
        if held_file is not None and held_file.exists():
            try:
                self._go_back(held_file.read_text().strip())
            except BaseException:
                self.close()
                raise

    @classmethod
    def of_run(
        cls,
        predictor: Predictor,
        run: RunWriters,
        *,
        held_file: Path | None = None,
        silent_secs: float = SILENT_SECS,
    ) -> TrainingFollower:
        """Follow a run wherever its rows are: in its process, on servers or on ranks."""
        return cls(
            predictor,
            run.writers(),
            find_writer=run.server,
            find_writers=run.writers,
            model_dir=run.model_dir,
            held_file=held_file,
            silent_secs=silent_secs,
        )

    def unfollowed(self) -> list[str]:
        """List weights of the predictor that no writer has published so far. They stay as they were exported."""
        return sorted(name for name in self._predictor.weights.keys() - self._served.seen if "constant/" not in name)

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
        return lag if held is None else replace(lag, step=held.step, connected=False, held=f"step={held.step}")

    def _go_back(self, moment: str) -> RestorePoint:
        if self._model_dir is None:
            raise InvalidArgumentError(
                "rollback: this replica knows no model_dir; start it with --run to go back to what the run has saved"
            )
        point = restore_point_at(self._model_dir, moment)
        with SavedState(point, self._target.tables()) as saved:
            self._follower.hold()
            try:
                with self._follower.changing:
                    saved.put_into(self._target)
            except BaseException:
                if self._held is None:
                    self._follower.resume()  # reads all rows again, whichever of them were replaced
                raise
        # From here on it is no newer than that, whatever it has followed.
        self._taken = point.location, point.time
        for one in self._follower.progress.values():
            one.step = point.step
        self._held = point
        _log.warning("went back to step %d of the run, and does not follow it until told to", point.step)
        return point
