"""`Agreement`: how ranks decide together what they do between two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import JsonValue

from monolith import errors
from monolith.errors import InvalidArgumentError, MonolithError, RankLostError, RanksDisagreeError
from monolith.ranks.mesh import Arrays, Kind, Mesh

__all__ = ["Agreement", "RankAnswer", "RankCalls", "StepPlan"]

RankAction = Callable[[JsonValue], JsonValue]
"""Something that all ranks do together between two steps. Called with the argument of the rank that asked for it."""
_RELEASE, _BARRIER = "release", "barrier"
_INTENTS = ("step", "act", "serve", "leave")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What all ranks have agreed on before a step."""

    rows: tuple[int, ...]
    """Rows of each rank in this step. 0 for a rank whose data has ended."""
    parts: tuple[int, ...]
    """Batches of each rank in this step: forward and backward passes that it makes."""
    ended: tuple[bool, ...]
    """Whether the data of each rank has ended. Without parts and not ended, it waits for records."""
    last: bool = False
    """Whether some rank has no more data after this step."""
    stops: dict[int, str]
    """Why ranks ask to stop before this step, by rank."""
    interrupted: bool = False
    """Whether one of them stops before its work is done."""

    @property
    def is_over(self) -> bool:
        """Whether no rank has data left."""
        return all(self.ended)

    @property
    def waits(self) -> bool:
        """Whether no rank has a batch, and some wait for records: there is nothing to make a step with."""
        return not any(self.parts) and not self.is_over

    @property
    def total_rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.rows)


@dataclass(frozen=True, kw_only=True)
class _Word:
    intent: str
    rows: int = 0
    parts: int = 0
    ended: bool = False
    last: bool = False
    interrupted: bool = False
    stop: str | None = None
    action: str = ""
    argument: JsonValue = None

    def encode(self) -> list[np.ndarray]:
        flags = (self.ended, self.last, self.interrupted)
        numbers = np.array([_INTENTS.index(self.intent), self.rows, self.parts, *flags], dtype=np.int64)
        if self.stop is None and not self.action:
            return [numbers]
        return [numbers, _bytes([self.stop, self.action, self.argument])]

    @classmethod
    def decode(cls, arrays: list[np.ndarray]) -> _Word:
        intent, rows, parts, ended, last, interrupted = arrays[0].tolist()
        stop, action, argument = json.loads(arrays[1].tobytes()) if len(arrays) > 1 else (None, "", None)
        return cls(
            intent=_INTENTS[intent],
            rows=rows,
            parts=parts,
            ended=bool(ended),
            last=bool(last),
            interrupted=bool(interrupted),
            stop=stop,
            action=action,
            argument=argument,
        )


def _bytes(value: JsonValue) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


