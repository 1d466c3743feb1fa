"""A loop of which every effect can be counted: the model of its trainer, and its site, as a script.

Impression `i` is in partition `i % 2`. Every third one is clicked. The row of an impression becomes 1 when it was trained once, 2
when it was trained once as a click.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson
import torch
from torch import nn

from monolith import EmbeddingBagCollection, Feature
from monolith.data import Column, ParquetSource
from monolith.durable import write_durably
from monolith.features.batch import Batch
from monolith.nn import Head
from monolith.streams import Stream, StreamWriter, open_stream
from monolith.table import SGD, Zeros

__all__ = ["FILES", "PACE", "PARTITIONS", "CountedExamples", "end_event_time", "history", "is_clicked"]

PARTITIONS = 2
PACE = "pace"
"""While there is such a file, as many steps are made as it has bytes, and the next one hangs."""
COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=())]
# Event time is that of the site. Did it go on as the clock does while the site is away, what comes after would be too late.
FILES = {
    "join.yaml": """
impressions: {stream: impressions}
actions: {stream: actions}
window_secs: 2
lead_secs: 0
out_of_order_secs: 2
idle_secs: 3600
labels: [{name: label, actions: {click: 1.0}}]
emit: on_positive
output: {stream: examples}
state: {folder: join, checkpoint_secs: 0.5}
""",
    "job.yaml": """
model: loop_site:CountedExamples
input: loop_site:history
then: {stream: examples, batch_size: 64, max_wait_secs: 0.02}
then_from: start
run: {model_dir: run, clip_norm: null, threads: 1, log_flush_secs: 0.2, save_checkpoints_secs: 3}
""",
    "loop.yaml": """
name: counted
prepare:
  - run: monolith train job.yaml --set then=null
  - run: monolith export job.yaml
parts:
  joiner: {run: monolith join join.yaml}
  trainer: {run: monolith train job.yaml}
  replica: {run: "monolith serve --run run --name counted --http-port ${HTTP_PORT} --grpc-port 0"}
  site: {run: "python ${SITE}"}
""",
}


class CountedExamples(nn.Module):
    """Every example adds 1 to the row of its id, and 1 more if it is a click."""

    heads = (Head(name="count", label="label"),)

    def __init__(self) -> None:
        super().__init__()
        feature = Feature(name="id", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
        self.embeddings = EmbeddingBagCollection([feature])
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.paced_steps = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.rows = self.embeddings(batch)["id"].squeeze(1)
        if self.training:
            self._keep_pace()
        # The loss of the head must not change rows. A replica answers with them.
        return torch.zeros(len(self.rows)) if self.training else self.rows * self.scale

    def _keep_pace(self) -> None:
        with suppress(FileNotFoundError):
            while Path(PACE).stat().st_size <= self.paced_steps:
                time.sleep(0.01)
            self.paced_steps += 1

    def extra_loss(self, batch: Batch, logits: object) -> torch.Tensor:
        return -(self.rows * (1 + batch["label"])).sum()  # type: ignore[operator]


def history(mode: str) -> ParquetSource:
    """One example of an id that no impression has."""
    return ParquetSource("history.parquet", COLUMNS, batch_size=1)


def end_event_time(folder: Path) -> None:
    """Let a joiner that is started from here on close its windows although nothing comes any more."""
    path = folder / "join.yaml"
    path.write_text(path.read_text().replace("idle_secs: 3600", "idle_secs: 0.5"))


def is_clicked(number: int) -> bool:
    return number % 3 == 0


def next_numbers(stream: Stream) -> list[int]:
    """For each partition the number of the impression after the last that is stored."""
    stored = [stream.last(partition) for partition in stream.partitions()]
    return [n if last is None else int(last.keys[0] or 0) + PARTITIONS for n, last in enumerate(stored)]


def main(streams_in: str = "") -> None:
    """Write the impressions that are not stored yet, and their clicks, until the file `enough` is there. Then wait.

    How many there are is in the file `written` then. Streams are in the current folder, or on the broker with the URL
    `streams_in`.
    """
    begun = time_of_begin()
    streams = [open_stream(f"{streams_in}{name}") for name in ("impressions", "actions")]
    done, clicked = (next_numbers(stream) for stream in streams)
    impressions, actions = (stream.writer() for stream in streams)
    # Clicks of impressions that an earlier incarnation has written come first, before time goes on.
    for partition in range(PARTITIONS):
        for number in range(clicked[partition], done[partition], PARTITIONS):
            click(actions, number, begun)
    number = min(done)
    sys.stdout.write(f"continues with impression {number}\n")
    sys.stdout.flush()
    while number < max(done) or not Path("enough").exists():
        if number >= done[number % PARTITIONS]:
            impressions.append(
                orjson.dumps({"id": number}),
                key=b"%d" % number,
                partition=number % PARTITIONS,
                timestamp=begun + number,
            )
            impressions.flush()
            click(actions, number, begun)
            time.sleep(0.004)
        number += 1
    actions.flush()
    write_durably(Path("written"), b"%d" % number)
    while True:
        time.sleep(60)


def click(actions: StreamWriter, number: int, begun: int) -> None:
    if is_clicked(number):
        # When it happened, not when it could be written: a site that was away for long does not make clicks late.
        at = begun + number
        actions.append(b'{"action":"click"}', key=b"%d" % number, partition=number % PARTITIONS, timestamp=at)


def time_of_begin() -> int:
    """When the first incarnation began, milliseconds since 1970. Impressions happen a millisecond after each other."""
    file = Path("begun")
    if not file.exists():
        write_durably(file, b"%d" % (time.time() * 1000))
    return int(file.read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
