"""Labels from actions and from other columns, and changes to labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from monolith.config import Config, Finite, Positive
from monolith.data.sources.records import INVALID_LABEL
from monolith.data.transforms.compose import Seeded
from monolith.data.transforms.filters import RowFilter, texts_of
from monolith.data.transforms.rows import label_matrix, labels_shape, labels_up_to, numbers_of, rows_with
from monolith.data.transforms.sampling import leading_action
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = [
    "AddAction",
    "AddLabel",
    "FillMultiRankOutput",
    "LabelNormalization",
    "LabelUpperBound",
    "MultiLabelGen",
    "ScatterLabel",
    "TaskLabel",
    "UseFieldAsLabel",
]


class AddAction(Config):
    """Appends `action` to the actions of the rows that a filter would keep.

    Example:
        >>> from monolith.data.transforms import FilterByValue
        >>> long_view = FilterByValue(column="seconds", op="ge", operand=30)
        >>> batch = {"seconds": torch.tensor([10, 60]), "actions": Ragged.from_lists([[1], [1]])}
        >>> AddAction(where=long_view, action=9)(batch)["actions"].to_lists()
        [[1], [1, 9]]
    """

    where: RowFilter
    """Which rows."""
    action: int
    """What is appended."""
    actions: str = "actions"
    """The column of actions: `Ragged`."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        column = column_of(batch, self.actions)
        if not isinstance(column, Ragged):
            raise InvalidArgumentError(f"batch[{self.actions!r}]: expected a Ragged to append to, got a tensor")
        more = self.where.mask(batch).long()
        splits = column.offsets + torch.cat([more.new_zeros(1), more.cumsum(0)])
        values = column.values.new_full((int(splits[-1]),), self.action)
        # Row r has moved by the number of actions appended to the rows before it.
        values[torch.arange(len(column.values)) + (splits[:-1] - column.offsets[:-1])[column.value_rowids()]] = (
            column.values
        )
        return {**batch, self.actions: Ragged(values, splits)}


@dataclass(frozen=True, kw_only=True)
class TaskLabel:
    """How one task's label follows from a row's actions."""

    pos_actions: tuple[int, ...]
    """One of these: the label is 1."""
    neg_actions: tuple[int, ...] = ()
    """If given, a row with none of these and no positive action is not an example of the task."""
    sample_rate: float = 1.0
    """Probability of a negative row to stay an example."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the original's notation of one task: "p1,p2:n1,n2:rate", where trailing parts are optional.

        Example:
            >>> TaskLabel.parse("1,2:3:0.5")
            TaskLabel(pos_actions=(1, 2), neg_actions=(3,), sample_rate=0.5)
        """
        try:
            positive, negative, rate = (*text.split(":"), "", "")[:3] if text.count(":") < 3 else ("", "", "")
            task = cls(pos_actions=_ints(positive), neg_actions=_ints(negative), sample_rate=float(rate or 1))
        except ValueError:
            task = None
        if task is None or not task.pos_actions or not 0 <= task.sample_rate <= 1:
            raise ConfigError(
                f"task: expected 'actions:actions:rate' with a rate in [0, 1], as in '1,2:3:0.5'; got {text!r}"
            )
        return task


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