class Agreement:
    """Lets ranks begin every step together, and lets any of them ask the others for something in between.

    A rank that is between two steps waits in `next_step`, or in `serve` when it has no steps left, and does whatever another
    rank asks for with `run`. So no rank waits for ever because another one does something alone.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     agreement = Agreement(mesh)
        ...     agreement.actions["double"] = lambda number: 2 * number
        ...     answers = agreement.run("double", 21) if mesh.rank == 0 else None
        ...     return answers, agreement.next_step(rows=10 + mesh.rank).rows
        >>> run_ranks(2, rank)
        [([42, 42], (10, 11)), (None, (10, 11))]
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.step = 0
        """The step that is made, or was made last. Every exchange is checked to be of the same one."""
        self.mode: Literal["idle", "step", "action"] = "idle"
        """What this rank is doing. Exchanges are only made in a step and in an action."""
        self.actions: dict[str, RankAction] = {_BARRIER: lambda _: None}
        """What `run` can ask for, by name. All ranks have the same ones."""
        self._released: set[str] = set()

    def next_step(
        self,
        *,
        rows: int,
        parts: int = 1,
        ended: bool = False,
        last: bool = False,
        stop: str | None = None,
        interrupted: bool = False,
    ) -> StepPlan:
        """Wait until every rank is ready for its next step, and do what others ask for until then.

        Args:
            rows: those of this rank's batches.
            parts: its batches in this step.
            ended: this rank has no data. It still answers the others.
            last: this rank has no more data after this step.
            stop: why this rank wants all to stop before this step.
            interrupted: it stops before its work is done.
        """
        self.mode = "idle"
        own = _Word(intent="step", rows=rows, parts=parts, ended=ended, last=last, stop=stop, interrupted=interrupted)
        while True:
            words = self._exchange(own)
            if self._acted(words):
                continue
            waiting = [rank for rank, word in enumerate(words) if word.intent != "step"]
            if waiting:
                raise RanksDisagreeError(
                    f"rank {self.mesh.rank} begins a step after step {self.step}, but ranks {waiting} have ended their loop"
                )
            self.mode = "step"
            return StepPlan(
                rows=tuple(word.rows for word in words),
                parts=tuple(word.parts for word in words),
                ended=tuple(word.ended for word in words),
                last=any(word.last for word in words),
                stops={rank: word.stop for rank, word in enumerate(words) if word.stop is not None},
                interrupted=any(word.interrupted for word in words),
            )

    def run(self, action: str, argument: JsonValue = None) -> list[JsonValue]:
        """Let all ranks do `action` now. Returns the answer of each.

        Called between two steps. Within an action, which all ranks do together, this rank does its part at once and only its own
        answer is returned: the others come to the same call.

        Raises:
            MonolithError: what the action has raised, of this rank if it is among those that failed.
        """
        if action not in self.actions and action != _RELEASE:
            raise InvalidArgumentError(
                f"action: expected one of {', '.join(sorted(self.actions)) or 'none'}, got {action!r}"
            )
        if self.mode == "step":
            raise InvalidArgumentError(
                f"action: {action!r} was asked for within step {self.step + 1}; only between two steps can all ranks do it"
            )
        own = _Word(intent="act", action=action, argument=argument)
        if self.mode == "action":
            return [self._action(own)]
        while True:
            words = self._exchange(own)
            chosen = _first_action(words)
            if chosen == self.mesh.rank:
                return self._perform(own, initiator=chosen)
            self._acted(words)

    def serve(self, until: str) -> None:
        """Do what others ask for, until one of them calls `release(until)`."""
        self.mode = "idle"
        while until not in self._released:
            words = self._exchange(_Word(intent="serve"))
            if not self._acted(words):
                others = [rank for rank, word in enumerate(words) if word.intent != "serve"]
                if others:
                    raise RanksDisagreeError(
                        f"rank {self.mesh.rank} waits for {until!r}, but ranks {others} begin a step after step {self.step}, or "
                        "leave"
                    )
                raise RanksDisagreeError(f"all ranks wait for {until!r}, which none of them will release")
        self._released.discard(until)

    def release(self, until: str) -> None:
        """Let the ranks that are in `serve(until)` go on."""
        self.run(_RELEASE, until)
        self._released.discard(until)

    def barrier(self) -> None:
        """Return when all ranks are between two steps. A rank that holds the others up calls it now and then.

        Others that wait for a rank count it as lost when they have heard nothing of it for too long.
        """
        self.run(_BARRIER)

    def leave(self) -> None:
        """Do what others ask for until all ranks want to leave."""
        self.mode = "idle"
        while True:
            words = self._exchange(_Word(intent="leave"))
            if self._acted(words):
                continue
            others = [rank for rank, word in enumerate(words) if word.intent != "leave"]
            if not others:
                return
            raise RanksDisagreeError(
                f"rank {self.mesh.rank} leaves after step {self.step}, but ranks {others} train or wait for something"
            )

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Make exchanges in a block that all ranks enter together, outside of steps and actions."""
        before, self.mode = self.mode, "action"
        try:
            yield
        finally:
            self.mode = before

    def step_ended(self) -> None:
        """Called when a step has been made: from now on other ranks may ask for actions."""
        self.mode = "idle"

    def _exchange(self, word: _Word) -> list[_Word]:
        out = [word.encode()] * self.mesh.size
        return [_Word.decode(list(arrays)) for arrays in self.mesh.exchange(Kind.WORD, out, step=self.step)]

    def _acted(self, words: list[_Word]) -> bool:
        if not any(word.action for word in words):
            return False
        first = _first_action(words)
        with _ignoring_refusals():
            self._perform(words[first], initiator=first)
        return True

    def _perform(self, word: _Word, *, initiator: int) -> list[JsonValue]:
        failure: MonolithError | None = None
        answer: JsonValue = None
        before, self.mode = self.mode, "action"
        try:
            answer = self._action(word)
        except (RankLostError, RanksDisagreeError):
            raise
        except MonolithError as error:
            failure = error
        finally:
            self.mode = before
        own: JsonValue = (
            {"answer": answer} if failure is None else {"error": type(failure).__name__, "text": str(failure)}
        )
        out = [[_bytes(own)] for _ in range(self.mesh.size)]
        answers = [json.loads(a[0].tobytes()) for a in self.mesh.exchange(Kind.ANSWER, out, step=self.step)]
        if failure is not None and initiator == self.mesh.rank:
            raise failure
        for rank, one in enumerate(answers):
            if "error" in one:
                kind = getattr(errors, one["error"], MonolithError)
                raise kind(f"rank {rank}: {one['text']}")
        return [one["answer"] for one in answers]

    def _action(self, word: _Word) -> JsonValue:
        if word.action == _RELEASE:
            self._released.add(str(word.argument))
            return None
        if word.action not in self.actions:
            raise RanksDisagreeError(
                f"rank {self.mesh.rank} knows no action {word.action!r}, which another rank asks for"
            )
        return self.actions[word.action](word.argument)


