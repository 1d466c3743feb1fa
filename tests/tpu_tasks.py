"""Tasks of the original's older interface, which tests of `TPURunner` name as `tpu_tasks.Clicks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from monolith.data import TFRecordWriter
from monolith.features import Batch
from monolith.original.embedding_task import BaseEmbeddingTask
from monolith.original.feature_columns import EmbeddingTaskParams, FeatureColumn3D, FeatureColumnV1, FeatureSlot
from monolith.original.tasks import BaseTask, InputParams, TaskParams, TrainParams
from monolith.proto import tf_example_pb2
from monolith.train.estimator import Mode
from training import ClickModel, batch_of


class Clicks(BaseTask):
    """The click model on ten batches of 8 rows and a short one of 5."""

    shapes: set[int] = set()
    """Rows of the batches that models of this task have seen."""

    @classmethod
    def params(cls) -> TaskParams:
        return TaskParams(
            task=cls,
            input=InputParams(eval_examples=17),
            train=TrainParams(max_steps=100, per_replica_batch_size=8),
        )

    def create_input_fn(self, mode: Mode) -> Callable[[int], Iterable[Batch]]:
        first = 0 if mode == "train" else 100
        return lambda size: [*(batch_of(first + n, rows=min(size, 8)) for n in range(10)), batch_of(first + 10, rows=5)]

    def create_model_fn(self) -> Callable[[], nn.Module]:
        return self._model

    def _model(self) -> nn.Module:
        model = ClickModel()
        model.mlp.register_forward_hook(lambda module, given, out: self.shapes.add(len(out)))
        return model


class Ranking(BaseEmbeddingTask):
    """Two columns of one slot, and a sequence, with a small net."""

    def create_layers(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3 * 4, 4), nn.ReLU(), nn.Linear(4, 1))

    def logits_fn(self) -> Tensor:
        item, user = FeatureSlot(self.env, 1, has_bias=True), FeatureSlot(self.env, 2)
        vector, other = item.add_feature_slice(4), user.add_feature_slice(4)
        shown, seen = FeatureColumnV1(item, "item"), FeatureColumn3D(item, 3, "seen")
        who = FeatureColumnV1(user, "user")
        mask = seen.size_tensor_lookup().unsqueeze(2)
        history = (seen.embedding_lookup(vector) * mask).sum(dim=1)
        joined = torch.cat([shown.embedding_lookup(vector), history, who.embedding_lookup(other)], dim=1)
        if self.host_call is not None:
            self.host_call.record_summary_tensor("history_max", history.abs().amax(dim=1))
        logits: Tensor = self.layers(joined) + shown.get_bias()
        return logits


def ranking_params(folder: Path, *, days: Sequence[str] = ("20220901",), **changes: object) -> EmbeddingTaskParams:
    """Parameters of `Ranking` over files in `folder`, which are written: 20 rows for each day."""
    (folder / "vocab.tsv").write_text("slot\tcount\n1\t50\n2\t1000\n")
    for day in days:
        (folder / "data" / day / "00").mkdir(parents=True)
        with TFRecordWriter(str(folder / "data" / day / "00" / "part-0")) as writer:
            for row in range(20):
                writer.write(example(row))
    train = TrainParams(file_folder=str(folder / "data"), per_replica_batch_size=8, max_steps=1000)
    params = Ranking.params().model_copy(update={"vocab_file_path": str(folder / "vocab.tsv"), "train": train})
    return params.model_copy(update=changes)


def example(row: int) -> tf_example_pb2.Example:
    """Row `row` of a day."""
    made = tf_example_pb2.Example()
    for name, values in (("item_0", [row % 7]), ("seen_0", list(range(row % 5))), ("user_0", [row]), ("uid", [row])):
        made.features.feature[name].int64_list.value.extend(values)
    made.features.feature["label"].float_list.value.append(row % 2)
    return made
