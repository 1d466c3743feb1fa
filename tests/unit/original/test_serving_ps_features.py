"""Danger: a layout swaps the slices of two features, or their gradients.

The spec's serving_ps_test builds an ExampleBatch of 10 rows and a FeatureConfigs with six outputs, and prints them. Here the
same features are looked up, and every number is compared with a plain NumPy loop over rows and ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from monolith import Segment
from monolith.features import fid_v2, to_fids
from monolith.original import FusedLayout
from monolith.original.fused_layout import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
    features_of,
)
from monolith.original.fused_lookup import batch_from_examples, feature_configs_from_proto, feature_configs_to_proto
from monolith.proto import example_pb2
from monolith.ps import ParameterServer, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.table import SGD

BATCH = 10


@dataclass(frozen=True)
class FeatMeta:
    slot: int
    table: str
    slice_dims: tuple[int, ...]
    shared: bool = False
    fid_version: int = 2
    pooling: PoolingType = PoolingType.SUM
    max_length: int = 0


# bias | vec | one slice per field of the other side
USER, ITEM, SEQUENCE = (1, 8, 4, 4), (1, 8, 4, 4), (6,)
FEATURES = {
    "f_user_id": FeatMeta(200, "user", USER, shared=True),
    "f_user_city": FeatMeta(201, "user", USER, shared=True, fid_version=1, pooling=PoolingType.MEAN),
    "f_user_tags": FeatMeta(202, "user", USER, shared=True, pooling=PoolingType.MEAN),
    "f_goods_id": FeatMeta(300, "goods", ITEM),
    "f_goods_title": FeatMeta(301, "goods", ITEM, fid_version=1, pooling=PoolingType.MEAN),
    "f_page": FeatMeta(600, "page", (1, 8)),
    "f_user_clicks": FeatMeta(900, "clicks", SEQUENCE, shared=True, pooling=PoolingType.FIRSTN, max_length=5),
    "f_goods_images": FeatMeta(901, "images", SEQUENCE, pooling=PoolingType.FIRSTN, max_length=3),
}
USERS = [name for name in FEATURES if name.startswith("f_user") and FEATURES[name].table == "user"]
GOODS = [name for name in FEATURES if FEATURES[name].table == "goods"]


def out(out_type: OutType, names: list[str], start: int, end: int) -> OutConfig:
    slices = tuple(SliceConfig(feature_name=name, start=start, end=end) for name in names)
    return OutConfig(slice_configs=slices, out_type=out_type)


CONFIGS = FeatureConfigs(
    feature_configs={
        name: FeatureConfig(
            table=meta.table, slice_dims=meta.slice_dims, pooling_type=meta.pooling, max_sequence_length=meta.max_length
        )
        for name, meta in FEATURES.items()
    },
    out_configs={
        "bias": out(OutType.CONCAT, [*USERS, *GOODS, "f_page"], 0, 1),
        "vec": out(OutType.CONCAT, [*USERS, *GOODS, "f_page"], 1, 9),
        "uffm": out(OutType.NONE, USERS, 9, 13),
        "iffm": out(OutType.NONE, GOODS, 13, 17),
        "seq": out(OutType.NONE, ["f_user_clicks", "f_goods_images"], 0, 6),
        "user_only": out(OutType.STACK, USERS, 1, 9),
        "user_sum": out(OutType.ADDN, USERS, 1, 9),
    },
)
SHAPES = {
    "bias": [(BATCH, 6)],
    "vec": [(BATCH, 48)],
    "uffm": [(BATCH, 4)] * 3,
    "iffm": [(BATCH, 4)] * 2,
    "seq": [(BATCH, 5, 6), (BATCH, 3, 6)],
    "user_only": [(BATCH, 3, 8)],
    "user_sum": [(BATCH, 8)],
}


def ids_of_rows() -> dict[str, list[list[int]]]:
    """Signatures by feature and row; a shared feature has one row."""
    rng = np.random.default_rng(7)
    return {
        name: [rng.integers(0, 6, rng.integers(0, 8)).tolist() for _ in range(1 if meta.shared else BATCH)]
        for name, meta in FEATURES.items()
    }


def example_batch(rows: dict[str, list[list[int]]]) -> example_pb2.ExampleBatch:
    message = example_pb2.ExampleBatch(batch_size=BATCH)
    for name, meta in FEATURES.items():
        column = message.named_feature_list.add(
            name=name, type=example_pb2.SHARED if meta.shared else example_pb2.INDIVIDUAL
        )
        for signatures in rows[name]:
            feature = column.feature.add()
            if meta.fid_version == 1:
                feature.fid_v1_list.value.extend(meta.slot << 54 | signature for signature in signatures)
            else:
                feature.fid_v2_list.value.extend(meta.slot << 48 | signature for signature in signatures)
    return message


def fused_layout() -> FusedLayout:
    sgd = SGD(learning_rate=1.0)
    segments = {m.table: tuple(Segment(dim=d, optimizer=sgd) for d in m.slice_dims) for m in FEATURES.values()}
    return FusedLayout(CONFIGS, segments=segments)


def embedding(layout: FusedLayout, name: str, signature: int) -> np.ndarray:
    meta = FEATURES[name]
    table = layout.embeddings.store.tables[meta.table]  # type: ignore[attr-defined]
    return table.lookup(fid_v2.make(meta.slot, torch.tensor([signature])))[0].numpy().astype(np.float64)


def expected(layout: FusedLayout, name: str, row: list[int]) -> np.ndarray:
    meta, vectors = FEATURES[name], [embedding(layout, name, signature) for signature in row]
    if meta.pooling == PoolingType.FIRSTN:
        padding = [np.zeros(sum(meta.slice_dims))] * meta.max_length
        return np.stack((vectors + padding)[: meta.max_length])
    total = np.sum(vectors, axis=0) if vectors else np.zeros(sum(meta.slice_dims))
    return total / max(len(row), 1) if meta.pooling == PoolingType.MEAN else total


def test_spec_outputs_of_the_serving_ps_features() -> None:
    layout, rows = fused_layout(), ids_of_rows()
    outputs = layout(example_batch(rows))
    assert list(outputs) == sorted(SHAPES)
    assert {n: [tuple(t.shape) for t in (o if isinstance(o, tuple) else (o,))] for n, o in outputs.items()} == SHAPES
    by_row = {n: rows[n] * (BATCH if meta.shared else 1) for n, meta in FEATURES.items()}
    for name, config in CONFIGS.out_configs.items():
        parts = [
            np.stack([expected(layout, s.feature_name, row) for row in by_row[s.feature_name]])[..., s.start : s.end]
            for s in config.slice_configs
        ]
        got = outputs[name]
        if config.out_type == OutType.NONE:
            assert isinstance(got, tuple)
            for part, tensor in zip(parts, got, strict=True):
                np.testing.assert_allclose(tensor.detach().numpy(), part, rtol=1e-5, atol=1e-7)
            continue
        assert isinstance(got, torch.Tensor)
        whole = {
            OutType.CONCAT: lambda p: np.concatenate(p, axis=-1),
            OutType.STACK: lambda p: np.stack(p, axis=1),
            OutType.ADDN: lambda p: np.sum(p, axis=0),
        }[config.out_type](parts)
        np.testing.assert_allclose(got.detach().numpy(), whole, rtol=1e-5, atol=1e-7)


def test_gradients_reach_the_rows_that_made_the_outputs() -> None:
    layout, rows = fused_layout(), ids_of_rows()
    rng = np.random.default_rng(8)
    before = {(n, s): embedding(layout, n, s) for n in FEATURES for s in range(6)}
    outputs = layout(example_batch(rows))
    gradient: dict[tuple[str, int], np.ndarray] = {key: np.zeros_like(value) for key, value in before.items()}
    loss = torch.zeros(())
    for name, config in CONFIGS.out_configs.items():
        got = outputs[name]
        tensors = got if isinstance(got, tuple) else (got,)
        factors = [rng.normal(size=tuple(tensor.shape)) for tensor in tensors]
        loss = loss + sum((t * torch.from_numpy(f).float()).sum() for t, f in zip(tensors, factors, strict=True))
        at = 0
        for place, part in enumerate(config.slice_configs):
            match config.out_type:
                case OutType.NONE:
                    factor = factors[place]
                case OutType.CONCAT:
                    factor, at = factors[0][:, at : at + part.dim], at + part.dim
                case OutType.STACK:
                    factor = factors[0][:, place]
                case OutType.ADDN:
                    factor = factors[0]
            meta = FEATURES[part.feature_name]
            for row, signatures in enumerate(rows[part.feature_name] * (BATCH if meta.shared else 1)):
                for position, signature in enumerate(signatures):
                    if meta.max_length and position >= meta.max_length:
                        continue
                    share = factor[row, position] if meta.max_length else factor[row]
                    scale = len(signatures) if meta.pooling == PoolingType.MEAN else 1
                    gradient[part.feature_name, signature][part.start : part.end] += share / scale
    loss.backward()
    layout.embeddings.step()
    for (name, signature), value in before.items():
        after = embedding(layout, name, signature)
        np.testing.assert_allclose(after, value - gradient[name, signature], rtol=1e-4, atol=1e-5)


def test_rows_on_servers_give_the_same_outputs_and_learn_the_same() -> None:
    here, there, rows = fused_layout(), fused_layout(), ids_of_rows()
    declared = [DeclaredTable(config=table.config) for table in there.embeddings.declaration.tables]
    with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address], declared) as store:
        there.embeddings.use_store(store)
        for _ in range(2):
            for layout in (here, there):
                outputs = layout(example_batch(rows))
                tensors = [t for out in outputs.values() for t in (out if isinstance(out, tuple) else (out,))]
                torch.stack([tensor.square().sum() for tensor in tensors]).sum().backward()
                layout.embeddings.step()
        found, expected_outputs = there(example_batch(rows)), here(example_batch(rows))
    for name, expected_output in expected_outputs.items():
        torch.testing.assert_close(found[name], expected_output, msg=name)


def test_one_lookup_per_table() -> None:
    tables = fused_layout().embeddings.declaration.tables
    assert sorted(table.config.name for table in tables) == ["clicks", "goods", "images", "page", "user"]


def test_our_batches_give_the_same_outputs_as_messages() -> None:
    layout, rows = fused_layout(), ids_of_rows()
    batch = batch_from_examples(example_batch(rows), FEATURES)
    assert torch.equal(layout(batch)["vec"], layout(example_batch(rows))["vec"])


def test_the_configs_survive_their_message() -> None:
    message = feature_configs_to_proto(CONFIGS)
    assert [list(shape.dims) for shape in message.out_configs["seq"].shape] == [[-1, 5, 6], [-1, 3, 6]]
    assert message.feature_configs["f_goods_images"].max_sequence_length == 3
    assert message.out_configs["user_only"].out_type == 1
    assert message.out_configs["vec"].slice_configs[5].feature_name == "f_page"
    assert feature_configs_from_proto(type(message).FromString(message.SerializeToString())) == CONFIGS


def test_v1_fids_read_the_rows_of_their_v2_form() -> None:
    message = example_batch(ids_of_rows() | {"f_goods_title": [[3]] * BATCH})
    (column,) = batch_from_examples(message, ["f_goods_title"]).values()
    assert column.values.tolist() == to_fids([3] * BATCH, 301).tolist()


def test_features_are_sorted_and_share_the_tables_they_name() -> None:
    features = features_of(CONFIGS)
    assert [feature.name for feature in features] == sorted(FEATURES)
    assert {f.name: f.shared_with for f in features if f.shared_with} == {
        "f_goods_title": "f_goods_id",
        "f_user_id": "f_user_city",
        "f_user_tags": "f_user_city",
    }


@pytest.mark.parametrize("missing", ["f_goods_id", "f_user_tags"])
def test_a_feature_that_is_not_in_the_batch_reads_zeros(missing: str) -> None:
    message = example_batch(ids_of_rows())
    kept = [column for column in message.named_feature_list if column.name != missing]
    del message.named_feature_list[:]
    message.named_feature_list.extend(kept)
    bias = fused_layout()(message)["bias"]
    assert not bias[:, [*USERS, *GOODS].index(missing)].any()
