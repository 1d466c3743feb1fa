"""`DenseProgram`: the dense part of a model as data, traced by `torch.export`.

torch's own file of an exported program holds pickles, code for guards, and expressions that are evaluated: opening one can run
anything. Here a program is a list of operators in JSON and its weights in safetensors, and running it is a loop. `operators.py`
says which operators those may be, and `budget.py` how much memory and time they may take.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, OutputKind

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve.budget import Budget, Cost, known_cost, measure, tensors_in
from monolith.serve.operator_guards import GUARDS
from monolith.serve.operators import is_on_sizes, name_of, resolve

__all__ = ["DenseProgram"]

Json = Any  # what json.loads returns
MAX_STEPS = 100_000
"""Steps of a program."""
MAX_TEXT = 256
"""Characters of a text argument, such as the equation of `einsum`."""

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_CONSTANTS: dict[str, dict[str, object]] = {
    "dtype": {name: getattr(torch, name) for name in _DTYPES},
    "layout": {"strided": torch.strided},
    "memory_format": {"contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format},
}
_SMALL = 2**20
"""A step whose tensors have fewer elements than this, all multiplied, is not measured."""
_REMEMBERED = 64
"""Shapes for which a step remembers what it costs."""
_GROWING = """
arange eye full linspace new_full new_ones new_zeros ones zeros tril_indices triu_indices expand expand_copy broadcast_to
repeat tile repeat_interleave one_hot pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
replication_pad2d diag_embed unfold conv1d conv2d avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d
"""
_GROWS = frozenset(_GROWING.split())
"""Operators whose numbers say how large the result is."""


class DenseProgram:
    """Named tensors in, named tensors out; each step calls one operator of torch.

    Example:
        >>> class Double(nn.Module):
        ...     def forward(self, x):
        ...         return (2 * x,)
        >>> program = DenseProgram.trace(Double(), {"x": torch.ones(4)}, ["y"])
        >>> program({"x": torch.tensor([1.0, 2.0, 3.0])})
        {'y': tensor([2., 4., 6.])}
        >>> DenseProgram.from_json(program.to_json(), program.weights)({"x": torch.tensor([5.0])})
        {'y': tensor([10.])}
    """

    def __init__(self, program: Json, weights: Mapping[str, Tensor]) -> None:
        self._program = program
        self.weights = dict(weights)
        """Parameters, buffers and constants by their name in the model."""
        for name, weight in self.weights.items():
            if weight.dtype not in _CONSTANTS["dtype"].values():
                raise ValueError(f"weight {name!r}: {weight.dtype} is not allowed")
        self.inputs: dict[str, str] = program["inputs"]
        """Name in the program of each input; those the model does not read are left out."""
        self._constants = {node: self.weights[name] for node, name in program["weights"].items()}
        if len(program["steps"]) > MAX_STEPS:
            raise ValueError(f"expected at most {MAX_STEPS:,} steps, got {len(program['steps']):,}")
        known = {*self.inputs.values(), *self._constants}
        self._steps = [_Step(step, known) for step in program["steps"]]
        self.outputs = {name: _decode(value, known) for name, value in program["outputs"].items()}
        """What each output refers to."""
        _free_after_last_use(self._steps, _refs(list(self.outputs.values())))

    @classmethod
    def trace(cls, module: nn.Module, example: Mapping[str, Tensor], outputs: Sequence[str]) -> DenseProgram:
        """Trace `module(*example.values())`, a tuple with one tensor per name of `outputs`.

        The first dimension of every input may vary; the example needs at least two rows, so that one is not taken for a rule.
        """
        varying = {0: torch.export.Dim.DYNAMIC}
        shapes = tuple(varying if tensor.ndim else None for tensor in example.values())
        try:
            # Without gradients: a no_grad block inside the model would otherwise become a region of its own.
            with torch.no_grad(), warnings.catch_warnings():
                # Of nn.LSTM and its like, which list their weights again each time.
                warnings.filterwarnings("ignore", message=r"The tensor attributes? self\..*_flat_weights")
                exported = torch.export.export(module, tuple(example.values()), dynamic_shapes=_shapes(module, shapes))
        except InvalidArgumentError:
            raise
        except Exception as error:  # torch.export has no common base of its errors
            reason = str(error).strip().partition("\n\n")[0]
            raise InvalidArgumentError(f"forward cannot be traced for export: {reason}") from error
        exported = _functional(exported)
        _refuse_changed_weights(exported)
        return cls(*_encode_program(exported, list(example), outputs))

    def to_json(self) -> str:
        """The operators and how they are connected, without the weights."""
        return json.dumps(self._program, indent=1)

    @classmethod
    def from_json(cls, text: str, weights: Mapping[str, Tensor]) -> DenseProgram:
        """Build from what `to_json` wrote; anything else is a `CorruptFileError`."""
        try:
            return cls(json.loads(text), weights)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"the dense program cannot be read: {error!r}") from None

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it. Rows in, rows out. Tensors need no gradient afterwards and have none.

        Raises:
            InvalidArgumentError: an operator refuses its arguments, or would take more memory or time than the inputs justify.
        """
        values: dict[str, object] = dict(self._constants)
        for name, node in self.inputs.items():
            values[node] = inputs[name]
        budget = Budget(tensors_in(list(values.values())))
        with torch.no_grad():
            for step in self._steps:
                step.run(values, budget)
        found = {name: _bind(value, values) for name, value in self.outputs.items()}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


