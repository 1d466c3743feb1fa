"""`DenseProgram`: the dense part of a model as data, and the loop that runs it.

torch's own file of an exported program holds pickles, code for guards, and expressions that are evaluated: opening one can run
any code. Here a program is a list of operators in JSON and its weights in safetensors. `operators.py` lists the operators that
are allowed, `costs.py` says what one takes before it runs, and `export.py` makes programs.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from monolith.config import nearest_name
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import BatchColumn
from monolith.serve.bound import OPERATOR_ERRORS, BoundProgram, Ref, SizeNumber, refused
from monolith.serve.costs import Cost, known_cost, measure, tensors_in
from monolith.serve.lowering import NativeProgram, UnsupportedOperatorError, lower
from monolith.serve.operators import GUARDS, is_on_sizes, resolve

__all__ = ["Budget", "CONSTANTS", "DenseProgram", "program_inputs"]

_Json = Any  # what json.loads returns
_T = TypeVar("_T")
MAX_STEPS = 100_000
"""Steps of a program."""
MAX_TEXT = 256
"""Characters of a text argument, such as the equation of `einsum`."""

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
CONSTANTS: dict[str, dict[str, object]] = {
    "dtype": {name: getattr(torch, name) for name in _DTYPES},
    "layout": {"strided": torch.strided},
    "memory_format": {"contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format},
}
_SMALL = 2**20
"""A step whose tensors have fewer elements than this, all multiplied, is not measured."""
MAX_BOUND = 256
"""Shapes of inputs for which a program remembers its calls. Fewer for a program of very many steps."""
_REMEMBERED = 64
"""Shapes for which a step remembers what it costs."""
_GROWING = """
arange eye full linspace new_full new_ones new_zeros ones zeros tril_indices triu_indices expand expand_copy broadcast_to
repeat tile repeat_interleave one_hot pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
replication_pad2d diag_embed unfold conv1d conv2d avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d
"""
_GROWS = frozenset(_GROWING.split())
"""Operators whose number arguments determine the size of the result."""


FREE_BYTES, BYTES_PER_BYTE = 2**30, 64
"""Memory that a run may hold at a time: a fixed amount, and so much for each byte of its inputs and weights."""
FREE_WORK, WORK_PER_ELEMENT = 2**36, 2**16
"""Additions and multiplications in a run: a fixed amount, and so many for each element of its inputs and weights."""


class DenseProgram:
    """Named tensors in, named tensors out. Each step calls one operator of torch.

    Example:
        >>> step = {"name": "sum", "operator": "aten.add.Tensor", "args": [{"node": "x"}, {"node": "x"}], "kwargs": {}}
        >>> text = json.dumps({"inputs": {"x": "x"}, "weights": {}, "steps": [step], "outputs": {"y": {"node": "sum"}}})
        >>> DenseProgram.from_json(text, {})({"x": torch.tensor([1.0, 2.0, 3.0])})
        {'y': tensor([2., 4., 6.])}
    """

    def __init__(self, program: _Json, weights: Mapping[str, Tensor]) -> None:
        self._program = program
        self.weights = dict(weights)
        """Parameters, buffers and constants by their name in the model."""
        for name, weight in self.weights.items():
            if weight.dtype not in CONSTANTS["dtype"].values():
                raise ValueError(f"weight {name!r}: {weight.dtype} is not allowed")
        self.inputs: dict[str, str] = program["inputs"]
        """Name in the program of each input that the model reads."""
        self.unfollowed: tuple[str, ...] = tuple(program.get("unfollowed", ()))
        """Tensors that are constants of the program although training may change them: they are not in the `state_dict`."""
        self._weight_of: dict[str, str] = program["weights"]
        # Replaced as a whole by `set_weights`: a run takes it once.
        self._constants = _Constants.of(self.weights, self._weight_of.values())
        self._sizes = _sizes(self._constants.tensors)
        if len(program["steps"]) > MAX_STEPS:
            raise ValueError(f"expected at most {MAX_STEPS:,} steps, got {len(program['steps']):,}")
        known = {*self.inputs.values(), *self._weight_of}
        self._steps = [_Step(step, known) for step in program["steps"]]
        self.outputs = {name: _decode(value, known) for name, value in program["outputs"].items()}
        """What each output refers to."""
        _free_after_last_use(self._steps, set(_refs(list(self.outputs.values()))))
        self._given = [*self._weight_of, *self.inputs.values()]
        if len(set(self._given)) < len(self._given):
            raise ValueError("expected a node of its own for each input and weight")
        self._max_bound = max(1, min(MAX_BOUND, MAX_STEPS // max(1, len(self._steps))))
        # By key of the inputs.
        self._numbers: dict[object, dict[str, SizeNumber]] = {}
        self._bound: dict[object, BoundProgram] = {}
        self._native: dict[object, NativeProgram] = {}
        self._may_be_native = True
        self._writing = threading.Lock()

    def to_json(self) -> str:
        """Return the operators and how they are connected, without the weights."""
        return json.dumps(self._program, indent=1)

    @classmethod
    def from_json(cls, text: str, weights: Mapping[str, Tensor]) -> DenseProgram:
        """Build from what `to_json` wrote. Anything else raises `CorruptFileError`."""
        try:
            return cls(json.loads(text), weights)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"the dense program cannot be read: {error!r}") from None

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run without gradients. Returns the outputs by name.

        Raises:
            InvalidArgumentError: an operator refuses its arguments, or would take more memory or time than the inputs justify.
        """
        with torch.no_grad():
            return self.run([inputs[name] for name in self.inputs])

    def run(self, tensors: list[Tensor], key: object = None) -> dict[str, Tensor]:
        """Run with the inputs in the order of `inputs`. The caller has turned gradients off.

        The first run with certain shapes measures every step. The second binds them, as one call of the core or as calls of the
        operators, and later ones make those and nothing else. `key` stands for the shapes, strides and types of all inputs: the
        core reads as much memory as they say. Without one it is made of them.
        """
        if key is None:
            key = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        constants = self._constants
        native = self._native.get(key)
        if native is not None:
            found = native.run(constants.addresses, tensors)
            if found is not None:
                return found
        bound = self._bound.get(key)
        if bound is None:
            numbers = self._numbers.get(key)
            if numbers is None:
                return self._measured(tensors, key)
            bound = self._bind(key, numbers, tensors)
        return bound.run([*constants.tensors, *tensors, *bound.tail])

    def _measured(self, tensors: list[Tensor], key: object) -> dict[str, Tensor]:
        """Run within a budget, and remember for `key` that it was enough, and which numbers the sizes gave."""
        nbytes, elements = _sizes(tensors)
        budget = Budget(self._sizes[0] + nbytes, self._sizes[1] + elements)
        values: dict[str, object] = dict(zip(self._given, [*self._constants.tensors, *tensors], strict=True))
        numbers: dict[str, SizeNumber] = {}
        for step in self._steps:
            result = step.run(values, budget)
            if isinstance(result, int | float):
                numbers[step.name] = result
        self._numbers = self._with(self._numbers, key, numbers)
        found = {name: values[ref] for name, ref in self.outputs.items() if isinstance(ref, Ref)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _bind(self, key: object, numbers: Mapping[str, SizeNumber], tensors: list[Tensor]) -> BoundProgram:
        """Bind the steps for `key`, which has come twice. Many shapes of ragged inputs come once."""
        given = {name: position for position, name in enumerate(self._given)}
        refs = {name: ref for name, ref in self.outputs.items() if isinstance(ref, Ref)}
        bound = BoundProgram(self._steps, given, numbers, refs)
        if self._may_be_native:
            weights = dict(zip(self._weight_of, self._constants.tensors, strict=True))
            inputs = dict(zip(self.inputs.values(), tensors, strict=True))
            try:
                native = lower(self._steps, weights, inputs, numbers, refs)
            except UnsupportedOperatorError:
                self._may_be_native = False
            else:
                if native is not None:
                    self._native = self._with(self._native, key, native)
        self._bound = self._with(self._bound, key, bound)
        return bound

    def _with(self, remembered: dict[object, _T], key: object, value: _T) -> dict[object, _T]:
        # A new dict, because several threads run. What another of them adds at this moment is found out again.
        return {**(remembered if len(remembered) < self._max_bound else {}), key: value}

    def set_weights(self, weights: Mapping[str, Tensor], *, ignore_unknown: bool = False) -> None:
        """Replace the weights of these names, all at once: a run that has begun keeps the old ones. Copies the values.

        Args:
            weights: By their name in the model, with the same shape and dtype. Those left out keep their values.
            ignore_unknown: Ignore names that the program does not have, such as buffers that are not used to predict.

        Raises:
            InvalidArgumentError: a name is unknown, a shape or dtype is another, or the program has tensors that cannot follow
                (`unfollowed`). Nothing is replaced then.
        """
        if self.unfollowed:
            raise InvalidArgumentError(
                f"weights: the model computes with {self.unfollowed[0]!r}, a tensor that is not in its state_dict, so the "
                "exported program cannot follow training; make it a parameter or a buffer, or compute it in forward"
            )
        changed: dict[str, Tensor] = {}
        for name, weight in weights.items():
            there = self.weights.get(name)
            if there is None:
                if ignore_unknown:
                    continue
                near = nearest_name(name, self.weights)
                hint = f"did you mean {near!r}?" if near else f"it has {', '.join(map(repr, self.weights)) or 'none'}"
                raise InvalidArgumentError(
                    f"weights[{name!r}]: the program has no such weight, {hint}; ignore_unknown=True ignores it"
                )
            if weight.shape != there.shape or weight.dtype != there.dtype:
                raise InvalidArgumentError(
                    f"weights[{name!r}]: expected {there.dtype} {list(there.shape)}, got {weight.dtype} {list(weight.shape)}; "
                    "export the model again if its layers have changed"
                )
            changed[name] = _own_copy(weight)
        with self._writing:
            self.weights = {**self.weights, **changed}
            self._constants = _Constants.of(self.weights, self._weight_of.values())


class _Constants(NamedTuple):
    """The weights of a program in its order, and where they are. They are kept together, so that one run reads one version."""

    tensors: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], names: Iterable[str]) -> _Constants:
        tensors = [weights[name] for name in names]
        return cls(tensors, [tensor.data_ptr() for tensor in tensors])


