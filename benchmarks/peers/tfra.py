"""TensorFlow Recommenders Addons: the collisionless table of the TensorFlow world.

Its DynamicEmbeddingOptimizer was measured slower than the same step written with its table operations (0.42 against
0.56 M ids/s), so the table operations are what is timed: one lookup and one upsert each for weights and accumulators.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
import tensorflow_recommenders_addons as tfra
from tensorflow_recommenders_addons import dynamic_embedding

from workload import (
    BAGS,
    BATCH,
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    POOL,
    Batch,
    FloatArray,
    IdArray,
    id_gradient,
)

FILL = 8 * BATCH


class GrowingTfra:
    """Starts empty; an id unknown to `insert` gets its initial weights and state, takes a step, and is stored."""

    def __init__(self, dim: int, threads: int, room_for: int = 0) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self.versions = {"tensorflow": tf.__version__, "tensorflow-recommenders-addons": tfra.__version__}
        self.dim = dim
        self._room_for = room_for
        self.weights = self._table("weights", tf.random_uniform_initializer(-0.05, 0.05))
        self.accumulators = self._table("accumulators", INITIAL_ACCUMULATOR)
        self._gradient = tf.constant(id_gradient(dim))
        batch = [tf.TensorSpec([BATCH], tf.int64)]
        self.lookup = tf.function(self._lookup_pooled, input_signature=batch)
        self.step = tf.function(self._train_step, input_signature=batch)

    def _table(self, name: str, initializer: object) -> dynamic_embedding.Variable:
        return dynamic_embedding.get_variable(
            name,
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=self.dim,
            devices=["CPU:0"],
            initializer=initializer,
            init_size=self._room_for,
        )

    def _pool(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.reshape(rows, [BAGS, POOL, self.dim]), axis=1)

    def _lookup_pooled(self, ids: tf.Tensor) -> tf.Tensor:
        # Looking every id up once is 1.4x as fast on Zipf as looking all up, and equal on uniform ids.
        unique, inverse = tf.unique(ids)
        return self._pool(tf.gather(self.weights.lookup(unique), inverse))

    def _train_step(self, ids: tf.Tensor) -> tf.Tensor:
        unique, inverse = tf.unique(ids)
        weights = self.weights.lookup(unique)
        pooled = self._pool(tf.gather(weights, inverse))
        gradient = tf.math.unsorted_segment_sum(self._gradient, inverse, tf.shape(unique)[0])
        accumulated = self.accumulators.lookup(unique) + gradient * gradient
        weights -= LEARNING_RATE * gradient / (tf.sqrt(accumulated) + EPSILON)
        stored = [self.weights.upsert(unique, weights), self.accumulators.upsert(unique, accumulated)]
        with tf.control_dependencies(stored):
            return tf.identity(pooled)

    def prepare(self, ids: IdArray) -> tf.Tensor:
        return tf.constant(ids)

    def insert(self, prepared: tf.Tensor) -> None:
        self.step(prepared)

    def rows(self) -> int:
        return int(self.weights.size())

    def bytes(self) -> int | None:
        return None  # it does not say; the harness reads the resident memory of the process


class Tfra:
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        self._table = GrowingTfra(dim, threads, room_for=ids.size)
        self.versions = self._table.versions
        for first in range(0, ids.size, FILL):
            keys = tf.constant(ids[first : first + FILL])
            shape = [keys.shape[0], dim]
            self._table.weights.upsert(keys, tf.random.uniform(shape, -0.05, 0.05))
            self._table.accumulators.upsert(keys, tf.fill(shape, INITIAL_ACCUMULATOR))

    def prepare(self, batch: Batch) -> tf.Tensor:
        return tf.constant(batch.ids)

    def lookup(self, prepared: tf.Tensor) -> tf.Tensor:
        return self._table.lookup(prepared)

    def train_step(self, prepared: tf.Tensor) -> None:
        self._table.step(prepared)

    def read(self, batch: Batch) -> FloatArray:
        return self._table.weights.lookup(tf.constant(batch.ids)).numpy()