class _Ref(str):
    """The value of an earlier step, by name."""


class _Step:
    """One call of an operator; `known` are the names it may refer to, to which it adds its own."""

    def __init__(self, step: Json, known: set[str]) -> None:
        self.name: str = step["name"]
        self.operator: str = step["operator"]
        self._function = resolve(self.operator)
        self._guard = GUARDS.get(self.operator)
        self._is_measured = not is_on_sizes(self.operator)
        self._packet = self.operator.split(".")[1]
        self._grows = self._packet in _GROWS
        self._costs: dict[object, Cost] = {}
        self.args = [_decode(argument, known) for argument in step["args"]]
        self.kwargs = {key: _decode(argument, known) for key, argument in step["kwargs"].items()}
        self.last_uses: list[str] = []
        """Names that no later step refers to."""
        _check_types(self._function, self.args, self.kwargs)
        if not self.operator.startswith("aten.slice"):
            _refuse_maxsize([*self.args, *self.kwargs.values()])
        if self.name in known:
            raise ValueError(f"step {self.name!r} is there twice")
        known.add(self.name)

    def run(self, values: dict[str, object], budget: Budget) -> None:
        """Call the operator with `values`, to which its result is added."""
        args, kwargs = _bind(self.args, values), _bind(self.kwargs, values)
        try:
            cost = self._cost(args, kwargs) if self._is_measured else (0, 0)
            budget.take(cost, f"step {self.name} ({self.operator})")
            values[self.name] = result = self._function(*args, **kwargs)
        except InvalidArgumentError:
            raise
        except _REFUSALS as error:
            reason = str(error).strip().partition("\n")[0]
            raise InvalidArgumentError(f"step {self.name} ({self.operator}): {reason}") from error
        # Of what was taken, only the result is still there.
        budget.give_back(cost[0] - sum(tensor.nbytes for tensor in tensors_in(result)))
        for name in self.last_uses:
            budget.give_back(sum(tensor.nbytes for tensor in tensors_in(values.pop(name))))

    def _cost(self, args: list[object], kwargs: dict[str, object]) -> Cost:
        hidden = 0 if self._guard is None else self._guard(*args, **kwargs)
        tensors = list(tensors_in([args, list(kwargs.values())]))
        together = math.prod(max(1, tensor.numel()) for tensor in tensors)
        if not self._grows and not hidden and (len(tensors) <= 1 or together <= _SMALL):
            return 8 * together, together
        known = None if self._grows or hidden else known_cost(self._packet, tensors)
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


_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""How operators and guards refuse their arguments."""
_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "device": torch.device, "memory_format": torch.memory_format}


def _check_types(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse what is no dtype where one is expected: torch takes any integer for one, and reads behind its list of dtypes."""
    if not isinstance(function, OpOverload):
        return
    names = [argument.name for argument in function._schema.arguments]
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise ValueError(f"{function} has no such arguments")
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name in _TYPES and value is not None and not isinstance(value, _TYPES[name]):
            raise ValueError(f"{function}: expected a {name}, got {type(value).__name__}")


def _shape_key(value: object) -> object:
    """What the cost of a step depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_shape_key, value)) if isinstance(value, list | tuple) else value


def _refs(value: object) -> set[str]:
    if isinstance(value, _Ref):
        return {value}
    return {name for item in value for name in _refs(item)} if isinstance(value, list) else set()


def _free_after_last_use(steps: Sequence[_Step], needed: set[str]) -> None:
    """Let each step forget the results of others that nothing behind it refers to."""
    made = {step.name for step in steps}
    seen = set(needed)
    for step in reversed(steps):
        used = _refs([step.args, list(step.kwargs.values())]) | {step.name}
        step.last_uses = sorted((used & made) - seen)
        seen |= used


def _shapes(module: nn.Module, shapes: tuple[object, ...]) -> tuple[object, ...]:
    code = module.forward.__code__
    takes_any_number = bool(code.co_flags & 0x04)
    return (shapes,) if takes_any_number else shapes


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace changes in place, and regions such as those under autocast, by operators that only return something."""
    with warnings.catch_warnings():
        # torch warns of its own use of a deprecated class of its own.
        warnings.simplefilter("ignore", FutureWarning)
        flat: torch.export.ExportedProgram = exported.run_decompositions({})
    flat.graph.eliminate_dead_code()
    return flat