def _own_copy(weight: Tensor) -> Tensor:
    """Return a contiguous copy in main memory that can be used in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(weight.shape, dtype=weight.dtype, device="cpu").copy_(weight.detach())


def _sizes(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Sum the bytes and the elements of tensors."""
    sizes = [(tensor.nbytes, tensor.numel()) for tensor in tensors]
    return sum(nbytes for nbytes, _ in sizes), sum(elements for _, elements in sizes)


class Budget:
    """What is left of the memory and the work of one run, given the bytes and elements of its inputs and weights.

    Example:
        >>> Budget(40, 10).exceeded(2**40, "zeros")
        InvalidArgumentError('zeros: takes 1,099,512 MB, but the inputs and weights of this program allow 1,074 MB')
    """

    def __init__(self, nbytes: int, elements: int) -> None:
        self.allowed = FREE_BYTES + BYTES_PER_BYTE * nbytes
        """Bytes that may be held at a time."""
        self.bytes = self.allowed
        """Bytes that may still be taken."""
        self.work = FREE_WORK + WORK_PER_ELEMENT * elements
        """Additions and multiplications that may still be done."""

    def exceeded(self, taken: int, what: str) -> InvalidArgumentError:
        """Return the error for `what`, which would take `taken` bytes or too much work."""
        if taken <= self.bytes:
            return InvalidArgumentError(f"{what}: takes more time than the inputs and weights of this program allow")
        return InvalidArgumentError(
            f"{what}: takes {taken / 1e6:,.0f} MB, but the inputs and weights of this program allow {self.bytes / 1e6:,.0f} MB"
        )


