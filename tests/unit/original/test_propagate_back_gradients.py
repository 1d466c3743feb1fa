"""Danger: a gradient handed to the wrong input, or one of a variable that does not belong to the part being trained."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import InvalidVariableError
from monolith.original.gradients import propagate_back_dict_gradients, propagate_back_gradients


def test_the_original_s_example() -> None:
    x = torch.tensor(8.0, requires_grad=True)
    y = 2 * x
    grouped = propagate_back_dict_gradients([(3 * y.detach(), y)], {x: "group1"}, {y})
    ((dx, same),) = grouped["group1"]
    assert dx is not None
    assert (dx.item(), same.item()) == (96.0, 8.0)


def test_gradients_of_several_variables_add_up_in_the_order_of_the_inputs() -> None:
    a, b, c = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 5.0))
    u, v = a * b, b * b
    da, db, dc = propagate_back_gradients([(torch.tensor(1.0), u), (torch.tensor(10.0), v)], [a, b, c])
    assert da is not None
    assert db is not None
    assert (da.item(), db.item(), dc) == (3.0, 2.0 + 10.0 * 6.0, None)


def test_inputs_are_grouped_by_key_in_their_order() -> None:
    a, b, c = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 5.0))
    grouped = propagate_back_dict_gradients([(torch.tensor(1.0), a + 2 * b + 3 * c)], {a: "x", b: "y", c: "x"})
    values = {key: [gradient.item() for gradient, _ in pairs if gradient is not None] for key, pairs in grouped.items()}
    assert values == {"x": [1.0, 3.0], "y": [2.0]}


def test_a_variable_from_elsewhere_is_refused() -> None:
    x = torch.tensor(8.0, requires_grad=True)
    y, z = 2 * x, 3 * x
    with pytest.raises(RuntimeError, match=r"Invalid variables in the input: grads_and_vars\[1\]") as raised:
        propagate_back_gradients([(torch.tensor(1.0), y), (torch.tensor(1.0), z)], [x], {y})
    assert isinstance(raised.value, InvalidVariableError)


def test_an_empty_set_of_valid_variables_allows_all() -> None:
    x = torch.tensor(8.0, requires_grad=True)
    (dx,) = propagate_back_gradients([(torch.tensor(1.0), 2 * x)], [x], valid_var_set=set())
    assert dx is not None
    assert dx.item() == 2.0


def test_one_graph_may_be_used_twice() -> None:
    x = torch.tensor(8.0, requires_grad=True)
    y = x * x
    for factor in (1.0, 3.0):
        (dx,) = propagate_back_gradients([(torch.tensor(factor), y)], [x])
        assert dx is not None
        assert dx.item() == factor * 16.0


def test_what_is_in_no_graph_has_no_gradient() -> None:
    x, constant = torch.tensor(8.0, requires_grad=True), torch.tensor(1.0)
    one = torch.tensor(1.0)
    assert propagate_back_gradients([(one, 2 * x)], [constant, x]) == [None, 2.0]
    assert propagate_back_gradients([(one, constant)], [x]) == [None]
    assert propagate_back_gradients([], [x]) == [None]
    assert propagate_back_gradients([(one, 2 * x)], []) == []