class AddLabel(Seeded):
    """Appends one label per task to the column `label`, from the column `actions`.

    The label is 1 if the row has a positive action of the task. Otherwise it is INVALID_LABEL if negative actions are listed
    and the row has none of them, and else `negative_value` with the task's sample rate as probability, or INVALID_LABEL. An
    existing first label <= 0 becomes INVALID_LABEL. `new_sample_rate` is written to the column `sample_rate`.

    Example:
        >>> add = AddLabel("1:2:1.0", negative_value=0.0, new_sample_rate=1.0)
        >>> batch = add({"actions": Ragged.from_lists([[1], [2], [3]])})
        >>> (batch["label"] > -1).squeeze(1).tolist(), batch["label"][:2].tolist()
        ([True, True, False], [[1.0], [0.0]])
    """

    def __init__(
        self,
        config: str | tuple[TaskLabel, ...],
        *,
        negative_value: float = 0.0,
        new_sample_rate: float = 1.0,
        seed: int = 0,
        label: str = "label",
        actions: str = "actions",
        sample_rate: str = "sample_rate",
    ) -> None:
        super().__init__(seed=seed)
        self.tasks = tuple(map(TaskLabel.parse, config.strip(";").split(";"))) if isinstance(config, str) else config
        if not 0 < new_sample_rate <= 1:
            raise ConfigError(f"new_sample_rate: expected a number in (0, 1], got {new_sample_rate}")
        self._negative_value, self._new_sample_rate = negative_value, new_sample_rate
        self._label, self._actions, self._sample_rate = label, actions, sample_rate

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        rows, actions = num_rows(batch), column_of(batch, self._actions)
        labels = label_matrix(batch, self._label) if self._label in batch else torch.empty(rows, 0)
        invalid = torch.tensor(INVALID_LABEL)
        columns = list(labels.unbind(1))
        if columns:
            columns[0] = torch.where(columns[0] <= 0, invalid, columns[0])
        # One draw per row and task, used or not, so that a row's draw does not depend on the rows before it.
        draws = torch.from_numpy(self._rng.random((len(self.tasks), rows)))
        for task, draw in zip(self.tasks, draws, strict=True):
            sampled = draw < task.sample_rate
            if task.neg_actions:
                sampled &= rows_with(actions, task.neg_actions)
            negative = torch.where(sampled, torch.tensor(self._negative_value), invalid)
            columns.append(torch.where(rows_with(actions, task.pos_actions), torch.tensor(1.0), negative))
        rate = torch.full((rows,), self._new_sample_rate)
        return {**batch, self._label: torch.stack(columns, dim=1), self._sample_rate: rate}


