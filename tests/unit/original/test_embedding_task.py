"""Danger: an id that reads the row of another one: beyond its vocabulary, negative, or split into quotient and remainder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.features import Batch, Ragged
from monolith.original.embedding_task import BaseEmbeddingTask, read_vocab_sizes
from monolith.original.feature_columns import EmbeddingTaskParams, FeatureColumn3D, FeatureColumnV1, FeatureSlot
from monolith.original.tasks import EvalParams, TrainParams
from monolith.original.tpu_runner import TPUFlags, TPURunner
from monolith.table import SGD, Adagrad, Ftrl, Ones, Segment
from monolith.table.initializers import RandomUniform, Zeros
from monolith.train import Estimator, RunConfig, Trainer
from tpu_tasks import Ranking, ranking_params


def with_vocab(folder: Path, text: str = "slot\tsize\n1\t10\n2\t20\n", **changes: Any) -> EmbeddingTaskParams:  # noqa: ANN401
    (folder / "vocab.tsv").write_text(text)
    return BaseEmbeddingTask.params().model_copy(update={"vocab_file_path": str(folder / "vocab.tsv"), **changes})


class Sum(BaseEmbeddingTask):
    """The sum of a slice of two numbers, which starts at 1 and falls by the gradient."""

    def logits_fn(self) -> Tensor:
        slot = FeatureSlot(self.env, 1)
        part = slot.add_feature_slice(2, optimizer=SGD(learning_rate=1.0), initializer=Ones())
        return FeatureColumnV1(slot, "item").embedding_lookup(part).sum(dim=1)


def model_of(task: BaseEmbeddingTask) -> Any:  # noqa: ANN401 - a model with embeddings
    return task.create_model_fn()()


def step(model: Any, ids: Tensor | Ragged) -> list[float]:  # noqa: ANN401
    """Make a step that takes 1 from every number of the ids, and return the logits after it."""
    batch: Batch = {"item_0": ids}
    model.train()
    model(batch).sum().backward()
    model.embeddings.step()
    model.eval()
    return [logit.item() for logit in model(batch)]


def test_vocabulary_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    assert read_vocab_sizes(with_vocab(tmp_path)) == {1: 10, 2: 20}
    assert read_vocab_sizes(with_vocab(tmp_path, vocab_size_per_slot=7)) == {1: 7, 2: 7}
    assert read_vocab_sizes(with_vocab(tmp_path, custom_vocab_size_mapping={2: 5})) == {1: 10, 2: 5}
    assert read_vocab_sizes(with_vocab(tmp_path, custom_vocab_size_mapping={2: 5}, vocab_size_offset=3)) == {
        1: 13,
        2: 8,
    }


def test_a_file_that_cannot_be_read_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"vocab.tsv:2: expected slot and size with a tab"):
        read_vocab_sizes(with_vocab(tmp_path, "1\t10\n2 20\n"))
    with pytest.raises(CorruptFileError, match=r"vocab.tsv:1: expected a vocabulary size, got 'many'"):
        read_vocab_sizes(with_vocab(tmp_path, "1\tmany\n"))
    with pytest.raises(ConfigError, match="vocab_file_path: there is no file"):
        read_vocab_sizes(BaseEmbeddingTask.params())


def test_the_file_of_the_last_day_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainParams(end_date="20220902", vocab_file_folder_prefix=f"{tmp_path}/day-")
    params = with_vocab(tmp_path, train=train)
    assert read_vocab_sizes(params)[1] == 10
    assert "has 0 files part*.csv, expected one; vocab_file_path is used instead" in caplog.text
    (tmp_path / "day-20220902").mkdir()
    (tmp_path / "day-20220902" / "part-0.csv").write_text("1\t99\n")
    assert read_vocab_sizes(params) == {1: 99}


def test_ids_below_zero_are_zero_and_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = model_of(Sum(with_vocab(tmp_path)))
    assert step(model, torch.tensor([-5, 3])) == [0.0, 0.0]
    assert [logit.item() for logit in model({"item_0": torch.tensor([0, 1])})] == [0.0, 2.0]
    with pytest.raises(
        InvalidArgumentError, match=r"item_0: id 10 is not in the vocabulary of slot 1, whose size is 10"
    ):
        model({"item_0": Ragged.from_lists([[1], [10, 2]])})


@pytest.mark.parametrize("settings", [{"vocab_size_per_slot": 4}, {"custom_vocab_size_mapping": {1: 4}}])
def test_ids_of_an_overridden_vocabulary_are_taken_modulo_its_size(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = model_of(Sum(with_vocab(tmp_path, **settings)))
    step(model, torch.tensor([1]))
    assert [logit.item() for logit in model({"item_0": torch.tensor([5, 9, 2, 6])})] == [0.0, 0.0, 2.0, 2.0]


def test_large_vocabularies_are_sums_of_a_remainder_and_a_quotient(tmp_path: Path) -> None:
    settings = {"qr_multi_hashing": True, "qr_hashing_threshold": 99, "qr_collision_rate": 4}
    task = Sum(with_vocab(tmp_path, "1\t100\n", **settings))
    model = model_of(task)
    features, tables = task.create_feature_and_table_config_dict()
    assert sorted(features) == ["item_0_0", "item_0_1"]
    # The whole vocabulary has no table: that is what the two are for.
    assert sorted(tables) == ["table_1_0_0", "table_1_0_1"]
    # R = 100 // 4 + 1 = 26: 30 has remainder 4 and quotient 1.
    assert task.env.remainders(1) == 26
    assert step(model, torch.tensor([30])) == [0.0]
    found = [logit.item() for logit in model({"item_0": torch.tensor([30, 4, 27, 5, 56])})]
    # The same remainder, the same quotient, neither, the remainder.
    assert found == [0.0, 2.0, 2.0, 4.0, 2.0]
    assert {name: sorted(table.entries().ids.tolist()) for name, table in model.embeddings.store.tables.items()} == {
        "table_1_0_0": [4],
        "table_1_0_1": [1],
    }


def test_small_vocabularies_stay_whole(tmp_path: Path) -> None:
    task = Sum(with_vocab(tmp_path, "1\t100\n", qr_multi_hashing=True, qr_hashing_threshold=100))
    assert sorted(task.create_feature_and_table_config_dict()[1]) == ["table_1_0"]


class Slices(BaseEmbeddingTask):
    """A bias and two slices of one slot, read by two columns."""

    def logits_fn(self) -> Tensor:
        slot = FeatureSlot(self.env, 1, has_bias=True)
        self.slot = slot
        one = slot.add_feature_slice(1, optimizer=SGD(learning_rate=1.0), initializer=Ones())
        two = slot.add_feature_slice(2)
        left, right = FeatureColumnV1(slot, "left"), FeatureColumnV1(slot, "right")
        self.parts = [column.embedding_lookup(part) for column in (left, right) for part in (one, two)]
        return left.get_bias() + right.get_bias() + sum(part.sum(dim=1, keepdim=True) for part in self.parts)


def test_slots_have_the_defaults_of_the_original(tmp_path: Path) -> None:
    task = Slices(with_vocab(tmp_path))
    model_of(task)
    bias, _, vector = task.slot.feature_slices
    assert bias.segment == Segment(dim=1, initializer=Zeros(), optimizer=Ftrl(learning_rate=0.01))
    assert vector.segment == Segment(
        dim=2, initializer=RandomUniform(low=-0.001, high=0.001), optimizer=Adagrad(learning_rate=0.01)
    )
    assert repr(vector) == "[FeatureSlice][slot_1][2]"


@pytest.mark.parametrize("merge", [False, True])
def test_columns_of_one_slot_share_rows_and_slices_keep_their_optimizers(tmp_path: Path, merge: bool) -> None:
    task = Slices(with_vocab(tmp_path, merge_vector=merge))
    features, tables = task.create_feature_and_table_config_dict()
    own = ["table_1_0", "table_1_1"] if merge else ["table_1_0", "table_1_1", "table_1_2"]
    assert sorted(tables) == own
    assert len(features) == 2 * len(own)
    if merge:
        assert [segment.dim for segment in tables["table_1_1"]] == [1, 2]
    model = model_of(task)
    batch: Batch = {"left_0": torch.tensor([3]), "right_0": torch.tensor([3])}
    model.train()
    model(batch).sum().backward()
    model.embeddings.step()
    model.eval()
    model(batch)
    left_one, left_two, right_one, right_two = task.parts
    # Two gradients of 1 for the same id, and a step of SGD with their sum.
    assert left_one.tolist() == right_one.tolist() == [[-1.0]]
    assert torch.equal(left_two, right_two)
    assert left_two.abs().max() > 0.01


class Sequence(BaseEmbeddingTask):
    """A column that keeps the order of its ids."""

    def logits_fn(self) -> Tensor:
        slot = FeatureSlot(self.env, 1, has_bias=True)
        part = slot.add_feature_slice(2, initializer=Ones())
        column = FeatureColumn3D(slot, 3, "seen")
        self.vectors, self.sizes, self.bias = (
            column.embedding_lookup(part),
            column.size_tensor_lookup(),
            column.get_bias(),
        )
        return self.vectors.sum(dim=(1, 2))


@pytest.mark.parametrize("qr", [False, True])
def test_a_sequence_keeps_its_first_ids_in_order(tmp_path: Path, qr: bool) -> None:
    task = Sequence(with_vocab(tmp_path, qr_multi_hashing=qr, qr_hashing_threshold=5))
    model_of(task)({"seen_0": Ragged.from_lists([[1, 2], [], [3, 4, 5, 6]])})
    one = 2.0 if qr else 1.0
    assert task.vectors[..., 0].tolist() == [[one, one, 0.0], [0.0, 0.0, 0.0], [one, one, one]]
    assert task.sizes.dtype == torch.int32
    assert task.sizes.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert list(task.bias.shape) == [3, 3, 1]


class Unseen(BaseEmbeddingTask):
    """Random vectors for ids without a row."""

    def logits_fn(self) -> Tensor:
        slot = FeatureSlot(self.env, 1)
        part = slot.add_feature_slice(2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
        self.vectors = FeatureColumnV1(slot, "item").embedding_lookup(part, 0.25, 0.5)
        return self.vectors.sum(dim=1)


def test_vectors_of_zeros_may_be_replaced_by_random_ones(tmp_path: Path) -> None:
    task = Unseen(with_vocab(tmp_path, use_random_init_embedding_for_oov=True))
    model = model_of(task)
    model({"item_0": torch.tensor([1, 2])})
    assert 0.25 <= task.vectors.min().item() <= task.vectors.max().item() <= 0.5
    task = Unseen(with_vocab(tmp_path))
    model_of(task)({"item_0": torch.tensor([1, 2])})
    assert task.vectors.tolist() == [[0, 0], [0, 0]]


def test_mistakes_are_named(tmp_path: Path) -> None:
    task = Sum(with_vocab(tmp_path))
    slot, other = FeatureSlot(task.env, 1), FeatureSlot(task.env, 2)
    with pytest.raises(ConfigError, match="slot 1: there is one with this number"):
        FeatureSlot(task.env, 1)
    with pytest.raises(ConfigError, match="slot 3: the file of vocabulary sizes does not have it; it has 1, 2"):
        FeatureSlot(task.env, 3)
    column = FeatureColumnV1(slot, "item")
    with pytest.raises(ConfigError, match=r"item: \[FeatureSlice\]\[slot_2\]\[0\] is not a slice of slot 1"):
        column.embedding_lookup(other.add_feature_slice(2))
    with pytest.raises(InvalidArgumentError, match="item: slot 1 has no bias"):
        column.get_bias()
    with pytest.raises(ConfigError, match="none is of a day from 20230101 to 99999999"):
        BaseEmbeddingTask._training_files(
            Ranking(
                ranking_params(tmp_path, train=TrainParams(file_folder=str(tmp_path / "data"), start_date="20230101"))
            )
        )


def test_a_lookup_that_the_first_call_did_not_make_is_refused(tmp_path: Path) -> None:
    class Changing(Sum):
        def logits_fn(self) -> Tensor:
            slot = FeatureSlot(self.env, 1)
            part = slot.add_feature_slice(2)
            name = "other" if self.env.is_finalized else "item"
            return FeatureColumnV1(slot, name).embedding_lookup(part).sum(dim=1)

    with pytest.raises(ConfigError, match="other_0: the first call of logits_fn did not look it up"):
        model_of(Changing(with_vocab(tmp_path)))({"item_0": torch.tensor([1])})


def test_the_gradients_of_embeddings_are_multiplied(tmp_path: Path) -> None:
    task = Sum(with_vocab(tmp_path, gradient_multiplier=0.25))
    model = model_of(task)
    trainer = Trainer(model, hooks=task.hooks(model_dir=None, every_n_steps=0), config=RunConfig(clip_norm=None))
    trainer.heads = (trainer.heads[0].model_copy(update={"kind": "regression"}),)
    trainer.fit([{"item_0": torch.tensor([1]), "label": torch.tensor([1.5])}])
    # (2 - 1.5)^2 has gradient 1 for each of the two numbers.
    assert [logit.item() for logit in model({"item_0": torch.tensor([1])})] == [2 - 2 * 0.25]


def test_a_task_trains_and_evaluates_from_files(tmp_path: Path) -> None:
    params = ranking_params(tmp_path, eval=EvalParams(file_pattern=str(tmp_path / "data/*/*/part*")))
    folder = str(tmp_path / "model")
    repeated = params.model_copy(update={"train": params.train.model_copy(update={"repeat": True, "max_steps": 30})})
    flags = TPUFlags(model_dir=folder, host_call_every_n_steps=0)
    assert TPURunner(repeated, flags).run() == 30
    assert TPURunner(repeated, flags.model_copy(update={"mode": "eval"})).run() == 30
    with pytest.raises(ConfigError, match=r"eval.file_pattern: there are no files"):
        TPURunner(repeated.model_copy(update={"eval": EvalParams()}), flags.model_copy(update={"mode": "eval"})).run()


def test_a_trained_task_has_learned_something(tmp_path: Path) -> None:
    task = Ranking(ranking_params(tmp_path))
    estimator = Estimator(task.create_model_fn()(), RunConfig(epochs=40))
    batches = task.create_input_fn("train")
    before = estimator.evaluate(batches(8))["output/log_loss"]
    estimator.train(batches(8))
    assert estimator.evaluate(batches(8))["output/log_loss"] < before - 0.03