def _refuse_changed_weights(exported: torch.export.ExportedProgram) -> None:
    """A program is run many times, from several threads: it must find its weights as they were."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise InvalidArgumentError(
                f"forward changes {spec.target!r} even in eval mode; such a model cannot be exported"
            )


def _encode_program(
    exported: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Json, dict[str, Tensor]]:
    weights, weight_nodes, input_nodes = {}, {}, []
    used = {node.name for node in exported.graph.nodes if node.users}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            input_nodes.append(spec.arg.name)
        elif spec.arg.name in used and spec.target is not None:
            weight_nodes[spec.arg.name] = spec.target
            tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            weights[spec.target] = tensor.detach().cpu().clone().contiguous()
    steps = [
        {
            "name": node.name,
            "operator": _operator(node),
            "args": [_encode(argument) for argument in node.args],
            "kwargs": {key: _encode(argument) for key, argument in node.kwargs.items()},
        }
        for node in exported.graph.nodes
        if node.op == "call_function" and node.target not in _ASSERTIONS
    ]
    (returned,) = exported.graph.output_node().args
    specs = exported.graph_signature.output_specs
    answers = [node for node, spec in zip(returned, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT]
    program = {
        "inputs": {name: node for name, node in zip(inputs, input_nodes, strict=True) if node in used},
        "weights": weight_nodes,
        "steps": steps,
        "outputs": {name: _encode(node) for name, node in zip(outputs, answers, strict=True)},
    }
    return program, weights


_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)


def _operator(node: fx.Node) -> str:
    name = name_of(node.target)
    if name is None:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, kind = stack[-1] if stack else ("", "")
        where = f"{path or 'forward'} ({str(kind).rpartition('.')[2]})" if stack else "forward"
        raise InvalidArgumentError(
            f"{where} uses {node.target}, which an exported model may not: only operators of torch that check their arguments "
            "and change nothing are allowed (monolith.serve.operators.ALLOWED); use other torch functions in that part of forward"
        )
    return name


def _encode(argument: object) -> Json:
    match argument:
        case fx.Node():
            return {"node": argument.name}
        case float() if not math.isfinite(argument):
            return {"float": str(argument)}
        case None | bool() | int() | float() | str():
            return argument
        case list() | tuple():
            return [_encode(item) for item in argument]
        case torch.device():
            # A program runs where its inputs are served, not where it was traced.
            return {"device": "cpu"}
    for kind, constants in _CONSTANTS.items():
        for name, constant in constants.items():
            if argument is constant or (kind == "memory_format" and argument == constant):
                return {kind: name}
    raise InvalidArgumentError(f"the model passes a {type(argument).__name__} to an operator, which cannot be exported")


def _decode(argument: Json, known: set[str]) -> object:
    if isinstance(argument, list):
        return [_decode(item, known) for item in argument]
    if not isinstance(argument, dict):
        return _literal(argument)
    ((kind, value),) = argument.items()
    if kind == "node" and value in known:
        return _Ref(value)
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device("cpu")
    if kind not in _CONSTANTS or value not in _CONSTANTS[kind]:
        raise ValueError(f"there is no {kind} {value!r}")
    return _CONSTANTS[kind][value]


def _refuse_maxsize(value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _refuse_maxsize(item)
    elif value == sys.maxsize:
        raise ValueError(f"expected a number up to 2**31, got {sys.maxsize}")


def _literal(value: Json) -> Json:
    if isinstance(value, int) and abs(value) > 2**31 and value != sys.maxsize:  # the end of a slice that has none
        raise ValueError(f"expected a number up to 2**31, got {value}")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise ValueError(f"expected a text of at most {MAX_TEXT} characters, got {len(value)}")
    return value


def _bind(argument: Any, values: Mapping[str, object]) -> Any:  # noqa: ANN401 - arguments of operators
    if isinstance(argument, _Ref):
        return values[argument]
    if isinstance(argument, list):
        return [_bind(item, values) for item in argument]
    if isinstance(argument, dict):
        return {key: _bind(item, values) for key, item in argument.items()}
    return argument
