"""Copies of a model. The danger: `torch.save(model.state_dict())` or a deep copy that silently has no rows, or shares them."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch

from monolith import EmbeddingBagCollection, Feature
from monolith.errors import InvalidArgumentError
from monolith.nn import dense_state_dict
from monolith.ps import ParameterServer, ServerStore
from monolith.train import ModelCheckpoints
from training import ClickModel, Stream, assert_same, batch_of, everything


def trained(steps: int = 3) -> ClickModel:
    model = ClickModel()
    for number in range(steps):
        step(model, number)
    return model


def step(model: ClickModel, number: int) -> None:
    outputs = model(batch_of(number))
    sum(output.sum() for output in outputs.values()).backward()  # type: ignore[union-attr]
    model.embeddings.step()
    model.zero_grad()


def test_state_dict_warns_once_and_names_the_way_to_save_rows() -> None:
    model = trained()
    with pytest.warns(UserWarning, match=r"rows of an EmbeddingBagCollection are in its tables.*ModelCheckpoints"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()


def test_nobody_is_warned_without_rows_or_where_rows_are_saved_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClickModel().state_dict()
        model = trained()
        assert "embeddings.steps" in dense_state_dict(model)
        ModelCheckpoints(str(tmp_path), model, torch.optim.SGD(model.mlp.parameters()), source=Stream(3)).save(3)


def test_a_deep_copy_has_rows_of_its_own_and_trains_to_the_same_bits() -> None:
    model = trained()
    twin = copy.deepcopy(model)
    before = everything(model)
    step(twin, 7)
    assert all(torch.equal(value, before[name]) for name, value in everything(model).items())
    step(model, 7)
    assert_same(model, twin)


def test_a_copy_counts_occurrences_from_where_the_filter_was() -> None:
    embeddings = EmbeddingBagCollection([Feature(name="user", dim=2, occurrence_threshold=2)])
    batch = {"user": torch.tensor([5])}
    embeddings(batch)["user"].sum().backward()
    embeddings.step()
    twins = [embeddings, copy.deepcopy(embeddings)]
    for _ in range(2):
        for one in twins:
            one(batch)["user"].sum().backward()
            one.step()
    assert [one.store.stats()["user"].rows for one in twins] == [1, 1]


def test_a_model_on_servers_cannot_be_copied_and_says_why() -> None:
    features = [Feature(name="user", dim=2)]
    tables = [table.config for table in EmbeddingBagCollection(features).declaration.tables]
    with (
        ParameterServer() as server,
        ServerStore([server.address], tables) as store,
        pytest.raises(InvalidArgumentError, match="deepcopy: the rows are on parameter servers"),
    ):
        copy.deepcopy(EmbeddingBagCollection(features, store))


def test_a_pickle_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(InvalidArgumentError, match=r"table 'user': cannot be pickled.*ModelCheckpoints"):
        pickle.dumps(trained())