class _Step:
    """One call of an operator. `known` are the names it may refer to, to which it adds its own."""

    args: list[object]
    kwargs: dict[str, object]

    def __init__(self, step: _Json, known: set[str]) -> None:
        self.name: str = step["name"]
        self.operator: str = step["operator"]
        self._function = resolve(self.operator)
        self._guard = GUARDS.get(self.operator)
        self._is_measured = not is_on_sizes(self.operator)
        self._packet = self.operator.split(".")[1]
        self._grows = self._packet in _GROWS
        self._may_be_cheap = self._guard is None and not self._grows
        self._costs: dict[object, Cost] = {}
        self.last_uses: list[str] = []
        """Names that no later step refers to."""
        self.connect(
            [_decode(argument, known) for argument in step["args"]],
            {key: _decode(argument, known) for key, argument in step["kwargs"].items()},
        )
        if not self.operator.startswith("aten.slice"):
            _refuse_maxsize([*self.args, *self.kwargs.values()])
        if self.name in known:
            raise ValueError(f"step {self.name!r} is defined twice")
        known.add(self.name)

    def connect(self, args: list[object], kwargs: dict[str, object]) -> None:
        """Set the arguments, in which a `Ref` stands for the value of that name, and note where the references are."""
        _check_types(self._function, args, kwargs)
        self.args, self.kwargs = args, kwargs
        in_kwargs = _refs(list(kwargs.values()))
        self.refs = _refs(args) + in_kwargs
        self._binds_kwargs = bool(in_kwargs)

    def run(self, values: dict[str, object], budget: Budget) -> object:
        """Call the operator with `values`, to which its result is added. Returns the result."""
        # As `_bind` does, without a call for most steps.
        args = [values[a] if isinstance(a, Ref) else _bind(a, values) if isinstance(a, list) else a for a in self.args]
        kwargs = self.kwargs
        if self._binds_kwargs:
            kwargs = dict(zip(kwargs, _bind(list(kwargs.values()), values), strict=True))
        taken = 0
        try:
            if self._is_measured:
                taken, work = self._cost(args, kwargs, [values[name] for name in self.refs])
                if taken > budget.bytes or work > budget.work:
                    raise budget.exceeded(taken, f"step {self.name} ({self.operator})")
                budget.work -= work
            values[self.name] = result = self._function(*args, **kwargs)
        except InvalidArgumentError:
            raise
        except OPERATOR_ERRORS as error:
            raise refused(self.name, self.operator, error) from error
        # Only the result is kept, and the values that nothing refers to any more are freed.
        kept = (
            result.nbytes if isinstance(result, Tensor) else _nbytes(result) if isinstance(result, list | tuple) else 0
        )
        freed = [values.pop(name) for name in self.last_uses]
        tensors = [value for value in freed if isinstance(value, Tensor)]
        if any(isinstance(value, list | tuple) for value in freed):
            tensors = list(tensors_in(freed))
        kept -= sum(tensor.nbytes for tensor in tensors)
        budget.bytes = min(budget.allowed, budget.bytes - kept)
        return result

    def _cost(self, args: list[object], kwargs: dict[str, object], given: list[object]) -> Cost:
        """Bound the memory and the work of a call with the referenced values `given`."""
        tensors = [value for value in given if isinstance(value, Tensor)]
        if any(isinstance(value, list | tuple) for value in given):
            tensors = list(tensors_in(given))
        together = math.prod([tensor.numel() or 1 for tensor in tensors])
        is_small = len(tensors) <= 1 or together <= _SMALL
        if self._may_be_cheap and is_small:
            return 8 * together, together
        hidden = 0 if self._guard is None else self._guard(*args, **kwargs)
        if not self._grows and not hidden:
            if is_small:
                return 8 * together, together
            known = known_cost(self._packet, tensors)
            if known is not None:
                return known
        key = _shape_key([args, list(kwargs.values())])
        cost = self._costs.get(key)
        if cost is None:
            taken, work = measure(self._function, args, kwargs)
            cost = taken + 8 * hidden, work + hidden
            if len(self._costs) >= _REMEMBERED:
                self._costs = {}
            self._costs[key] = cost
        return cost


