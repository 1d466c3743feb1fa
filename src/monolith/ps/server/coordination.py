"""Members, barriers and keys of a run, kept by the server that owns the first bucket.

That server is found, fenced, restored and moved like the owner of any bucket: at any time at most one server answers, and a run
that can train can also coordinate. State that workers would not send again is durable before it is acknowledged: who has joined
in which epoch, who has finished, barriers and keys. Leases are not durable: after a restart every worker gets another lease. No
call waits here. A worker that has to wait asks again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from monolith.cluster.coordination import Barrier, Member, Members, Phase, Seen
from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import ConfigError, CorruptFileError, StalePushError, StorageError
from monolith.ps.protocol.messages import Greet
from monolith.transport.calls import WireInt

__all__ = ["CoordinationFile", "ServerCoordination"]

CHIEF = 0
MAX_KEYS = 4096
_ENTRY_BYTES = 256
"""Approximate size of a key or a worker without its texts."""


@dataclass
class _Worker:
    epoch: int
    phase: Phase
    lease: float
    until: float
    held: int | None = None


class _Shared(Config):
    """The state that moves with the first bucket."""

    run: str = ""
    workers: tuple[Greet, ...] = ()
    barrier: Barrier | None = None
    placed_by: tuple[int, int] | None = None
    """Index and epoch of the worker that placed the barrier."""
    token: WireInt = 0
    """The token of the call that placed it."""
    barriers: WireInt = 0


class _Kept(Config):
    """The durable state."""

    shared: _Shared = _Shared()
    keys: dict[str, str] = {}


_Text = TypeVar("_Text", _Shared, _Kept)


class ServerCoordination:
    """Members, one barrier, and keys that are set once.

    A worker counts as a member while its lease runs. One that was started again, with a larger epoch, replaces its predecessor,
    whose calls are refused from then on. A barrier falls with the worker that placed it.

    Args:
        step: returns the global step.
        clock: returns seconds.
        require_memory: raises if so many more bytes do not fit into the memory of the server.

    Example:
        >>> common = ServerCoordination(step=lambda: 7, clock=lambda: 0.0)
        >>> common.greet(Greet(index=1, epoch=1, lease=30.0))
        Seen(step=7, barrier=None)
        >>> [(member.index, member.phase, member.alive) for member in common.members().members]
        [(1, 'joined', True)]
    """

    def __init__(
        self,
        *,
        step: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        require_memory: Callable[[int], None] = lambda more: None,
    ) -> None:
        self.keep: Callable[[str], None] = lambda text: None
        """Makes a text durable from which `load` restores all of this. Called before a change is acknowledged."""
        self._step, self._clock, self._require_memory = step, clock, require_memory
        self._lock = threading.Lock()
        self._run = ""
        self._workers: dict[int, _Worker] = {}
        self._barrier: Barrier | None = None
        self._placed_by: tuple[int, int] | None = None
        self._token = 0
        self._barriers = 0
        self._keys: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Memory held by keys and workers."""
        keys = list(self._keys.items())
        return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in keys) + _ENTRY_BYTES * len(self._workers)

    def greet(self, who: Greet) -> Seen:
        """Record a worker, or renew its lease."""
        with self._lock:
            self._greet(who)
            return Seen(step=self._step(), barrier=self._standing())

    def members(self) -> Members:
        """Return all members, and the barrier."""
        with self._lock:
            barrier, now = self._standing(), self._clock()
            members = tuple(
                Member(
                    index=index,
                    epoch=worker.epoch,
                    phase=worker.phase,
                    alive=now < worker.until,
                    held=barrier is not None and worker.held == barrier.number,
                )
                for index, worker in sorted(self._workers.items())
            )
            return Members(members=members, step=self._step(), barrier=barrier)

    def place(self, who: Greet, action: str, token: int) -> tuple[bool, Barrier]:
        """Hold every worker that calls from now on. Returns False and the existing barrier if they are held already.

        A retry with the same `token` returns the same.
        """
        with self._lock:
            self._greet(who)
            if (standing := self._standing()) is not None:
                return token == self._token, standing
            self._barriers += 1
            self._token = token
            self._barrier = Barrier(number=self._barriers, action=action)
            self._placed_by = (who.index, who.epoch)
            self._save()
            return True, self._barrier

    def remove(self, who: Greet) -> None:
        """Let all workers continue."""
        with self._lock:
            self._greet(who)
            if self._barrier is not None:
                self._barrier = None
                self._save()

    def hold(self, who: Greet, number: int) -> bool:
        """Record that worker `who` waits at barrier `number`. Returns whether it still has to."""
        with self._lock:
            worker, barrier = self._greet(who), self._standing()
            held = barrier is not None and barrier.number == number
            worker.held = number if held else None
            return held

    def read_keys(self, prefix: str) -> dict[str, str]:
        """Return the values of all keys that begin with `prefix`."""
        with self._lock:
            return {key: value for key, value in sorted(self._keys.items()) if key.startswith(prefix)}

    def set_key(self, key: str, value: str) -> str:
        """Set a key that has no value yet. Returns the value it has then."""
        with self._lock:
            if key not in self._keys:
                if len(self._keys) >= MAX_KEYS:
                    raise ConfigError(f"key: there are {MAX_KEYS:,} keys already, no more fit; cannot set {key!r}")
                self._require_memory(len(key) + len(value) + _ENTRY_BYTES)
                self._keys[key] = value
                self._save()
            return self._keys[key]

    def end_run(self, who: Greet) -> None:
        """Forget all workers: the run that `who` leads has ended."""
        with self._lock:
            self._greet(who)
            self._load(_Shared(run=self._run, barriers=self._barriers))
            self._save()

    def given(self) -> str:
        """Return the state for the next owner of the first bucket, as text."""
        with self._lock:
            return self._shared().model_dump_json()

    def take(self, text: str) -> None:
        """Continue from what `given` returned on the previous owner of the first bucket."""
        with self._lock:
            self._load(_parsed(_Shared, text))
            self._save()

    def load(self, text: str) -> None:
        """Restore the state after a restart."""
        with self._lock:
            kept = _parsed(_Kept, text)
            self._keys = dict(kept.keys)
            self._load(kept.shared)
            if CHIEF in self._workers and self._workers[CHIEF].phase == "running":
                # Left by a job that died as a whole. Workers of the next one must wait until their own chief has restored. One
                # that still runs reports its phase with its next call.
                self._workers[CHIEF].phase = "joined"

    def _greet(self, who: Greet) -> _Worker:
        if who.run != self._run:
            self._begin_run(who)
        known, until = self._workers.get(who.index), self._clock() + who.lease
        if known is not None and who.epoch < known.epoch:
            raise StalePushError(
                f"epoch: {who.epoch} of worker {who.index} is over, {known.epoch} has joined since; this process has been "
                "replaced and should end"
            )
        if known is None or who.epoch > known.epoch:
            known = self._workers[who.index] = _Worker(epoch=who.epoch, phase=who.phase, lease=0.0, until=until)
        changed = (known.phase, known.lease) != (who.phase, who.lease)
        known.phase, known.lease, known.until = who.phase, who.lease, until
        if changed:
            self._save()
        return known

    def _begin_run(self, who: Greet) -> None:
        """Forget the members of an earlier launch: who finished that one has not finished this one."""
        if any(worker.epoch >= who.epoch for worker in self._workers.values()):
            raise StalePushError(
                f"run: {who.run!r} is over, {self._run!r} has begun since; this process of an earlier launch should end"
            )
        self._load(_Shared(run=who.run, barriers=self._barriers))

    def _standing(self) -> Barrier | None:
        """Return the current barrier. One whose chief was replaced or has let its lease run out has fallen."""
        if self._barrier is not None and self._placed_by is not None:
            index, epoch = self._placed_by
            worker = self._workers.get(index)
            if worker is None or worker.epoch != epoch or self._clock() >= worker.until:
                self._barrier = None
        return self._barrier

    def _shared(self) -> _Shared:
        workers = tuple(
            Greet(index=index, epoch=worker.epoch, lease=worker.lease, phase=worker.phase, run=self._run)
            for index, worker in sorted(self._workers.items())
        )
        return _Shared(
            run=self._run,
            workers=workers,
            barrier=self._barrier,
            placed_by=self._placed_by,
            token=self._token,
            barriers=self._barriers,
        )

    def _save(self) -> None:
        self.keep(_Kept(shared=self._shared(), keys=self._keys).model_dump_json())

    def _load(self, shared: _Shared) -> None:
        now = self._clock()
        self._run = shared.run
        self._workers = {
            one.index: _Worker(epoch=one.epoch, phase=one.phase, lease=one.lease, until=now + one.lease)
            for one in shared.workers
        }
        self._barrier, self._placed_by, self._barriers = shared.barrier, shared.placed_by, shared.barriers
        self._token = shared.token


