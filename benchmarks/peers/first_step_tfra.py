"""DeepFM with TensorFlow Recommenders Addons: its Keras layers and optimizer."""

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # it is written for Keras 2

import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

IDS, NUMBERS = ["user", "item", "category", "city"], ["age", "price"]
DIM, BATCH, LEARNING_RATE = 16, 512, 0.02


class DeepFM(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = [de.keras.layers.Embedding(DIM, name=f"{name}_vector") for name in IDS]
        self.first_order = [de.keras.layers.Embedding(1, name=f"{name}_first_order") for name in IDS]
        self.linear = tf.keras.layers.Dense(1)
        self.mlp = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(32, activation="relu"),
                tf.keras.layers.Dense(1),
            ]
        )

    def call(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        vectors = tf.stack([embedding(batch[name]) for embedding, name in zip(self.vectors, IDS, strict=True)], axis=1)
        first_order = sum(embedding(batch[name]) for embedding, name in zip(self.first_order, IDS, strict=True))
        numbers = tf.stack([batch[name] for name in NUMBERS], axis=1)
        pairs = tf.square(tf.reduce_sum(vectors, 1)) - tf.reduce_sum(tf.square(vectors), 1)
        fm = 0.5 * tf.reduce_sum(pairs, axis=1, keepdims=True)
        deep = self.mlp(tf.concat([tf.reshape(vectors, [-1, len(IDS) * DIM]), numbers], axis=1))
        return first_order + self.linear(numbers) + fm + deep


types = dict.fromkeys(IDS, tf.int64) | dict.fromkeys([*NUMBERS, "label"], tf.float32)
data = tf.data.experimental.make_csv_dataset(
    sys.argv[1],
    BATCH,
    column_defaults=list(types.values()),
    select_columns=list(types),
    label_name="label",
    num_epochs=1,
    shuffle=False,
)
model = DeepFM()
adagrad = tf.keras.optimizers.Adagrad(LEARNING_RATE, initial_accumulator_value=0.1)
loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")
model.compile(de.DynamicEmbeddingOptimizer(adagrad), loss_of)
for step, (batch, label) in enumerate(data, 1):
    loss = model.train_on_batch(batch, label)
    print(f"step {step} loss {loss / BATCH:.4f}")
