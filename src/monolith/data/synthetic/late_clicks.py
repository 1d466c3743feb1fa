"""Delayed feedback: an impression is a row at once, its click another row when it arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from monolith.data.sources.source import Position
from monolith.data.synthetic.clicks import ClickStream
from monolith.data.synthetic.generated import GeneratedSource
from monolith.data.transforms.rows import concat_rows, select_rows
from monolith.features import Batch

__all__ = ["LateClicks"]


class LateClicks(GeneratedSource):
    """A `ClickStream` that does not wait: every impression comes with label 0, its click later as a row with label 1.

    A batch has the stream's impressions followed by the clicks that arrived since the batch before, oldest first, so its
    number of rows varies. Rows of clicks have the click's time in `event_time`. This is the original's "fast emit": each
    positive has been seen as a negative before, which the logit correction of the loss takes into account. Clicks that
    arrive after a stream's last batch are never seen. A click goes to the shard that had the impression.

    Example:
        >>> from monolith.data.synthetic import ClickStreamConfig
        >>> config = ClickStreamConfig(batch_size=1000, impressions_per_second=10, batches=3)
        >>> [(len(batch["label"]), int(batch["label"].sum())) for batch in LateClicks(ClickStream(config))]
        [(1051, 51), (1080, 80), (1090, 90)]
    """

    def __init__(self, stream: ClickStream) -> None:
        self._stream = stream
        super().__init__(stream.config, stream.config.batches)

    def batch(self, number: int) -> Batch:
        """The impressions of batch `number` with the clicks they will have."""
        return self._stream.batch(number)

    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        waiting: Batch | None = None
        turn = int(position["next"])
        # Clicks under way are no part of the position: one click window is made again.
        for past in range(max(turn - self._window(), 0), turn):
            _, waiting = self._deliver(self.batch(self._number(past)), waiting)
        for batch, behind in super()._read(position):
            clicks, waiting = self._deliver(batch, waiting)
            impressions = {**batch, "label": torch.zeros_like(_tensor(batch, "label"))}
            yield concat_rows([impressions, {**clicks, "event_time": clicks["click_time"]}]), behind

    def _window(self) -> int:
        """How many of this shard's batches a click may come later."""
        config = self._stream.config
        impressions = config.click_window * config.impressions_per_second
        return math.ceil(impressions / (config.batch_size * self._shard_count)) + 1

    def _deliver(self, batch: Batch, waiting: Batch | None) -> tuple[Batch, Batch]:
        """The clicks that arrive before the stream's next impression, and those that do not."""
        clicked = select_rows(batch, _tensor(batch, "label") > 0)
        clicks = clicked if waiting is None else concat_rows([waiting, clicked])
        time = _tensor(clicks, "click_time")
        clicks = select_rows(clicks, torch.argsort(time, stable=True))
        arrived = _tensor(clicks, "click_time") <= _tensor(batch, "event_time")[-1]
        return select_rows(clicks, arrived), select_rows(clicks, ~arrived)


def _tensor(batch: Batch, name: str) -> torch.Tensor:
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column
