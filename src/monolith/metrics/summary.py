"""What a model writes for TensorBoard beyond curves: architecture weights and the contribution of each feature.

Scalars and histograms go through `torch.utils.tensorboard.SummaryWriter` as usual. The two summaries here carry, besides their
tensor, JSON that says which columns belong to which feature. TensorBoard hands both to the plugin named `monolith`. `nas_data`
and `feature_insight_data` make a summary, `write_summary` adds it to such a writer. TensorBoard is imported when the first of
them is called.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from enum import StrEnum
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monolith.errors import InvalidArgumentError
from monolith.optional_packages import import_extra
from monolith.state.model_dir import is_complete
from monolith.state.restore_points import find_restore_point, restore_point_of
from monolith.state.storage import StrPath

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "MONOLITH_FI_DATA",
    "MONOLITH_NAS_DATA",
    "PLUGIN_NAME",
    "SummaryType",
    "create_summary_metadata",
    "feature_insight",
    "feature_insight_data",
    "get_nas_weight_json",
    "nas_data",
    "prepare_head",
    "write_summary",
]

PLUGIN_NAME = "monolith"
"""The TensorBoard plugin that the summaries are for."""
MONOLITH_NAS_DATA = f"{PLUGIN_NAME}_nas_weight"
"""The tag of weights of an architecture search."""
MONOLITH_FI_DATA = f"{PLUGIN_NAME}_feature_insight"
"""The tag of feature insights."""

Sizes = Sequence[int] | Sequence[Sequence[int]]
_Head = dict[str, str | int | list[int] | list[str] | list[int | list[int]]]


class SummaryType(StrEnum):
    """What the tensor of a summary means.

    Example:
        >>> SummaryType.FEATURE_INSIGHT_TRAIN.value
        'fi_train'
    """

    GATING = "gating"
    SELECTING = "selecting"
    MIXED = "mixed"
    SIMPLE = "simple"
    FEATURE_INSIGHT_DIRECT = "fi_direct"
    FEATURE_INSIGHT_TRAIN = "fi_train"


def prepare_head(
    segment_names: Sequence[str],
    segment_sizes: Sizes,
    group_info: Sequence[Sequence[str]] | None = None,
    raw_tag: str | None = None,
) -> tuple[bytes, str | None]:
    """Return the description of a summary's columns as JSON, and its type: `raw_tag`, gating (sizes are numbers) or selecting.

    `group_info` lists the names of each group, and `group_index` numbers the groups in use in that order. Without it
    every segment is a group of its own. Only gating and fi_train have groups. Without segments the JSON is empty.

    Example:
        >>> prepare_head(["f1", "f2"], [[3, 6], [4, 8, 16]])
        (b'{"tag_type": "selecting", "segment_names": ["f1", "f2"], "segment_sizes": [[3, 6], [4, 8, 16]]}', 'selecting')
    """
    if not segment_names and not segment_sizes:
        return b"", raw_tag
    head = _head(segment_names, segment_sizes, group_info, raw_tag)
    return json.dumps(head).encode(), str(head["tag_type"])


def create_summary_metadata(description: str | None = None, meta_content: bytes | str = b"") -> SummaryMetadata:
    """Return TensorBoard's metadata of a tensor for the plugin `monolith`, with `meta_content` for the plugin.

    Example:
        >>> create_summary_metadata("weights", "{}").plugin_data.content
        b'{}'
    """
    summary_pb2 = import_extra("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="a summary")
    content = meta_content.encode() if isinstance(meta_content, str) else meta_content
    return summary_pb2.SummaryMetadata(
        summary_description=description,
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )


def nas_data(
    weight: Tensor,
    segment_names: Sequence[str] = (),
    segment_sizes: Sizes = (),
    group_info: Sequence[Sequence[str]] | None = None,
    raw_tag: str | None = None,
    description: str | None = None,
    name: str | None = None,
) -> Summary:
    """Return the weights of an architecture search and the segment of each, with tag `<name>_<type>/monolith_nas_weight`.

    Example:
        >>> summary = nas_data(torch.tensor([0.5, 0.8]), ["f1", "f2"], [3, 5])
        >>> summary.value[0].tag
        'gating/monolith_nas_weight'
        >>> summary.value[0].metadata.plugin_data.content
        b'{"tag_type": "gating", "segment_names": ["f1", "f2"], "segment_sizes": [3, 5], "group_index": [0, 1]}'
    """
    if not isinstance(weight, Tensor):
        raise InvalidArgumentError(f"weight: expected a tensor, got {type(weight).__name__}")
    head, kind = prepare_head(segment_names, segment_sizes, group_info, raw_tag)
    return _summary(MONOLITH_NAS_DATA, weight, head, kind, description, name)


def feature_insight(input_embedding: Tensor, weight: Tensor, segment_sizes: Sequence[int], aggregate: bool) -> Tensor:
    """Return what each segment of the input contributes to a linear layer.

    `input_embedding` [rows, n], `weight` [n, k], sizes that sum to n. Contribution of a segment s: x_s @ W_s. Returns them side
    by side [rows, segments * k], or aggregated, the sum of squares of each [rows, segments].

    Example:
        >>> x, w = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(3, 2)
        >>> feature_insight(x, w, [1, 2], aggregate=False).tolist()
        [[1.0, 1.0, 5.0, 5.0]]
        >>> feature_insight(x, w, [1, 2], aggregate=True).tolist()
        [[2.0, 50.0]]
    """
    _require_columns(input_embedding, "input_embedding", segment_sizes)
    if weight.ndim != 2 or len(weight) != input_embedding.shape[1]:
        raise InvalidArgumentError(
            f"weight: expected shape [{input_embedding.shape[1]}, k] as many rows as the input has columns, "
            f"got {list(weight.shape)}"
        )
    sizes = list(segment_sizes)
    parts = [x @ w for x, w in zip(torch.split(input_embedding, sizes, 1), torch.split(weight, sizes), strict=True)]
    if aggregate:
        return torch.stack([part.square().sum(1) for part in parts], dim=1)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def feature_insight_data(
    input_tensor: Tensor,
    segment_names: Sequence[str],
    segment_sizes: Sequence[int],
    weight: Tensor | None = None,
    group_info: Sequence[Sequence[str]] | None = None,
    label: Tensor | None = None,
    description: str | None = None,
    name: str | None = None,
) -> Summary:
    """Return how much each feature matters to a layer, with tag `<name>_<type>/monolith_feature_insight`.

    With `label` [rows] or [rows, labels] (type fi_train) it holds the contributions of the segments, label columns appended,
    for fitting. Without it (fi_direct) it holds their sums of squares. Contributions are `feature_insight` of `input_tensor`
    [rows, n] and `weight` [n, k], or the input itself without `weight`.

    Example:
        >>> x, w, y = torch.ones(4, 3), torch.ones(3, 2), torch.ones(4)
        >>> summary = feature_insight_data(x, ["f1", "f2"], [1, 2], weight=w, label=y)
        >>> summary.value[0].tag
        'fi_train/monolith_feature_insight'
        >>> [dim.size for dim in summary.value[0].tensor.tensor_shape.dim]
        [4, 5]
    """
    _require_columns(input_tensor, "input_tensor", segment_sizes)
    columns = None if label is None else _label_columns(label, len(input_tensor))
    direct = columns is None
    data, sizes = input_tensor, list(segment_sizes)
    if weight is not None:
        data = feature_insight(input_tensor, weight, segment_sizes, aggregate=direct)
        sizes = [data.shape[1] // len(sizes)] * len(sizes)
    kind = SummaryType.FEATURE_INSIGHT_DIRECT if direct else SummaryType.FEATURE_INSIGHT_TRAIN
    head = _head(segment_names, sizes, group_info, kind)
    head["label_size"] = 0
    if columns is not None:
        head["label_size"] = columns.shape[1]
        data = torch.cat([data.float(), columns.float()], dim=1)
    return _summary(MONOLITH_FI_DATA, data, json.dumps(head), kind, description, name)


def get_nas_weight_json(ckpt_dir_or_file: Mapping[str, Tensor] | StrPath, prefix: str) -> list[str]:
    """Return the values of the first tensor whose name contains `prefix`, as strings.

    Args:
        ckpt_dir_or_file: a state dict, the path of a checkpoint, or a model_dir, of which the newest state is read.
        prefix: part of the tensor's name.

    Raises:
        InvalidArgumentError: no tensor has such a name, or there is no checkpoint at the path.

    Example:
        >>> get_nas_weight_json({"tower.bias": torch.zeros(1), "arch.weight": torch.tensor([0.5, 0.25])}, "arch")
        ['0.5', '0.25']
    """
    state = ckpt_dir_or_file if isinstance(ckpt_dir_or_file, Mapping) else _saved_parameters(ckpt_dir_or_file)
    for name, tensor in state.items():
        if prefix in name:
            return [str(value) for value in tensor.detach().cpu().numpy().flat]
    raise InvalidArgumentError(f"prefix: no tensor's name contains {prefix!r}; there are {', '.join(state) or 'none'}")


def write_summary(writer: SummaryWriter, summary: Summary, step: int) -> None:
    """Add `summary` at `step` to the events of `writer`, next to its scalars and histograms.

    Example:
        >>> import tempfile
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        ...     write_summary(writer, nas_data(torch.ones(2), ["f1", "f2"], [3, 5]), step=0)
    """
    writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]


def _head(
    segment_names: Sequence[str], segment_sizes: Sizes, group_info: Sequence[Sequence[str]] | None, raw_tag: str | None
) -> _Head:
    if len(segment_names) != len(segment_sizes):
        raise InvalidArgumentError(
            f"segment_sizes: expected one per name, got {len(segment_sizes)} sizes for {len(segment_names)} names"
        )
    sizes = [_size(size) for size in segment_sizes]
    by_sizes = SummaryType.GATING if all(isinstance(size, int) for size in sizes) else SummaryType.SELECTING
    kind = str(raw_tag or by_sizes)
    # The order of the keys is part of the format.
    head: _Head = {"tag_type": kind, "segment_names": list(segment_names), "segment_sizes": sizes}
    if kind in (SummaryType.GATING, SummaryType.FEATURE_INSIGHT_TRAIN):
        head["group_index"] = _group_index(segment_names, group_info or [[name] for name in segment_names])
    return head


def _saved_parameters(path: StrPath) -> Mapping[str, Tensor]:
    if not isinstance(path, str | PathLike):
        raise InvalidArgumentError(f"ckpt_dir_or_file: expected a state dict or a path, got {type(path).__name__}")
    point = restore_point_of(path) if is_complete(path) else find_restore_point(path)
    model = point.state().get("model")
    if not isinstance(model, dict):
        raise InvalidArgumentError(f"ckpt_dir_or_file: {str(path)!r} is not a checkpoint of a model")
    return {name: value for name, value in model.items() if isinstance(value, Tensor)}


def _label_columns(label: Tensor, rows: int) -> Tensor:
    columns = label[:, None] if label.ndim == 1 else label
    if columns.ndim != 2 or len(columns) != rows:
        raise InvalidArgumentError(
            f"label: expected shape [{rows}] or [{rows}, labels], as many rows as input_tensor, got {list(label.shape)}"
        )
    return columns


def _size(size: object) -> int | list[int]:
    try:
        return operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return [operator.index(part) for part in size]  # type: ignore[attr-defined]
    except TypeError:
        raise InvalidArgumentError(f"segment_sizes: expected whole numbers, or lists of them, got {size!r}") from None


def _summary(
    kind_of_data: str, data: Tensor, content: bytes | str, kind: str | None, description: str | None, name: str | None
) -> Summary:
    summary_pb2 = import_extra("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="a summary")
    tensor_util = import_extra("tensorboard.util.tensor_util", extra="tensorboard", purpose="a summary")
    scope = "_".join(part for part in (name, kind) if part)
    value = summary_pb2.Summary.Value(
        tag=f"{scope}/{kind_of_data}" if scope else kind_of_data,
        metadata=create_summary_metadata(description or kind, content),
        tensor=tensor_util.make_tensor_proto(data.detach().float().cpu().numpy()),
    )
    return summary_pb2.Summary(value=[value])


def _group_index(names: Sequence[str], groups: Sequence[Sequence[str]]) -> list[int]:
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    missing = [name for name in names if name not in group_of]
    if missing:
        raise InvalidArgumentError(f"group_info: expected every segment in a group, {missing[0]!r} is in none")
    used = sorted({group_of[name] for name in names})
    return [used.index(group_of[name]) for name in names]


def _require_columns(tensor: Tensor, name: str, segment_sizes: Sequence[int]) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not segment_sizes:
        raise InvalidArgumentError("segment_sizes: expected at least one")
    if tensor.ndim != 2 or tensor.shape[1] != sum(segment_sizes):
        raise InvalidArgumentError(
            f"{name}: expected shape [rows, {sum(segment_sizes)}], the sum of segment_sizes, got {list(tensor.shape)}"
        )