def _parsed(kind: type[_Text], text: str) -> _Text:
    try:
        return kind.from_json(text)
    except ConfigError as error:
        raise CorruptFileError(f"coordination: the stored state cannot be read: {error}") from None


class CoordinationFile:
    """`<folder>/coordination/<number>`: every incarnation of the server writes a file of its own and reads the newest one.

    So an incarnation that was replaced while it hung cannot overwrite the file of its successor. A writer must check after the
    write, and before it acknowledges anything, that it still owns the folder: then the successor has read what was written. Made
    while the folder is locked.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = CoordinationFile(Path(folder))
        ...     first.write("a")
        ...     second = CoordinationFile(Path(folder))
        ...     second.write("b")
        ...     first.write("late")
        ...     CoordinationFile(Path(folder)).text
        'b'
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "coordination"
        try:
            self._folder.mkdir(exist_ok=True)
            earlier = self._numbers()
            # Chosen before anything is read: what an earlier incarnation writes from now on is older.
            self._number = self._taken(earlier[-1] + 1 if earlier else 1)
            texts = (self._path(number).read_text() for number in reversed(earlier))
            self.text = next(filter(None, texts), None)
            """What the last incarnation has written. None if there was none."""
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self._folder}: cannot be read: {error}") from error
        if self.text is not None:
            self.write(self.text)

    def write(self, text: str) -> None:
        """Replace the stored text. It is durable when this returns."""
        try:
            write_durably(self._path(self._number), text.encode())
            for number in self._numbers():
                if number < self._number:
                    self._path(number).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written: {os.strerror(error.errno or 0)}") from error

    def _taken(self, number: int) -> int:
        while True:
            try:
                self._path(number).open("x").close()
            except FileExistsError:
                number += 1
            else:
                return number

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
