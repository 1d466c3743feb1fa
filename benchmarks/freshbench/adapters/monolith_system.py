"""Ours: rows without collisions, trained as examples come. Serving is a `Predictor`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from freshbench.adapters import Serving
from freshbench.adapters.deepfm import DENSE_RATE, DIM, ROW_RATE, DeepFMTop
from freshbench.examples import Examples, IdLists, Ids, Schema
from monolith import EmbeddingBagCollection, EmbeddingTable, Feature, Head, Predictor, Ragged, RunConfig, Trainer, load
from monolith.features import Batch
from monolith.follow import Feed, Follower, Writer
from monolith.follow.calls import FollowCalls
from monolith.nn import dense_state_dict
from monolith.serve import export_model
from monolith.serve.follow import set_followed_weights
from monolith.table import Adagrad, RandomUniform, Segment, Store, Zeros
from monolith.transport.calls import Answer, BasicCall, FrameCalls
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig

HEAD = Head(name="click", label="label", metrics=("auc",))
SYNC_SECS = 120.0
"""A sync over the feed that takes longer is an error."""


def features_of(schema: Schema) -> list[Feature]:
    """Return an embedding and a first-order weight for each id of each column."""
    return [
        Feature(
            name=name,
            dim=DIM,
            bias=Segment(dim=1, initializer=Zeros(), optimizer=Adagrad(learning_rate=ROW_RATE)),
            stack="ids",
            pooling="mean" if name in schema.lists else "sum",
            initializer=RandomUniform(low=-0.05, high=0.05),
            optimizer=Adagrad(learning_rate=ROW_RATE),
        )
        for name in schema.columns
    ]


class DeepFM(nn.Module):
    """DeepFM over all columns of ids and numbers of a schema."""

    heads = (HEAD,)

    def __init__(self, schema: Schema, seed: int, store: Store | None = None) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(features_of(schema), store, seed=seed)
        self.top = DeepFMTop(len(schema.columns), schema.numbers, seed)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        logits: Tensor = self.top(rows["ids"], rows["ids.bias"].flatten(1), batch["numbers"])
        return logits


def batch_of(examples: Examples) -> Batch:
    """Return `examples` as a batch. Those without labels have no column `label`."""
    batch: Batch = {name: _column(ids) for name, ids in examples.ids.items()}
    batch["numbers"] = torch.from_numpy(examples.numbers)
    if len(examples.labels):
        batch["label"] = torch.from_numpy(examples.labels)
    return batch


def _column(ids: Ids) -> Tensor | Ragged:
    return Ragged(ids.values, ids.offsets) if isinstance(ids, IdLists) else torch.from_numpy(ids)


class MonolithSystem:
    """A sync copies all rows and dense weights."""

    def __init__(self, schema: Schema, seed: int, store: Store | None = None) -> None:
        self.model = DeepFM(schema, seed, store)
        adam = torch.optim.Adam(self.model.parameters(), lr=DENSE_RATE)
        self.trainer = Trainer(self.model, adam, config=RunConfig(seed=seed, clip_norm=None))
        self._example: Batch | None = None
        self._exports: tempfile.TemporaryDirectory[str] | None = None
        self._export: Path | None = None

    def fit(self, examples: Examples) -> None:
        self._example = batch_of(examples)
        self.trainer.train_step(self._example)

    def serving(self) -> Serving:
        return CopiedServing(self)

    def tables(self) -> dict[str, EmbeddingTable]:
        """The tables by name. Their rows are in this process."""
        return {name: shards[0] for name, shards in self.trainer.tables().items()}

    def scores(self, examples: Examples) -> np.ndarray:
        """Answer with the model itself."""
        with torch.no_grad():
            scores: np.ndarray = self.model(batch_of(examples)).numpy()
        return scores

    def exported(self) -> Predictor:
        """Export the model, if that was not done before, and load the export."""
        if self._example is None:
            raise ValueError("a model can be exported once it has been trained")
        if self._export is None:
            self._exports = tempfile.TemporaryDirectory()
            self._export = export_model(self.model, self._example, self._exports.name, heads=[HEAD])
        return load(self._export)

    def close(self) -> None:
        if self._exports is not None:
            self._exports.cleanup()


class CopiedServing:
    """A predictor that a sync makes equal to the model, by a plain copy of everything."""

    def __init__(self, system: MonolithSystem) -> None:
        self._system = system
        self._predictor: Predictor | None = None

    def sync(self) -> None:
        if self._predictor is None:
            self._predictor = self._system.exported()
        copies = served_tables(self._predictor)
        for name, table in self._system.tables().items():
            for rows in table.iter_batches():
                copies[name].assign(rows.ids, rows.values)
            if len(copies[name]) > len(table):
                ids = copies[name].entries().ids
                copies[name].erase(ids[~table.contains(ids).bool()])
        self._predictor.set_weights(dense_state_dict(self._system.model), ignore_unknown=True)

    def predict(self, examples: Examples) -> np.ndarray:
        return predicted(self._predictor, examples)


def served_tables(predictor: Predictor) -> Mapping[str, EmbeddingTable]:
    """The tables of a model with one collection."""
    (store,) = predictor.stores.values()
    return store.tables


def predicted(predictor: Predictor | None, examples: Examples) -> np.ndarray:
    """Return the probability of label 1 for each example."""
    if predictor is None:
        raise ValueError("predict: nothing was synced yet")
    return predictor.predict(batch_of(examples))[HEAD.name].numpy()


class FollowedSystem(MonolithSystem):
    """A sync publishes the rows that have changed, over the same feed and follower as between a run and `monolith serve`."""

    copies = 1  # a feed is published to all that follow it, at the same moments

    def __init__(self, schema: Schema, seed: int) -> None:
        super().__init__(schema, seed)
        self.feed = Feed(self.tables, every=3600.0, dense_every=3600.0)
        self._server = FrameServer(ListenConfig(port=0), _FeedCalls(self.feed))
        self._serving: FollowedServing | None = None

    @property
    def address(self) -> str:
        """Where followers ask."""
        return self._server.address

    def serving(self) -> Serving:
        if self._serving is not None:
            raise ValueError("a followed system has one serving copy")
        self._serving = FollowedServing(self)
        return self._serving

    def close(self) -> None:
        self._server.ask_to_stop()
        self.feed.close()
        if self._serving is not None:
            self._serving.close()
        self._server.close(grace=5.0)
        super().close()


class _FeedCalls(FrameCalls):
    def __init__(self, feed: Feed) -> None:
        super().__init__(max_frame_bytes=2**28)
        self._handlers |= FollowCalls(feed).calls()
        self._handlers[BasicCall.HEALTH] = lambda frame: Answer()


class FollowedServing:
    """A predictor that follows the feed of a system. The feed publishes when `sync` is called."""

    def __init__(self, system: FollowedSystem) -> None:
        self._system = system
        self._predictor: Predictor | None = None
        self._follower: Follower | None = None

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        """What the follower keeps up to date."""
        assert self._predictor is not None
        return {name: [table] for name, table in served_tables(self._predictor).items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Called by the follower."""
        assert self._predictor is not None
        set_followed_weights(self._predictor, weights)

    def sync(self) -> None:
        feed = self._system.feed
        if self._follower is None:
            self._predictor = self._system.exported()
            writer = Writer(name="run", connect=lambda: Link(self._system.address, timeout=5.0, max_streams=1))
            self._follower = Follower([writer], self, wait=0.05)
            if not self._follower.wait_until_read(SYNC_SECS):
                raise TimeoutError(f"the follower has not read the rows after {SYNC_SECS:g} s")
        weights = dense_state_dict(self._system.model)
        feed.publish_dense({name: value.detach().numpy().copy() for name, value in weights.items()})
        # The follower says with its next question that it has the weights, and those come after the rows.
        if not feed.flush(SYNC_SECS):
            raise TimeoutError(f"the follower has not taken the changes after {SYNC_SECS:g} s")
        deadline = time.monotonic() + SYNC_SECS
        while self._follower.progress["run"].sequence < feed.newest:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the follower has not taken the changes after {SYNC_SECS:g} s")
            time.sleep(0.001)

    def predict(self, examples: Examples) -> np.ndarray:
        return predicted(self._predictor, examples)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
