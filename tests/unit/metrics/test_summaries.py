"""Danger: summaries that are written and that no plugin finds. They are read back the way a TensorBoard plugin reads them: by the
data provider, by plugin name, run and tag; the JSON is compared byte by byte.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter
from torch.utils.tensorboard import SummaryWriter

from monolith.errors import InvalidArgumentError
from monolith.metrics.summary import (
    SummaryType,
    feature_insight,
    feature_insight_data,
    get_nas_weight_json,
    nas_data,
    prepare_head,
    write_summary,
)

NAMES, SIZES = ["f1", "f2", "f3"], [3, 5, 9]
GROUPS = [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]]
GATING = (
    b'{"tag_type": "gating", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [3, 5, 9], "group_index": [0, 0, 1]}'
)
STEPS = 10


def read(folder: Path, summaries: list[Any]) -> dict[str, tuple[Any, list[Any]]]:
    """Write `summaries` for ten steps; what a plugin gets of them, by tag: the time series and its data."""
    with SummaryWriter(folder) as writer:
        for step in range(STEPS):
            writer.add_scalar("loss", 1.0, step)
            for summary in summaries:
                write_summary(writer, summary, step)
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider, context = MultiplexerDataProvider(multiplexer, str(folder)), RequestContext()
    where = {"experiment_id": "0", "plugin_name": "monolith", "run_tag_filter": RunTagFilter(runs=["."])}
    series = provider.list_tensors(context, **where)["."]
    data = provider.read_tensors(context, downsample=100, **where)["."]
    return {tag: (series[tag], data[tag]) for tag in series}


def test_architecture_weights(tmp_path: Path) -> None:
    found = read(tmp_path, [nas_data(torch.tensor([0.5, 0.8]), NAMES, SIZES, GROUPS)])
    series, data = found.pop("gating/monolith_nas_weight")
    assert found == {}
    assert series.plugin_content == GATING
    assert series.description == "gating"
    assert [datum.step for datum in data] == list(range(STEPS))
    np.testing.assert_array_equal(data[-1].numpy, np.float32([0.5, 0.8]))


def test_contributions_with_labels(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    x, w = torch.rand(3, 17, generator=rng), torch.rand(17, 2, generator=rng)
    summary = feature_insight_data(x, NAMES, SIZES, weight=w, label=torch.tensor([1, 0, 1]))
    series, data = read(tmp_path, [summary])["fi_train/monolith_feature_insight"]
    assert series.plugin_content == (
        b'{"tag_type": "fi_train", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [2, 2, 2], '
        b'"group_index": [0, 1, 2], "label_size": 1}'
    )
    values, weights = x.numpy(), w.numpy()
    parts = [values[:, a:b] @ weights[a:b] for a, b in ((0, 3), (3, 8), (8, 17))]
    assert data[-1].numpy.shape == (3, 7)
    np.testing.assert_allclose(data[-1].numpy, np.hstack([*parts, [[1], [0], [1]]]), rtol=1e-5)


def test_contributions_without_labels(tmp_path: Path) -> None:
    x, w = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2, requires_grad=True)
    summary = feature_insight_data(x, ["a", "b"], [1, 2], weight=w, name="tower", description="first layer")
    series, data = read(tmp_path, [summary])["tower_fi_direct/monolith_feature_insight"]
    assert series.plugin_content == (
        b'{"tag_type": "fi_direct", "segment_names": ["a", "b"], "segment_sizes": [1, 1], "label_size": 0}'
    )
    assert series.description == "first layer"
    assert data[-1].numpy.tolist() == [[0, 18], [18, 162]]


def test_contributions_computed_elsewhere_and_several_labels() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    summary = feature_insight_data(x, ["a", "b"], [1, 2], label=torch.ones(2, 4), group_info=[["b", "a"]])
    (value,) = summary.value
    assert value.metadata.plugin_data.content == (
        b'{"tag_type": "fi_train", "segment_names": ["a", "b"], "segment_sizes": [1, 2], "group_index": [0, 0], "label_size": 4}'
    )
    assert [dim.size for dim in value.tensor.tensor_shape.dim] == [2, 7]


def test_heads_of_the_original() -> None:
    assert prepare_head(NAMES, SIZES, GROUPS) == (GATING, SummaryType.GATING)
    selecting = b'{"tag_type": "selecting", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [[3, 6], [5, 10], [4, 8, 16]]}'
    assert prepare_head(NAMES, [[3, 6], [5, 10], [4, 8, 16]]) == (selecting, SummaryType.SELECTING)
    assert prepare_head([], [], raw_tag="mixed") == (b"", "mixed")


def test_groups_are_numbered_in_their_order_without_gaps() -> None:
    head, _ = prepare_head(["z", "a", "m"], [1, 1, 1], [["unused"], ["m"], ["other"], ["z", "a"]])
    assert head.endswith(b'"group_index": [1, 1, 0]}')


@pytest.mark.parametrize(
    ("name", "raw_tag", "tag"),
    [
        (None, None, "monolith_nas_weight"),
        ("tower", None, "tower/monolith_nas_weight"),
        (None, "simple", "simple/monolith_nas_weight"),
        ("tower", "simple", "tower_simple/monolith_nas_weight"),
    ],
)
def test_weights_without_segments(name: str | None, raw_tag: str | None, tag: str) -> None:
    (value,) = nas_data(torch.ones(2), name=name, raw_tag=raw_tag).value
    assert value.tag == tag
    assert value.metadata.plugin_data.content == b""


def test_bad_descriptions_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="segment_sizes: expected one per name, got 1 sizes for 2 names"):
        nas_data(torch.ones(2), ["a", "b"], [1])
    with pytest.raises(InvalidArgumentError, match="group_info: expected every segment in a group, 'b' is in none"):
        nas_data(torch.ones(2), ["a", "b"], [1, 2], [["a"]])
    with pytest.raises(InvalidArgumentError, match=r"input_tensor: expected shape \[rows, 3\]"):
        feature_insight_data(torch.ones(2, 4), ["a", "b"], [1, 2])
    with pytest.raises(InvalidArgumentError, match=r"weight: expected shape \[3, k\]"):
        feature_insight(torch.ones(2, 3), torch.ones(4, 2), [1, 2], aggregate=True)


def test_architecture_weights_of_a_state_dict() -> None:
    state = {"dense.weight": torch.zeros(2), "nas.arch_0": torch.tensor([[0.5], [0.1]])}
    assert get_nas_weight_json(state, "arch") == ["0.5", "0.1"]
    with pytest.raises(InvalidArgumentError, match=r"contains 'gate'; there are dense\.weight, nas\.arch_0"):
        get_nas_weight_json(state, "gate")


def test_importing_metrics_does_not_import_tensorboard() -> None:
    script = (
        "import sys, monolith.metrics.summary; assert not any(m.split('.')[0] == 'tensorboard' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
