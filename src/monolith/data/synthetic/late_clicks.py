"""Delayed feedback: an impression is a row at once, its click another row when it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from monolith.data.synthetic.clicks import ClickStream
from monolith.data.transforms.rows import concat_rows, select_rows
from monolith.features import Batch

__all__ = ["LateClicks"]


class LateClicks:
    """A `ClickStream` that does not wait: every impression comes with label 0, its click later as a row with label 1.

    A batch has the stream's impressions followed by the clicks that arrived since the batch before, oldest first, so its
    number of rows varies. Rows of clicks have the click's time in `event_time`. This is the original's "fast emit": each
    positive has been seen as a negative before, which the logit correction of the loss takes into account. Clicks that
    arrive after a stream's last batch are never seen.

    Example:
        >>> from monolith.data.synthetic import ClickStreamConfig
        >>> config = ClickStreamConfig(batch_size=1000, impressions_per_second=10, batches=3)
        >>> [(len(batch["label"]), int(batch["label"].sum())) for batch in LateClicks(ClickStream(config))]
        [(1051, 51), (1080, 80), (1090, 90)]
    """

    def __init__(self, stream: ClickStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Batch]:
        waiting: Batch | None = None
        for past in self._stream.recent(self._stream.config.click_window):
            _, waiting = self._deliver(past, waiting)
        for batch in self._stream:
            clicks, waiting = self._deliver(batch, waiting)
            impressions = {**batch, "label": torch.zeros_like(_tensor(batch, "label"))}
            yield concat_rows([impressions, {**clicks, "event_time": clicks["click_time"]}])

    def _deliver(self, batch: Batch, waiting: Batch | None) -> tuple[Batch, Batch]:
        """The clicks that arrive before the stream's next impression, and those that do not."""
        clicked = select_rows(batch, _tensor(batch, "label") > 0)
        clicks = clicked if waiting is None else concat_rows([waiting, clicked])
        time = _tensor(clicks, "click_time")
        clicks = select_rows(clicks, torch.argsort(time, stable=True))
        arrived = _tensor(clicks, "click_time") <= _tensor(batch, "event_time")[-1]
        return select_rows(clicks, arrived), select_rows(clicks, ~arrived)

    def shard(self, index: int, count: int) -> LateClicks:
        """The part of worker `index` of `count`; a click goes to the worker that had the impression."""
        return LateClicks(self._stream.shard(index, count))

    def state_dict(self) -> dict[str, Any]:
        """The stream's position; clicks under way are found again by looking back one click window."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._stream.load_state_dict(state)


def _tensor(batch: Batch, name: str) -> torch.Tensor:
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column
