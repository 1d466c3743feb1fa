"""`DenseProgram`: the dense part of a model as data, traced by `torch.export`.

torch's own file of an exported program holds pickles, code for guards, and expressions that are evaluated: opening one can run
anything. Here a program is a list of operators in JSON and its weights in safetensors, and running it is a loop.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export.graph_signature import InputKind

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve.operators import operator_name, resolve

__all__ = ["DenseProgram"]

Json = Any  # what json.loads returns
_CONSTANTS: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


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
        self.inputs: dict[str, str] = program["inputs"]
        """Name in the program of each input; those the model does not read are left out."""
        self._constants = {node: self.weights[name] for node, name in program["weights"].items()}
        known = {*self.inputs.values(), *self._constants}
        self._steps = [_Step(step, known) for step in program["steps"]]
        self.outputs = {name: _decode(value, known) for name, value in program["outputs"].items()}
        """What each output refers to."""

    @classmethod
    def trace(cls, module: nn.Module, example: Mapping[str, Tensor], outputs: Sequence[str]) -> DenseProgram:
        """Trace `module(*example.values())`, a tuple with one tensor per name of `outputs`.

        The first dimension of every input may vary; the example needs at least two rows, so that one is not taken for a rule.
        """
        varying = {0: torch.export.Dim.DYNAMIC}
        shapes = tuple(varying if tensor.ndim else None for tensor in example.values())
        try:
            # Without gradients: a no_grad block inside the model would otherwise become a region of its own.
            with torch.no_grad():
                exported = torch.export.export(module, tuple(example.values()), dynamic_shapes=_shapes(module, shapes))
        except InvalidArgumentError:
            raise
        except Exception as error:  # torch.export has no common base of its errors
            reason = str(error).strip().partition("\n\n")[0]
            raise InvalidArgumentError(f"forward cannot be traced for export: {reason}") from error
        exported = _without_regions(exported)
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"the dense program cannot be read: {error!r}") from None

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it; rows in, rows out. Tensors need no gradient afterwards and have none."""
        values: dict[str, object] = dict(self._constants)
        for name, node in self.inputs.items():
            values[node] = inputs[name]
        with torch.no_grad():
            for step in self._steps:
                values[step.name] = step.function(*_bind(step.args, values), **_bind(step.kwargs, values))
        found = {name: _bind(value, values) for name, value in self.outputs.items()}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


class _Ref(str):
    """The value of an earlier step, by name."""


class _Step:
    """One call of an operator; `known` are the names it may refer to, to which it adds its own."""

    def __init__(self, step: Json, known: set[str]) -> None:
        self.name: str = step["name"]
        self.function = resolve(step["operator"])
        self.args = [_decode(argument, known) for argument in step["args"]]
        self.kwargs = {key: _decode(argument, known) for key, argument in step["kwargs"].items()}
        known.add(self.name)


def _shapes(module: nn.Module, shapes: tuple[object, ...]) -> tuple[object, ...]:
    code = module.forward.__code__
    takes_any_number = bool(code.co_flags & 0x04)
    return (shapes,) if takes_any_number else shapes


def _without_regions(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Bring regions under autocast, programs inside the program, into its one list of operators."""
    if not any(isinstance(node.target, HigherOrderOperator) for node in exported.graph.nodes):
        return exported
    with warnings.catch_warnings():
        # torch warns of its own use of a deprecated class of its own.
        warnings.simplefilter("ignore", FutureWarning)
        flat: torch.export.ExportedProgram = exported.run_decompositions({})
    return flat


def _refuse_changed_weights(exported: torch.export.ExportedProgram) -> None:
    """A program is run many times, from several threads: it must find its weights as they were."""
    inputs = exported.graph_signature.input_specs
    memory = {spec.arg.name: spec.target for spec in inputs if spec.kind != InputKind.USER_INPUT}
    for node in exported.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        schema = node.target._schema
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, fx.Node) or value.name not in memory:
                continue
            if argument.alias_info.is_write:
                raise InvalidArgumentError(
                    f"forward changes {memory[value.name]!r} even in eval mode; such a model cannot be exported"
                )
            # A view: what is written to it is written to the weight.
            memory[node.name] = memory[value.name]


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
            "operator": operator_name(node.target),
            "args": [_encode(argument) for argument in node.args],
            "kwargs": {key: _encode(argument) for key, argument in node.kwargs.items()},
        }
        for node in exported.graph.nodes
        if node.op == "call_function"
    ]
    (returned,) = exported.graph.output_node().args
    program = {
        "inputs": {name: node for name, node in zip(inputs, input_nodes, strict=True) if node in used},
        "weights": weight_nodes,
        "steps": steps,
        "outputs": {name: _encode(node) for name, node in zip(outputs, returned, strict=True)},
    }
    return program, weights


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
    for kind, type_ in _CONSTANTS.items():
        if isinstance(argument, type_):
            return {kind: str(argument).removeprefix("torch.")}
    raise InvalidArgumentError(f"the model passes a {type(argument).__name__} to an operator, which cannot be exported")


def _decode(argument: Json, known: set[str]) -> object:
    if isinstance(argument, list):
        return [_decode(item, known) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    if kind == "node" and value in known:
        return _Ref(value)
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device("cpu")
    constant = getattr(torch, value, None)
    if kind not in _CONSTANTS or not isinstance(constant, _CONSTANTS[kind]):
        raise ValueError(f"there is no {kind} {value!r}")
    return constant


def _bind(argument: Any, values: Mapping[str, object]) -> Any:  # noqa: ANN401 - arguments of operators
    if isinstance(argument, _Ref):
        return values[argument]
    if isinstance(argument, list):
        return [_bind(item, values) for item in argument]
    if isinstance(argument, dict):
        return {key: _bind(item, values) for key, item in argument.items()}
    return argument