class ScatterLabel(Config):
    """Moves the first label to the index of the row's channel. All others are INVALID_LABEL: [rows, places].

    Example:
        >>> batch = {"label": torch.tensor([1.0, 0.0]), "chnid": torch.tensor([7, 8])}
        >>> (ScatterLabel(places={7: 0, 8: 1})(batch)["label"] > -1).tolist()
        [[True, False], [False, True]]
    """

    places: Annotated[dict[int, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Channel to index. A channel that is not listed has no label."""
    label: str = "label"
    """The column of labels."""
    channel: str = "chnid"
    """The column of channels."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        labels, channels = label_matrix(batch, self.label), numbers_of(batch, self.channel)
        scattered = torch.full((len(labels), max(self.places.values()) + 1), INVALID_LABEL)
        for channel, place in self.places.items():
            rows = channels == channel
            scattered[rows, place] = labels[rows, 0]
        return {**batch, self.label: scattered}


class LabelUpperBound(Config):
    """Labels above their bound become the bound.

    Example:
        >>> LabelUpperBound(bounds=(2.0,))({"label": torch.tensor([1.0, 5.0])})["label"].tolist()
        [1.0, 2.0]
    """

    bounds: Annotated[tuple[Finite, ...], Field(min_length=1)]
    """One per label, in order. Further labels are not bounded."""
    label: str = "label"
    """The column of labels."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        labels = label_matrix(batch, self.label)
        bounds = torch.tensor(self.bounds)[: labels.shape[1]]
        bounded = torch.cat([torch.minimum(labels[:, : len(bounds)], bounds), labels[:, len(bounds) :]], dim=1)
        return {**batch, self.label: bounded.reshape(labels_shape(batch, self.label))}


class LabelNormalization(Config):
    """Applies the steps in order to every label y, with the step's value v. INVALID_LABEL stays as it is.

    "log" is ln(max(y + v, 0)), "scale" y / v, "scale2int" y / v rounded towards zero, "pow" (y + 1) ** v, "repow" y ** v or 0
    for y <= 0, and "scalelog" ln(max(y / v + 1, 0)).

    Example:
        >>> LabelNormalization(steps=(("scale", 2.0), ("pow", 2.0)))({"label": torch.tensor([4.0])})["label"].tolist()
        [9.0]
    """

    steps: tuple[tuple[Literal["log", "scale", "scale2int", "pow", "repow", "scalelog"], Positive], ...]
    """Pairs of method and value."""
    label: str = "label"
    """The column of labels."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        given = label_matrix(batch, self.label)
        labels = given
        for method, value in self.steps:
            labels = _normalize(labels, method, value)
        labels = torch.where(given == INVALID_LABEL, given, labels)
        return {**batch, self.label: labels.reshape(labels_shape(batch, self.label))}


def _normalize(y: torch.Tensor, method: str, value: float) -> torch.Tensor:
    match method:
        case "log":
            return torch.log((y + value).clamp(min=0))
        case "scale":
            return y / value
        case "scale2int":
            return torch.trunc(y / value)
        case "pow":
            return torch.pow(y + 1, value)
        case "repow":
            return torch.where(y > 0, torch.pow(y.clamp(min=0), value), 0.0)
        case _:
            return torch.log((y / value + 1).clamp(min=0))


class MultiLabelGen(Config):
    """Makes one label per task, [rows, tasks], valid only at the index of the row's head. All others are INVALID_LABEL.

    The label is the row's first one if `use_origin_label`. Otherwise its action decides, the first in `action_priority` or
    else its first: `pos_label`, `neg_label`, or INVALID_LABEL for an action in neither list and a row without actions.

    Example:
        >>> generate = MultiLabelGen(head_to_index={7: 0, 8: 1}, pos_actions=(1,), neg_actions=(2,))
        >>> out = generate({"chnid": torch.tensor([8, 7]), "actions": Ragged.from_lists([[1], [2]])})["label"]
        >>> (out > -1).tolist(), out[0, 1].item(), out[1, 0].item()
        ([[False, True], [True, False]], 1.0, 0.0)
    """

    head_to_index: Annotated[dict[int | str, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Value of `head_field` to index. A value that is not listed has no label. Integers, or text for a column of text."""
    head_field: str = "chnid"
    """The column of the head that a row belongs to: one number per row, or `Ragged` of uint8 with a text in each row."""
    pos_actions: tuple[int, ...] = ()
    """Actions that make the label `pos_label`."""
    neg_actions: tuple[int, ...] = ()
    """Actions that make the label `neg_label`."""
    use_origin_label: bool = False
    """Whether to take the row's first label instead of looking at its actions."""
    pos_label: Finite = 1.0
    """Label of a positive row."""
    neg_label: Finite = 0.0
    """Label of a negative row."""
    action_priority: tuple[int, ...] = ()
    """Actions by descending priority."""
    task_num: Annotated[int, Field(ge=1)] | None = None
    """Number of labels. None: one more than the greatest index."""
    label: str = "label"
    """The column of labels."""
    actions: str = "actions"
    """The column of actions."""

    @model_validator(mode="after")
    def _fits(self) -> MultiLabelGen:
        if self.use_origin_label == bool(self.pos_actions or self.neg_actions):
            raise ValueError("give either use_origin_label or pos_actions, which neg_actions go with")
        if not self.use_origin_label and not self.pos_actions:
            raise ValueError("pos_actions: expected at least one")
        if self.task_num is not None and self.task_num <= max(self.head_to_index.values()):
            raise ValueError(f"task_num: {self.task_num} tasks have no index {max(self.head_to_index.values())}")
        return self

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        places = self._places(batch)
        values = labels_up_to(batch, self.label, 0)[:, 0].float() if self.use_origin_label else self._by_action(batch)
        tasks = self.task_num or max(self.head_to_index.values()) + 1
        here = places.unsqueeze(1) == torch.arange(tasks)
        return {**batch, self.label: torch.where(here, values.unsqueeze(1), INVALID_LABEL)}

    def _by_action(self, batch: Batch) -> torch.Tensor:
        action, known = leading_action(column_of(batch, self.actions), self.action_priority)
        values = torch.full((len(action),), INVALID_LABEL)
        # Positives last: an action in both lists is positive.
        values[known & torch.isin(action, torch.tensor(self.neg_actions, dtype=torch.int64))] = self.neg_label
        values[known & torch.isin(action, torch.tensor(self.pos_actions))] = self.pos_label
        return values

    def _places(self, batch: Batch) -> torch.Tensor:
        column = column_of(batch, self.head_field)
        if isinstance(column, Ragged):
            heads = {str(head).encode(): place for head, place in self.head_to_index.items()}
            return torch.tensor([heads.get(text, -1) for text in texts_of(column)], dtype=torch.int64)
        numbers = numbers_of(batch, self.head_field)
        places = torch.full((len(numbers),), -1)
        for head, place in self.head_to_index.items():
            if isinstance(head, str):
                raise InvalidArgumentError(
                    f"batch[{self.head_field!r}]: expected text as head {head!r} is, got numbers"
                )
            places[numbers == head] = place
        return places


class UseFieldAsLabel(Config):
    """Raises every label to at least the value of another column: max(label, value).

    With `overwrite_invalid_value`, a value of `label_threshold` or more is taken for an error and counts as 0.

    Example:
        >>> batch = {"label": torch.tensor([0.0, 5.0, 1.0]), "seconds": torch.tensor([3, 4, 900])}
        >>> UseFieldAsLabel(field="seconds", overwrite_invalid_value=True, label_threshold=600)(batch)["label"].tolist()
        [3.0, 5.0, 1.0]
    """

    field: str
    """The column of values: one number per row."""
    overwrite_invalid_value: bool = False
    """Whether values from `label_threshold` on are 0."""
    label_threshold: Finite = 0.0
    """The least value that counts as 0."""
    label: str = "label"
    """The column of labels."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        values = numbers_of(batch, self.field).float()
        if self.overwrite_invalid_value:
            values = torch.where(values >= self.label_threshold, 0.0, values)
        labels = torch.maximum(label_matrix(batch, self.label), values.unsqueeze(1))
        return {**batch, self.label: labels.reshape(labels_shape(batch, self.label))}


class FillMultiRankOutput(Config):
    """Appends a rank to the labels of each row: [rows, labels + 1].

    By "is_draw" the rank is 1 where it is true, else 0. By "chnid" it is the channel for channels 0 and 1, 2 for all others. By
    "rank" it is the rank, at most `rank_num` - 1.

    Example:
        >>> batch = {"label": torch.tensor([1.0, 0.0]), "rank": torch.tensor([3, 40])}
        >>> FillMultiRankOutput(by="rank")(batch)["label"].tolist()
        [[1.0, 3.0], [0.0, 17.0]]
    """

    by: Literal["is_draw", "chnid", "rank"]
    """The column that ranks follow from: one number per row."""
    rank_num: Annotated[int, Field(ge=1)] = 18
    """Number of ranks by "rank"."""
    label: str = "label"
    """The column of labels. A batch without one gets one."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        labels = label_matrix(batch, self.label) if self.label in batch else torch.empty(num_rows(batch), 0)
        values = numbers_of(batch, self.by)
        match self.by:
            case "is_draw":
                ranks = values != 0
            case "chnid":
                ranks = torch.where((values == 0) | (values == 1), values, 2)
            case "rank":
                ranks = values.clamp(max=self.rank_num - 1)
        return {**batch, self.label: torch.cat([labels, ranks.float().unsqueeze(1)], dim=1)}
