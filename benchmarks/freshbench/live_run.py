"""The run of the part `live`: trains the batch part once, then what comes on a stream. Started by `live.py` as a process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from freshbench.adapters.deepfm import DENSE_RATE
from freshbench.adapters.monolith_system import HEAD, DeepFM, batch_of, features_of
from freshbench.datasets import Source
from freshbench.examples import Schema
from freshbench.simulation import BATCH_SHARE
from monolith import EmbeddingBagCollection, Estimator, Feature, RunConfig, set_num_threads
from monolith.data import Column, StreamSource
from monolith.features import Batch
from monolith.table import Zeros

PROBE = "moment"
"""A column that nothing depends on. A new id in it has a row from the moment on when its example was trained."""
IDLE_SECS = 20.0
"""The run ends when nothing came for so long: a benchmark that was killed leaves nothing behind."""


class ProbedDeepFM(DeepFM):
    """The model of the other parts, and the probe."""

    def __init__(self, schema: Schema, seed: int) -> None:
        super().__init__(schema, seed)
        self._numbers = schema.numbers
        probe = Feature(name=PROBE, dim=1, initializer=Zeros())
        self.embeddings = EmbeddingBagCollection([*features_of(schema), probe], seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        vectors = rows["ids"]
        # A stream has no columns without values.
        numbers = batch["numbers"] if self._numbers else vectors.flatten(1)[:, :0]
        logits: Tensor = self.top(vectors, rows["ids.bias"].flatten(1), numbers)
        moment: Tensor = rows[PROBE].squeeze(1)
        return logits + 0.0 * moment


def columns(schema: Schema) -> list[Column]:
    """Return the columns of a record of the stream."""
    single = [Column(name=name, shape=()) for name in (*schema.single, PROBE)]
    lists = [Column(name=name) for name in schema.lists]
    numbers = [Column(name="numbers", dtype="float32", shape=(schema.numbers,))] if schema.numbers else []
    return [*single, *lists, *numbers, Column(name="label", dtype="float32", shape=())]


def main() -> None:
    """Train and export the batch part (without --stream), or continue with a stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stream")
    parser.add_argument("--feed-secs", type=float, default=0.1)
    source, options = Source.of(parser, sys.argv[1:])
    torch.set_num_threads(1)
    set_num_threads(1)
    data = source(options.seed)
    model = ProbedDeepFM(data.schema, options.seed)
    config = RunConfig(
        model_dir=options.model_dir,
        seed=options.seed,
        clip_norm=None,
        resume_data=False,  # the batch part and the stream are two sources
        feed_secs=options.feed_secs,
        feed_dense_secs=options.feed_secs,
        save_checkpoints_secs=0 if options.stream is None else 3600,
        threads=1,
    )
    estimator = Estimator(model, config, optimizer=torch.optim.Adam(model.parameters(), lr=DENSE_RATE), heads=[HEAD])
    if options.stream is None:
        first = round(len(data.examples) * BATCH_SHARE)
        history = [_probed(batch_of(one)) for one in data.examples.between(0, first).batches(data.batch_size)]
        estimator.train(history)
        estimator.export_saved_model(example=history[0])
    else:
        stream = StreamSource(
            options.stream,
            columns(data.schema),
            batch_size=data.batch_size,
            max_wait_secs=0.05,
            stop_when_idle_secs=IDLE_SECS,
        )
        estimator.train(stream)


def _probed(batch: Batch) -> Batch:
    label = batch["label"]
    assert isinstance(label, Tensor)
    return {**batch, PROBE: torch.zeros(len(label), dtype=torch.int64)}


if __name__ == "__main__":
    main()