def _nbytes(values: Sequence[object]) -> int:
    """Sum the bytes of the tensors in lists and tuples."""
    return sum(tensor.nbytes for tensor in tensors_in(values))


_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "device": torch.device, "memory_format": torch.memory_format}


def _check_types(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse a wrong type where a dtype is expected: torch takes any integer for one, and reads past its list of dtypes."""
    if not isinstance(function, OpOverload):
        return
    names = [argument.name for argument in function._schema.arguments]
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise ValueError(f"{function} has no such arguments")
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name in _TYPES and value is not None and not isinstance(value, _TYPES[name]):
            raise ValueError(f"{function}: expected a {name}, got {type(value).__name__}")


def _shape_key(value: object) -> object:
    """Return what the cost of a step depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_shape_key, value)) if isinstance(value, list | tuple) else value


def _refs(value: object) -> list[str]:
    """List the references in nested lists, in order, repetitions included."""
    if isinstance(value, Ref):
        return [value]
    return [name for item in value for name in _refs(item)] if isinstance(value, list) else []


def _free_after_last_use(steps: Sequence[_Step], needed: set[str]) -> None:
    """Let each step drop the results that no later step and no output refers to."""
    made = {step.name for step in steps}
    seen = set(needed)
    for step in reversed(steps):
        used = {*step.refs, step.name}
        step.last_uses = sorted((used & made) - seen)
        seen |= used


