"""Filters written as expressions over columns: parsed, checked and evaluated node by node, never executed as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
from pydantic import model_validator

from monolith.data.transforms.filters import RowFilter
from monolith.data.transforms.rows import any_in_rows, is_in, numbers_of
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = ["FilterByExpression"]

Value = Any
"""A number, a tuple of numbers, a tensor [rows], or a `Ragged`."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS = ("abs", "all", "any", "len")
_LONGEST = 10_000
_DEEPEST = 50


class FilterByExpression(RowFilter):
    """Keeps the rows for which `expression` is true.

    Numbers, column names (one number per row), `+ - * / %`, comparisons (chained too), `in` and `not in` a list of numbers,
    `and`, `or`, `not`, `abs(x)`. Of a `Ragged` column: `len(ids)`, and `any(...)` or `all(...)` of a comparison of its values,
    as in `any(actions in [3, 7])`. `all` of an empty row is true.

    Example:
        >>> keep = FilterByExpression(expression="label > 0 and (1 <= rank < 3 or any(actions == 7))")
        >>> batch = {"label": torch.ones(3), "rank": torch.tensor([1, 5, 5]), "actions": Ragged.from_lists([[], [7], [8]])}
        >>> keep(batch)["rank"].tolist()
        [1, 5]
    """

    expression: str
    """The condition on a row."""

    @model_validator(mode="after")
    def _parses(self) -> FilterByExpression:
        self._tree()
        return self

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
        result = _evaluate(self._tree(), batch)
        if not isinstance(result, torch.Tensor) or result.dtype != torch.bool or result.shape != (num_rows(batch),):
            raise InvalidArgumentError(
                f"expression: expected a condition on each row, such as a > 0, got {self.expression!r}"
            )
        return result

    def _tree(self) -> ast.expr:
        if len(self.expression) > _LONGEST:
            raise ValueError(f"expected at most {_LONGEST} characters")
        try:
            tree = ast.parse(self.expression.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"cannot be parsed: {getattr(error, 'msg', error)}") from None
        _check(tree, 0)
        return tree


def _check(node: ast.expr, depth: int) -> None:
    """Refuse everything that is not in the language before anything is evaluated."""
    if depth > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    children: list[ast.expr]
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            children = []
        case ast.Name():
            children = []
        case ast.List(elts=children) | ast.Tuple(elts=children) | ast.BoolOp(values=children):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            children = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            children = [left, right]
        case ast.Compare(left=left, comparators=rest):
            _check_comparison(node)
            children = [left, *rest]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            children = [argument]
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} ({type(node).__name__}) is not in the language: numbers, columns, + - * / %, "
                f"comparisons, in, and, or, not, {', '.join(_FUNCTIONS)}"
            )
    for child in children:
        _check(child, depth + 1)


def _check_comparison(node: ast.Compare) -> None:
    for compared, op in zip(node.comparators, node.ops, strict=True):
        if isinstance(op, ast.In | ast.NotIn) != isinstance(compared, ast.List | ast.Tuple):
            raise ValueError(f"{ast.unparse(node)!r}: 'in' takes a list of numbers, other comparisons do not")
        if type(op) not in (*_COMPARISONS, ast.In, ast.NotIn):
            raise ValueError(f"{ast.unparse(node)!r}: 'is' is not in the language")


def _evaluate(node: ast.expr, batch: Batch) -> Value:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            column = column_of(batch, name)
            return column if isinstance(column, Ragged) else numbers_of(batch, name)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return tuple(_evaluate(element, batch) for element in elements)
        case ast.BoolOp(op=op, values=values):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            result = _truth(_evaluate(values[0], batch), node)
            for other in values[1:]:
                result = join(result, _truth(_evaluate(other, batch), node))
            return result
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_truth(_evaluate(operand, batch), node)
        case ast.UnaryOp(operand=operand):
            return _on_values(operator.neg, node, _evaluate(operand, batch))
        case ast.BinOp(left=left, op=op, right=right):
            return _on_values(_ARITHMETIC[type(op)], node, _evaluate(left, batch), _evaluate(right, batch))
        case ast.Compare():
            return _compare(node, batch)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _call(name, _evaluate(argument, batch), node)
    raise AssertionError(ast.dump(node))  # _check has let nothing else through


def _compare(node: ast.Compare, batch: Batch) -> Value:
    left, result = _evaluate(node.left, batch), None
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, batch)
        if isinstance(op, ast.In | ast.NotIn):
            one = _on_values(
                lambda values, op=op, right=right: is_in(values, right, invert=isinstance(op, ast.NotIn)), node, left
            )
        else:
            one = _on_values(_COMPARISONS[type(op)], node, left, right)
        result = one if result is None else _on_values(operator.and_, node, result, one)
        left = right
    return result


def _on_values(function: Callable[..., Value], node: ast.expr, *operands: Value) -> Value:
    """Apply `function` to numbers and tensors, or to the values of a `Ragged` and numbers."""
    ragged = [operand for operand in operands if isinstance(operand, Ragged)]
    if not ragged:
        return function(*operands)
    # Values of one column only: whether two columns have equal offsets depends on the batch.
    columns = {part.offsets.data_ptr() for part in ragged}
    if len(columns) > 1 or any(isinstance(operand, torch.Tensor) for operand in operands):
        raise InvalidArgumentError(f"{ast.unparse(node)!r}: compare the values of a Ragged column with numbers only")
    values = function(*(operand.values if isinstance(operand, Ragged) else operand for operand in operands))
    return Ragged(values, ragged[0].offsets)


def _call(name: str, argument: Value, node: ast.expr) -> Value:
    if name == "abs":
        return _on_values(abs, node, argument)
    if not isinstance(argument, Ragged):
        raise InvalidArgumentError(f"{ast.unparse(node)!r}: {name} is for Ragged columns, got one number per row")
    if name == "len":
        return argument.row_lengths()
    hits = _truth(argument.values, node)
    return any_in_rows(argument, hits) if name == "any" else ~any_in_rows(argument, ~hits)


def _truth(value: Value, node: ast.expr) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        raise InvalidArgumentError(
            f"{ast.unparse(node)!r}: expected a condition on each row; compare it, as in x > 0, and take any() or "
            "all() of a Ragged"
        )
    return value
