"""Labels that follow from another column: the head a row belongs to, a value, a rank."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from monolith.config import Config, Finite
from monolith.data.sources.record_file import INVALID_LABEL
from monolith.data.transforms.columns import label_matrix, labels_shape, labels_up_to, numbers_of
from monolith.data.transforms.sampling import leading_action
from monolith.data.transforms.text import texts_of
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = ["FillMultiRankOutput", "MultiLabelGen", "UseFieldAsLabel"]


class MultiLabelGen(Config):
    """One label per task, [rows, tasks], valid only at the place of the row's head; everything else is INVALID_LABEL.

    The label is the row's first one if `use_origin_label`. Otherwise its action decides, the first in `action_priority` or
    else its first: `pos_label`, `neg_label`, or INVALID_LABEL for an action in neither list and a row without actions.

    Example:
        >>> generate = MultiLabelGen(head_to_index={7: 0, 8: 1}, pos_actions=(1,), neg_actions=(2,))
        >>> out = generate({"chnid": torch.tensor([8, 7]), "actions": Ragged.from_lists([[1], [2]])})["label"]
        >>> (out > -1).tolist(), out[0, 1].item(), out[1, 0].item()
        ([[False, True], [True, False]], 1.0, 0.0)
    """

    head_to_index: Annotated[dict[int | str, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Value of `head_field` to place; a value not listed has no label. Integers, or text for a column of text."""
    head_field: str = "chnid"
    """The column that says which head a row belongs to: one number per row, or `Ragged` of uint8 with a text in each row."""
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
    """Actions, the most prior one first."""
    task_num: Annotated[int, Field(ge=1)] | None = None
    """Number of labels; None: one more than the greatest place."""
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
            raise ValueError(f"task_num: {self.task_num} tasks have no place {max(self.head_to_index.values())}")
        return self

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
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
    """Every label below the value of another column is raised to it: max(label, value).

    With `overwrite_invalid_value`, a value of `label_threshold` or more is not believed and counts as 0.

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
    """The least value that is not believed."""
    label: str = "label"
    """The column of labels."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
        values = numbers_of(batch, self.field).float()
        if self.overwrite_invalid_value:
            values = torch.where(values >= self.label_threshold, 0.0, values)
        labels = torch.maximum(label_matrix(batch, self.label), values.unsqueeze(1))
        return {**batch, self.label: labels.reshape(labels_shape(batch, self.label))}


class FillMultiRankOutput(Config):
    """Appends a rank to the labels of each row: [rows, labels + 1].

    By "is_draw" 1 where it is true, else 0; by "chnid" channels 0 and 1 themselves, 2 for all others; by "rank" the rank, at
    most `rank_num` - 1.

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
    """The column of labels; a batch without one gets one."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
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
