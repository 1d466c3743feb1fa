"""`RayProcess`: a role that runs in an actor of a Ray cluster, as a supervisor sees it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from monolith.cluster.launch.role_actor import Look
from monolith.cluster.ray_session import import_ray

__all__ = ["RayProcess"]

_LAST_LINES = 20
_LOOK_SECS = 0.5  # an actor answers at once when there is news, else after this time
_PATIENCE_SECS = 60.0
_LOST, _NEVER_STARTED = -9, -15


class RayProcess:
    """Asks an actor again and again how its role is, one question at a time, and never waits for the answer.

    Ray starts an actor again that was lost, and its role with it: the answer then has another life. One that Ray has given up
    counts as killed.
    """

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 - Ray's handles are untyped
        on_line: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`actor` runs a `RoleActor`."""
        self._ray = import_ray()
        self._actor, self._on_line, self._clock = actor, on_line, clock
        self._complain_at = clock() + _PATIENCE_SECS
        self._question: Any = None
        self._life, self._after = "", 0
        self._code: int | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.pid: int | None = None
        self.restarted = 0
        self.silence = 0.0

    @property
    def last_lines(self) -> list[str]:
        """The end of what it has written."""
        return list(self._lines)

    def poll(self) -> int | None:
        """Its exit code; None while it runs, waits for a place, or is on its way back."""
        if self._code is not None:
            return self._code
        if self._question is None:
            self._question = self._actor.look.remote(self._life, self._after, wait=_LOOK_SECS)
        answered, _ = self._ray.wait([self._question], timeout=0)
        if answered:
            self._question = None
            self._hear(answered[0])
        elif not self._life and self._clock() >= self._complain_at:
            self._complain_at = math.inf
            self._say("has not started yet: does a machine of the cluster have room for it?")
        return self._code

    def ask_to_end(self) -> None:
        """Ask the role; an actor that has not started yet never will."""
        if self._life:
            self._actor.ask_to_end.remote()
        else:
            self._end(_NEVER_STARTED)

    def kill(self) -> None:
        """End the actor, and with it the role."""
        self._end(_LOST)

    def _hear(self, answer: Any) -> None:  # noqa: ANN401 - Ray's references are untyped
        try:
            self._take(self._ray.get(answer))
        except self._ray.exceptions.ActorUnavailableError:
            return  # asked again with the next poll
        except self._ray.exceptions.RayError as error:
            self._say(f"the actor of this role is lost: {str(error).strip().splitlines()[0]}")
            self._end(_LOST)

    def _take(self, look: Look) -> None:
        if self._life and look.life != self._life:
            self.restarted += 1
        self._life, self._after, self.pid, self.silence = look.life, look.next, look.pid, look.silence
        for line in look.lines:
            self._say(line)
        if look.code is not None:
            self._end(look.code)

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)

    def _end(self, code: int) -> None:
        """Its place in the cluster is free from now on."""
        if self._code is None:
            self._code = code
            self._ray.kill(self._actor, no_restart=True)
