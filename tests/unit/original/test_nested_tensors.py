"""Danger: a batch comes out of a queue with columns exchanged, or the caller's own batch is modified."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from monolith.features import Ragged
from monolith.original import NestedTensors


def test_replaced_tensors_return_in_their_places() -> None:
    nested = NestedTensors({"a": torch.ones([]), "b": (torch.ones([]), torch.ones([]))})
    tensors = nested.get_tensors()
    assert len(tensors) == 3
    assert nested.get_nested_result([torch.zeros_like(tensor) for tensor in tensors]) == {"a": 0, "b": (0, 0)}
    again = nested.get_nested_result([torch.tensor(1), torch.tensor(2), torch.tensor(3)])
    assert again == {"a": 1, "b": (2, 3)}


def test_constants_have_no_tensors_and_come_back() -> None:
    nested = NestedTensors({"a": {"b": 2}})
    assert nested.get_tensors() == []
    assert nested.get_nested_result([]) == {"a": {"b": 2}}


def test_ragged_round_trip_and_order_of_the_flat_list() -> None:
    ragged = Ragged.from_lists([[], [1], [2, 3]])
    nested = NestedTensors([ragged, torch.tensor([7])])
    dense, values, splits = nested.get_tensors()
    assert (dense.tolist(), values.tolist(), splits.tolist()) == ([7], [1, 2, 3], [0, 0, 1, 3])
    result = nested.get_nested_result([dense, values, splits])
    assert result[0].to_lists() == [[], [1], [2, 3]]
    # Other tensors of other lengths fit as well.
    result = nested.get_nested_result([dense, torch.tensor([5]), torch.tensor([0, 1])])
    assert result[0].to_lists() == [[5]]


def test_the_given_structure_is_not_changed() -> None:
    given = {"a": torch.ones(1), "b": [torch.ones(1), {"c": None, "d": (1, "x", True)}]}
    before = copy.copy(given), list(given["b"]), dict(given["b"][1])
    nested = NestedTensors(given)
    nested.get_nested_result(nested.get_tensors())
    assert (given, given["b"], given["b"][1]) == before


def test_containers_and_constants_keep_their_kind() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    weight = torch.nn.Parameter(torch.ones(1))
    given = {1: [None, True, 3, "s"], "pair": Pair(torch.tensor(1), weight), "empty": [(), {}, []]}
    nested = NestedTensors(given)
    assert len(nested.get_tensors()) == 1
    result = nested.get_nested_result([torch.tensor(9)])
    assert result[1] == [None, True, 3, "s"]
    assert isinstance(result["pair"], Pair)
    assert result["pair"].left == 9
    assert result["pair"].right is weight
    assert result["empty"] == [(), {}, []]


class Named(dict[str, torch.Tensor]):
    """A dict that knows more than its entries."""

    name = ""


def test_subclasses_of_dict_stay_what_they_are() -> None:
    counts: defaultdict[str, object] = defaultdict(list, b=torch.tensor(2))
    named = Named(c=torch.tensor(3))
    named.name = "batch"
    given = OrderedDict([("z", torch.tensor(1)), ("a", counts), ("n", named)])
    result = NestedTensors(given).get_nested_result([torch.tensor(10), torch.tensor(20), torch.tensor(30)])
    assert type(result) is OrderedDict
    assert list(result) == ["z", "a", "n"]
    assert result["a"].default_factory is list
    assert (result["z"], result["a"]["b"], result["n"]["c"]) == (10, 20, 30)
    assert (type(result["n"]), result["n"].name) == (Named, "batch")
    assert (given["z"], counts["b"], named["c"]) == (1, 2, 3)


def test_one_object_in_two_places_is_sent_once() -> None:
    shared, ragged = torch.tensor([1]), Ragged.from_lists([[1]])
    nested = NestedTensors([shared, {"again": shared}, ragged, ragged])
    assert len(nested.get_tensors()) == 3
    result = nested.get_nested_result([torch.tensor([2]), torch.tensor([3]), torch.tensor([0, 1])])
    assert result[0] is result[1]["again"]
    assert result[2] is result[3]


@pytest.mark.parametrize("leaf", [1.5, b"bytes", object(), {1, 2}])
def test_other_leaves_are_refused(leaf: object) -> None:
    with pytest.raises(ValueError, match="Tensor is not supported"):
        NestedTensors([leaf])


def test_a_nested_torch_tensor_is_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(ValueError, match="Nested tensor doesn't support nested RaggedTensor"):
        NestedTensors({"a": jagged})


def test_a_wrong_number_of_tensors_is_refused() -> None:
    nested = NestedTensors([torch.ones(1), Ragged.from_lists([[1]])])
    for wrong in (0, 2, 4):
        with pytest.raises(ValueError, match=f"got {wrong}"):
            nested.get_nested_result([torch.ones(1)] * wrong)
