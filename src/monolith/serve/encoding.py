"""Write a program that `torch.export` has traced as the JSON and the weights of a `DenseProgram`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from monolith.errors import InvalidArgumentError
from monolith.serve.operators import name_of
from monolith.serve.program import CONSTANTS

__all__ = ["encode_program"]

_Json = Any  # what json.dumps takes


def encode_program(
    exported: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], *, of: str, module: nn.Module
) -> tuple[_Json, dict[str, Tensor]]:
    """Return the JSON of a traced program and its weights, named as in the submodule `of` of the traced `module`."""
    plain_tensors = _plain_tensors(module)
    weights: dict[str, Tensor] = {}
    weight_nodes, input_nodes, unfollowed = {}, [], []
    used = {node.name for node in exported.graph.nodes if node.users}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            input_nodes.append(spec.arg.name)
        elif spec.arg.name in used and spec.target is not None:
            is_constant = spec.kind == InputKind.CONSTANT_TENSOR
            name = f"constant/{spec.target}" if is_constant else spec.target.removeprefix(of)
            weight_nodes[spec.arg.name] = name
            tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            weights[name] = tensor.detach().cpu().clone().contiguous()
            if is_constant and any(_is_same(tensor, plain) for plain in plain_tensors):
                unfollowed.append(spec.target.removeprefix(of))
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
        "unfollowed": unfollowed,
    }
    return program, weights


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b.detach().cpu())


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


def _encode(argument: object) -> _Json:
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
    for kind, constants in CONSTANTS.items():
        for name, constant in constants.items():
            if argument is constant or (kind == "memory_format" and argument == constant):
                return {kind: name}
    raise InvalidArgumentError(f"the model passes a {type(argument).__name__} to an operator, which cannot be exported")


def _plain_tensors(module: nn.Module) -> list[Tensor]:
    """Return the floating-point tensors that modules hold outside of their parameters and buffers, also in lists and dicts."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    left: list[object] = [
        value for part in module.modules() for name, value in vars(part).items() if name not in _REGISTRIES
    ]
    found: list[Tensor] = []
    while left:
        match left.pop():
            case Tensor() as tensor if id(tensor) not in registered and tensor.is_floating_point():
                found.append(tensor)
            case list() | tuple() as items:
                left += items
            case dict() as items:
                left += items.values()
    return found


_REGISTRIES = ("_parameters", "_buffers", "_modules")
