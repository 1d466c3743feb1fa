"""`Follower`: keeps copies of the tables and weights of a run up to date, whoever holds them.

One thread for each writer waits for its segments and applies them. Each bucket of ids has one writer that the follower believes:
the one that owned it when its rows were last read as a whole. What others say about the bucket is dropped, so that segments of
two servers, between which a bucket has moved, may arrive in any order.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from monolith.errors import InvalidArgumentError, MonolithError
from monolith.follow.followed_writer import NO_WRITER, FollowedWriter, Writer, WriterProgress
from monolith.process_bound import ProcessBound
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, mask_of

__all__ = ["FollowTarget", "Follower", "Writer", "WriterProgress"]

FIND_SECS = 1.0
"""Seconds between two looks at which writers there are."""
MAX_WRITERS = 1024
"""Writers that are followed at most, each by a thread."""

_log = logging.getLogger(__name__)


class FollowTarget(Protocol):
    """What is kept up to date."""

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        """Return the copies of each table, by the name that it has in the feed."""

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replace dense weights, all at once. Some of them may not belong to the model."""


class Follower:
    """Follows all writers of a run until `close`. Thread-safe.

    Args:
        writers: The run itself, or each of its servers or ranks.
        target: What is kept up to date. It is changed by the threads of the follower.
        wait: Seconds that a writer may wait before it answers that nothing has changed.
        find_writer: Returns a writer by its address, for servers that buckets are moved to. None: they are not followed.
        find_writers: Returns all writers there are now. Asked every second: new ones are followed, others no longer.
        buckets: Only rows of these buckets are kept up to date. Rows of others are neither read nor applied.
        run: The identity of the run that the target belongs to. Writers of another run are refused. Empty: not checked.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        target: FollowTarget,
        *,
        wait: float = 0.25,
        find_writer: Callable[[str], Writer] | None = None,
        find_writers: Callable[[], Sequence[Writer]] | None = None,
        buckets: range = range(NUM_BUCKETS),
        run: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not writers:
            raise InvalidArgumentError("writers: expected at least one")
        self.target, self.clock, self.wait, self.buckets, self.run = target, clock, wait, buckets, run
        self.number = secrets.randbits(62) | 1
        """Tells the writers who asks."""
        self._bound = ProcessBound("the follower")
        self.changing = threading.Lock()
        """Held while rows change: what is believed about a bucket and its rows change together."""
        self.held = threading.Event()
        """Set while nothing may change."""
        self.owners = np.full(NUM_BUCKETS, NO_WRITER, dtype=np.int64)
        """The index of the writer that is believed, for each bucket."""
        self._find_writer = find_writer
        self._started = threading.Condition()
        self._threads: list[FollowedWriter] = []
        self._addresses: set[str] = set()
        self._made = 0
        self._closing = threading.Event()
        self._adding = threading.Lock()
        for writer in writers:
            self._add(writer)
        self._finding: threading.Thread | None = None
        if find_writers is not None:
            self._finding = threading.Thread(
                target=self._find, args=(find_writers,), name="monolith-follow-writers", daemon=True
            )
            self._finding.start()

    @property
    def progress(self) -> dict[str, WriterProgress]:
        """How far it is with each writer, by name."""
        return {thread.writer.name: thread.progress for thread in list(self._threads)}

    @property
    def has_rows(self) -> bool:
        """Whether rows of some bucket were read from a writer."""
        return bool((self.owners != NO_WRITER).any())

    def wait_until_read(self, timeout: float) -> bool:
        """Wait until the rows of all writers were read once. Returns whether that happened in time."""
        with self._started:
            return self._started.wait_for(self._all_read, timeout)

    def note_read(self) -> None:
        """Called by a thread when it has read all rows of its writer."""
        with self._started:
            self._started.notify_all()

    def note_moved(self, addresses: Sequence[str]) -> None:
        """Follow servers that buckets were moved to, unless they are followed already."""
        for address in addresses:
            if self._find_writer is None or address in self._addresses:
                continue
            writer = self._find_writer(address)
            self._addresses.add(address)
            if self._add(writer):
                _log.info("following %s, to which buckets were moved", writer.name)

    def silent(self, seconds: float) -> list[FollowedWriter]:
        """Return the threads of the writers that have not answered for so long."""
        began = self.clock() - seconds
        return [
            one for one in list(self._threads) if (since := one.progress.silent_since) is not None and since <= began
        ]

    def unowned(self, silent: Sequence[FollowedWriter]) -> np.ndarray:
        """Return bool [NUM_BUCKETS]: the buckets that are kept, and of which no other writer than these is believed."""
        others = [one.index for one in list(self._threads) if one not in silent]
        return mask_of([(self.buckets.start, self.buckets.stop)]) & ~np.isin(self.owners, others)

    def leave_to(self, silent: Sequence[FollowedWriter]) -> None:
        """Call it before other rows and weights replace those of these writers. `changing` is held.

        What they know of the copies is wrong from then on: they read all rows when they answer again.
        """
        for one in list(self._threads):
            if one in silent:
                one.start_over()
            else:
                one.read_weights_again()

    def hold(self) -> None:
        """Change nothing any more, until `resume`. Returns when no change is being made."""
        self.held.set()
        with self.changing:
            pass

    def resume(self) -> None:
        """Follow again after `hold`. All rows are read again."""
        for thread in self._threads:
            thread.start_over()
        self.held.clear()

    def close(self) -> None:
        """Stop following. The target keeps what it has."""
        if not self._bound.is_here:
            return
        with self._adding:
            self._closing.set()
        if self._finding is not None:
            self._finding.join()
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join()

    def _add(self, writer: Writer) -> bool:
        """Follow a writer, unless it is followed already. Several threads find writers."""
        with self._adding:
            if self._closing.is_set() or any(thread.writer.name == writer.name for thread in self._threads):
                return False
            if len(self._threads) >= MAX_WRITERS:
                raise InvalidArgumentError(f"writers: {MAX_WRITERS} are followed, {writer.name} would be one more")
            thread = FollowedWriter(self, writer, self._made)
            self._made += 1
            self._threads.append(thread)
            thread.start()
            return True

    def _find(self, find_writers: Callable[[], Sequence[Writer]]) -> None:
        found_here: set[str] = {thread.writer.name for thread in self._threads}
        while not self._closing.wait(FIND_SECS):
            try:
                writers = {writer.name: writer for writer in find_writers()}
            except MonolithError as error:
                _log.debug("the processes of the run cannot be found at the moment: %s", error)
                continue
            known = {thread.writer.name for thread in self._threads}
            for name in writers.keys() - known:
                found_here.add(name)
                if self._add(writers[name]):
                    _log.info("following %s", name)
            gone = [
                thread
                for thread in self._threads
                if thread.writer.name in found_here and thread.writer.name not in writers
            ]
            for thread in gone:
                _log.info("%s is not part of the run any more", thread.writer.name)
                thread.stop()
                self._threads.remove(thread)

    def _all_read(self) -> bool:
        """Whether every bucket has been read from somebody, and every writer has answered."""
        wanted = self.owners[self.buckets.start : self.buckets.stop]
        has_all = not self.target.tables() or bool((wanted != NO_WRITER).all())
        return has_all and all(thread.progress.as_of is not None for thread in self._threads)
