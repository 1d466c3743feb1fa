"""Danger: a summary that is asked for wrongly fails deep inside torch or json, in words that name no argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.metrics.summary import feature_insight, feature_insight_data, get_nas_weight_json, nas_data, prepare_head
from monolith.train import ModelCheckpoints

X, W = torch.ones(4, 3), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nas_data([0.5], ["a"], [1]), "weight: expected a tensor, got list"),
        (lambda: nas_data(torch.ones(1), ["a", "b"], [1]), "segment_sizes: expected one per name"),
        (lambda: prepare_head(["a"], [1.5]), "segment_sizes: expected whole numbers"),
        (lambda: prepare_head(["a"], ["12"]), "segment_sizes: expected whole numbers"),
        (lambda: prepare_head(["a"], [None]), "segment_sizes: expected whole numbers"),
        (lambda: prepare_head(["a", "b"], [1, 2], group_info=[["a"]]), "group_info: expected every segment"),
        (lambda: feature_insight([[1.0]], W, [1], aggregate=True), "input_embedding: expected a tensor, got list"),
        (lambda: feature_insight(X, W.T, [1, 2], aggregate=True), "weight: expected shape"),
        (lambda: feature_insight_data(X, [], [], weight=W), "segment_sizes: expected at least one"),
        (lambda: feature_insight_data(X, ["a"], [3], label=torch.ones(3)), r"label: expected shape \[4\]"),
        (lambda: feature_insight_data(X, ["a"], [3], label=torch.tensor(1.0)), "label: expected shape"),
        (lambda: feature_insight_data(X, ["a"], [3], label=torch.ones(4, 1, 1)), "label: expected shape"),
        (lambda: get_nas_weight_json({"bias": torch.zeros(1)}, "arch"), "prefix: no tensor's name contains 'arch'"),
        (lambda: get_nas_weight_json(7, "arch"), "ckpt_dir_or_file: expected a state dict or a path, got int"),
    ],
)
def test_a_wrong_argument_is_named(call: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_numbers_of_numpy_and_torch_are_sizes() -> None:
    assert prepare_head(["a", "b"], [np.int64(3), torch.tensor(4)]) == prepare_head(["a", "b"], [3, 4])
    assert prepare_head(["a"], [np.array([3, 4])]) == prepare_head(["a"], [[3, 4]])


def test_weights_are_read_from_a_checkpoint_or_a_model_dir(tmp_path: Path) -> None:
    model = nn.ParameterDict({"arch": nn.Parameter(torch.tensor([0.5, 0.25]))})
    path = ModelCheckpoints(tmp_path, model, torch.optim.SGD(model.parameters())).save(3)
    assert get_nas_weight_json(path, "arch") == get_nas_weight_json(tmp_path, "arch") == ["0.5", "0.25"]
    with pytest.raises(InvalidArgumentError, match="has no complete checkpoint"):
        get_nas_weight_json(tmp_path / "nothing", "arch")