@contextmanager
def _ignoring_refusals() -> Iterator[None]:
    """The rank that asked for an action gets its error. The others go on."""
    try:
        yield
    except (RankLostError, RanksDisagreeError):
        raise
    except MonolithError:
        pass


def _first_action(words: list[_Word]) -> int:
    return next(rank for rank, word in enumerate(words) if word.action)


class RankAnswer(NamedTuple):
    """What a rank returned."""

    value: Any = None
    """JSON."""
    arrays: Arrays = ()


RankCall = Callable[[Any, Arrays], RankAnswer]
"""Called with the argument of the rank that asks, and the arrays that it sent to this one."""


class RankCalls:
    """Lets one rank call the others with arrays, as `Agreement.run` does with JSON.

    Between two steps one rank calls alone. Within an action all ranks call, each for itself.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     add = lambda factor, arrays: RankAnswer(factor * int(arrays[0].sum()))
        ...     calls = RankCalls("sums", Agreement(mesh), {"sum": add})
        ...     ones = [[np.ones(3)], [np.ones(4)]]
        ...     answers = calls.ask("sum", 10, ones) if mesh.rank == 0 else None
        ...     calls.agreement.next_step(rows=1)
        ...     return answers and [answer.value for answer in answers]
        >>> run_ranks(2, rank)
        [[30, 40], None]
    """

    def __init__(self, name: str, agreement: Agreement, calls: dict[str, RankCall]) -> None:
        self.agreement, self._calls, self._action = agreement, calls, f"call {name}"
        self._out: list[list[np.ndarray]] = []
        self._answers: list[list[np.ndarray]] = []
        agreement.actions[self._action] = self._act

    def ask(
        self, call: str, argument: JsonValue = None, arrays: Sequence[Arrays | None] | None = None
    ) -> list[RankAnswer]:
        """Let every rank do `call` with `argument` and its own of `arrays`. Returns the answer of each.

        A rank whose arrays are None is not called, and answers nothing.

        Raises:
            MonolithError: what the call has raised on a rank, which the message names.
        """
        ranks = range(self.agreement.mesh.size)
        text = _bytes([call, argument])
        given = [()] * len(ranks) if arrays is None else arrays
        self._out = [[] if some is None else [text, *some] for some in given]
        if self.agreement.mode == "action":
            self._exchange(self._out)
        else:
            self.agreement.run(self._action, self.agreement.mesh.rank)
        answers = [_decoded(rank, one) for rank, one in enumerate(self._answers)]
        self._out, self._answers = [], []
        return answers

    def _act(self, asking: JsonValue) -> None:
        mine = asking == self.agreement.mesh.rank
        self._exchange(self._out if mine else [[] for _ in range(self.agreement.mesh.size)])

    def _exchange(self, out: list[list[np.ndarray]]) -> None:
        mesh, step = self.agreement.mesh, self.agreement.step
        asked = mesh.exchange(Kind.STATE, out, step=step)
        # The messages are overwritten by the next exchange, answers may be views of them.
        back = mesh.exchange(Kind.STATE, [self._answer([np.array(a) for a in arrays]) for arrays in asked], step=step)
        if any(out):
            self._answers = [[np.array(array) for array in arrays] for arrays in back]

    def _answer(self, asked: list[np.ndarray]) -> list[np.ndarray]:
        if not asked:
            return []
        call, argument = json.loads(asked[0].tobytes())
        try:
            value, arrays = self._calls[call](argument, asked[1:])
        except (RankLostError, RanksDisagreeError):
            raise
        except MonolithError as error:
            return [_bytes({"error": type(error).__name__, "text": str(error)})]
        return [_bytes({"value": value}), *arrays]


def _decoded(rank: int, arrays: list[np.ndarray]) -> RankAnswer:
    if not arrays:
        return RankAnswer()
    head = json.loads(arrays[0].tobytes())
    if "error" in head:
        kind = getattr(errors, head["error"], MonolithError)
        raise kind(f"rank {rank}: {head['text']}")
    return RankAnswer(head["value"], arrays[1:])
