"""`BoundProgram`: the steps of a dense program for inputs of one shape, as a flat list of calls.

A program that has run once within its budget costs the same for all inputs of these shapes, because no operator of the allow-list
gives a result whose shape depends on values. So its steps need not be measured again, its arithmetic on sizes is a set of known
numbers, and names become positions in one list: weights, inputs, then what the steps make and the literals they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, Protocol

from torch import Tensor

from monolith.errors import InvalidArgumentError
from monolith.serve.operators import fast_form

__all__ = ["BoundProgram", "OPERATOR_ERRORS", "Ref", "SizeNumber", "Step", "refused"]

SizeNumber = int | float
"""What arithmetic on sizes gives. A bool is one too."""
OPERATOR_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions by which operators and guards refuse their arguments."""


class Ref(str):
    """The value of an earlier step, by name."""

    __slots__ = ()


class Step(Protocol):
    """One call of an operator."""

    name: str
    operator: str
    args: list[object]
    kwargs: dict[str, object]
    last_uses: list[str]


def refused(step: str, operator: str, error: Exception) -> InvalidArgumentError:
    """Return the error for an operator that refuses its arguments.

    Example:
        >>> refused("mm", "aten.mm.default", RuntimeError("shapes cannot be multiplied"))
        InvalidArgumentError('step mm (aten.mm.default): shapes cannot be multiplied')
    """
    return InvalidArgumentError(f"step {step} ({operator}): {str(error).strip().partition(chr(10))[0]}")


class _Call(NamedTuple):
    function: Callable[..., object]
    args: Callable[[list[object]], Iterable[object]]
    out: int
    freed: tuple[int, ...]
    """Positions of values that no later call takes."""
    step: Step


class BoundProgram:
    """Calls in order, for one set of shapes. Immutable, so that several threads may run it.

    Args:
        steps: All steps of the program.
        given: Position of each weight and input.
        numbers: Results of the steps that compute with sizes, for these shapes.
        outputs: What each output refers to.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        given: Mapping[str, int],
        numbers: Mapping[str, SizeNumber],
        outputs: Mapping[str, str],
    ) -> None:
        self._positions = dict(given)
        self._numbers = numbers
        self._first = len(given)
        self._free: list[int] = []
        self._calls: list[_Call] = []
        self.tail: list[object] = []
        """What follows weights and inputs in the list of values: literals, and a position for each result."""
        for step in steps:
            self._add(step)
        self._outputs = [(name, self._positions[ref]) for name, ref in outputs.items() if ref in self._positions]

    def run(self, values: list[object]) -> dict[str, Tensor]:
        """Make all calls. `values` are the weights, the inputs and `tail`, and belong to this run.

        Raises:
            InvalidArgumentError: an operator refuses its arguments.
        """
        try:
            for call in self._calls:
                function, args, out, freed, _ = call
                values[out] = function(*args(values))
                if freed:
                    for position in freed:
                        values[position] = None
        except InvalidArgumentError:
            raise
        except OPERATOR_ERRORS as error:
            raise refused(call.step.name, call.step.operator, error) from error
        return {name: value for name, at in self._outputs if isinstance(value := values[at], Tensor)}

    def _add(self, step: Step) -> None:
        unneeded = [self._positions[name] for name in step.last_uses if name in self._positions]
        if step.name in self._numbers:
            # Not called. What it was the last to look at is let go right after the call before.
            if unneeded:
                before = self._calls[-1]
                self._calls[-1] = before._replace(freed=(*before.freed, *unneeded))
                self._free += unneeded
            return
        lists: list[int] = []
        positions = [self._position(argument, step, lists) for argument in step.args]
        function = fast_form(step.operator)
        kwargs = {key: self._substituted(value) for key, value in step.kwargs.items()}
        if any(map(_has_refs, kwargs.values())):
            function = _by_keyword(function, len(positions), tuple(kwargs))
            positions += [self._position(value, step, lists) for value in kwargs.values()]
        elif kwargs:
            function = partial(function, **kwargs)
        # The result takes the position of an argument that nothing needs afterwards, which frees that one.
        out = unneeded.pop() if unneeded else self._new()
        self._positions[step.name] = out
        freed = [*unneeded, *lists, *([out] if step.name in step.last_uses else [])]
        self._calls.append(_Call(function, _getter(positions), out, tuple(freed), step))
        self._free += freed

    def _position(self, argument: object, step: Step, lists: list[int]) -> int:
        """Return where an argument is when its step is called. A list of values is made by a call of its own."""
        argument = self._substituted(argument)
        if isinstance(argument, Ref):
            return self._positions[argument]
        if not _has_refs(argument):
            self.tail.append(argument)
            return self._first + len(self.tail) - 1
        assert isinstance(argument, list)
        parts = [self._position(item, step, lists) for item in argument]
        out = self._new()
        self._calls.append(_Call(_listed, _getter(parts), out, (), step))
        lists.append(out)
        return out

    def _substituted(self, argument: object) -> object:
        """Return `argument` with numbers for references to sizes."""
        if isinstance(argument, list):
            return [self._substituted(item) for item in argument]
        return self._numbers.get(argument, argument) if isinstance(argument, Ref) else argument

    def _new(self) -> int:
        if self._free:
            return self._free.pop()
        self.tail.append(None)
        return self._first + len(self.tail) - 1


def _has_refs(argument: object) -> bool:
    return any(map(_has_refs, argument)) if isinstance(argument, list) else isinstance(argument, Ref)


def _getter(positions: Sequence[int]) -> Callable[[list[object]], Iterable[object]]:
    if not positions:
        return lambda values: ()
    # Of a single position itemgetter returns the value, not a sequence of it.
    return itemgetter(slice(positions[0], positions[0] + 1)) if len(positions) == 1 else itemgetter(*positions)


def _listed(*values: object) -> list[object]:
    return list(values)


def _by_keyword(function: Callable[..., object], count: int, names: tuple[str, ...]) -> Callable[..., object]:
    """Return `function` with arguments after the first `count` passed under `names`."""

    def call(*values: object) -> object:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call