def _decode(argument: _Json, known: set[str]) -> object:
    if isinstance(argument, list):
        return [_decode(item, known) for item in argument]
    if not isinstance(argument, dict):
        return _literal(argument)
    ((kind, value),) = argument.items()
    if kind == "node" and value in known:
        return Ref(value)
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device("cpu")
    if kind not in CONSTANTS or value not in CONSTANTS[kind]:
        raise ValueError(f"there is no {kind} {value!r}")
    return CONSTANTS[kind][value]


def _refuse_maxsize(value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _refuse_maxsize(item)
    elif value == sys.maxsize:
        raise ValueError(f"expected a number up to 2**31, got {sys.maxsize}")


def _literal(value: _Json) -> _Json:
    if isinstance(value, int) and abs(value) > 2**31 and value != sys.maxsize:  # the end of a slice that has none
        raise ValueError(f"expected a number up to 2**31, got {value}")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise ValueError(f"expected a text of at most {MAX_TEXT} characters, got {len(value)}")
    return value


def _bind(arguments: list[object], values: Mapping[str, object]) -> list[object]:
    """Return `arguments`, nested lists included, with values for references."""
    return [
        values[item] if isinstance(item, Ref) else _bind(item, values) if isinstance(item, list) else item
        for item in arguments
    ]


def program_inputs(
    columns: Mapping[str, BatchColumn], embeddings: Mapping[str, Mapping[str, BatchColumn]]
) -> dict[str, Tensor]:
    """Return dense columns and embeddings under their names in the program. A `Ragged` becomes two tensors.

    Example:
        >>> list(program_inputs({"age": torch.ones(2)}, {"embeddings": {"user": torch.ones(2, 4)}}))
        ['column/age', 'embeddings/user']
    """
    inputs = {f"column/{name}": value for name, value in columns.items() if isinstance(value, Tensor)}
    for path, outputs in embeddings.items():
        for name, value in outputs.items():
            if isinstance(value, Ragged):
                inputs[f"{path}/{name}/values"] = value.values
                inputs[f"{path}/{name}/row_splits"] = value.offsets
            else:
                inputs[f"{path}/{name}"] = value
    return inputs
