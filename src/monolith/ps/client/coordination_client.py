"""A worker's side of what workers know in common: it greets a server now and then, and asks."""

from __future__ import annotations

import json
import logging
import threading
from types import TracebackType
from typing import Self

from monolith.config import Config
from monolith.errors import ServerError, ServerRestartedError, StalePushError
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.ps.coordination_messages import (
    Barrier,
    Greet,
    Hold,
    Members,
    Phase,
    PlaceBarrier,
    ReadKeys,
    Report,
    Seen,
    SetKey,
)
from monolith.transport.calls import Call
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange

__all__ = ["CoordinationClient"]

BEATS = 3
"""Heartbeats in one lease: two may be lost before the worker counts as gone."""
STAY_SECONDS = 2.0
"""How long a worker that has failed asks to be waited for: the server may be what has failed."""

_logger = logging.getLogger(__name__)


class CoordinationClient:
    """Worker `index` of a run, as the server at `address` knows it from now on.

    A thread greets the server often enough for the lease to go on. The server may be started anew meanwhile: it is told again.
    Any thread may call; all errors of links may be raised, and `StalePushError` once a newer process has taken the place of
    this one.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server, CoordinationClient(server.address, index=0, epoch=1) as client:
        ...     client.enter("running")
        ...     [(member.index, member.phase, member.alive) for member in client.members().members]
        [(0, 'running', True)]
    """

    def __init__(
        self, address: str, *, index: int, epoch: int, lease: float = 30.0, config: ClientConfig | None = None
    ) -> None:
        self._link = link_to(address, config or ClientConfig())
        self._index, self._epoch, self._lease = index, epoch, lease
        self._phase: Phase = "joined"
        self._made = 0
        self._seen = Seen(step=0)
        self._reported = False
        self._report: Exchange | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="monolith-heartbeat", daemon=True)
        try:
            self._ask(Call.GREET, self._who())
        except BaseException:
            self._link.close()
            raise
        self._thread.start()

    @property
    def index(self) -> int:
        """The number of this worker."""
        return self._index

    def enter(self, phase: Phase) -> None:
        """Tell that this worker is so far, after all that it has reported."""
        self._seen = self._take_report()
        self._phase = phase
        self._ask(Call.GREET, self._who())

    def members(self) -> Members:
        """All workers, the global step and the barrier, now; with all that this worker has reported."""
        self._seen = self._take_report()
        return Members.from_json(self._ask(Call.MEMBERS).text)

    def report(self, steps: int = 1, *, at_least: int = 0) -> Seen:
        """Tell of `steps` more steps; answers what was there at the report before, so that nobody waits for the network.

        `at_least` is a global step that has been reached otherwise, as by restoring a checkpoint.
        """
        seen = self._take_report()
        self._made += steps
        self._seen = Seen(step=max(seen.step, at_least), barrier=seen.barrier)
        self._report = self._link.begin(Call.REPORT, self._report_text())
        self._report.send()
        self._reported = True
        return self._seen

    def newest(self) -> Seen:
        """What the last `report` told; asked for now if none was made since the last call of this method."""
        reported, self._reported = self._reported, False
        if not reported:
            self._take_report()
            self._seen = Seen.from_json(self._ask(Call.REPORT, self._report_message()).text)
        return self._seen

    def place_barrier(self, action: str) -> tuple[bool, Barrier]:
        """Hold the other workers; whether this call did, and the barrier that is there now."""
        answer = json.loads(self._ask(Call.PLACE_BARRIER, PlaceBarrier(who=self._who(), action=action)).text)
        return answer["placed"], Barrier(**answer["barrier"])

    def remove_barrier(self) -> None:
        """Let them go."""
        self._ask(Call.REMOVE_BARRIER, self._who())

    def hold(self, number: int) -> bool:
        """Wait behind barrier `number`; whether that is still needed."""
        held: bool = json.loads(self._ask(Call.HOLD, Hold(who=self._who(), number=number)).text)["held"]
        return held

    def read_keys(self, prefix: str) -> dict[str, str]:
        """The values of all keys that begin with `prefix`."""
        values: dict[str, str] = json.loads(self._ask(Call.READ_KEYS, ReadKeys(prefix=prefix)).text)["values"]
        return values

    def set_key(self, key: str, value: str, *, expected: str | None = None) -> str:
        """Set a key that has the value `expected`, by default none yet; the value that it has then."""
        message = SetKey(key=key, value=value, expected=expected)
        there: str = json.loads(self._ask(Call.SET_KEY, message).text)["value"]
        return there

    def stay(self, seconds: float) -> None:
        """Count for `seconds` after the last word: for a worker that is silent for a while and comes back."""
        self._lease = max(self._lease, seconds)
        self._link.instance = 0
        self._link.call(Call.GREET, self._who().model_dump_json(), timeout=min(self._link.timeout, STAY_SECONDS))

    def close(self) -> None:
        """Say nothing any more; the lease ends by itself."""
        self._closed.set()
        self._thread.join()
        if self._report is not None:
            self._report.abandon()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _who(self) -> Greet:
        return Greet(index=self._index, epoch=self._epoch, lease=self._lease, phase=self._phase)

    def _report_message(self) -> Report:
        return Report(who=self._who(), made=self._made, seen=self._seen.step)

    def _report_text(self) -> str:
        self._link.instance = 0
        return self._report_message().model_dump_json()

    def _take_report(self) -> Seen:
        """The answer to the report that is under way, if there is one; then the newest there was."""
        report, self._report = self._report, None
        if report is None:
            return self._seen
        try:
            answer = report.finish()
        except ServerRestartedError:
            return self._seen
        newest = Seen.from_json(answer.text)
        return Seen(step=max(newest.step, self._seen.step), barrier=newest.barrier)

    def _ask(self, call: Call, message: Config | None = None) -> Frame:
        text = "{}" if message is None else message.model_dump_json()
        while True:
            # Whichever life of the server answers: it is told all it has to know with every call.
            self._link.instance = 0
            try:
                return self._link.call(call, text)
            except ServerRestartedError:
                continue

    def _beat(self) -> None:
        while not self._closed.wait(self._lease / BEATS):
            try:
                self._ask(Call.GREET, self._who())
            except StalePushError as error:
                _logger.error("%s", error)
                return
            except ServerError as error:
                _logger.warning("the server that coordinates the run was not reached: %s", error)
