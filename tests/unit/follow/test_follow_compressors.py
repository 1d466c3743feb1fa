"""Danger: a replica that follows stores rows otherwise than an export of the same model does, and its predictions change when it
is started again; or it serves a row that training has evicted, or has not admitted yet."""

from __future__ import annotations

import numpy as np
import pytest

from followed_tables import DIM, Copies, FeedProcess, following, rows_of, until, writer_at
from monolith.serve.export import _serving_config, _serving_parts
from monolith.table import Adagrad, AdmissionFilter, EmbeddingTable, Expiry, Segment, SlidingAdmission, TableConfig
from monolith.table.config import Bf16, Compressor, FixedR8, Fp16, Fp32, OneBit

COMPRESSORS = {
    "fp32": (Fp32(),),
    "fp16": (Fp16(),),
    "bf16": (Bf16(),),
    "int8": (FixedR8(range=0.5),),
    "one bit": (OneBit(step_size=1),),
    "several": (FixedR8(range=0.5), Fp16(), OneBit(step_size=1), Fp32(), Bf16()),
}


def config(*compressors: Compressor, precision: str = "fp32") -> TableConfig:
    segments = tuple(
        Segment(dim=DIM, optimizer=Adagrad(learning_rate=0.1), compressor=one, precision=precision)
        for one in compressors
    )
    return TableConfig(name="item", segments=segments)


def step(one: EmbeddingTable, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids = np.unique(draw.integers(0, 500, 200))
    one.apply_gradients(ids, draw.normal(size=(len(ids), one.dim)).astype(np.float32), step=seed, event_time=seed)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("compressors", COMPRESSORS.values(), ids=COMPRESSORS)
def test_followed_rows_are_those_of_an_export(compressors: tuple[Compressor, ...], precision: str) -> None:
    trained = EmbeddingTable(config(*compressors, precision=precision))
    serving = _serving_config(trained.config)
    copies = Copies()
    copies.kept["item"] = [EmbeddingTable(serving)]
    step(trained, 1)
    process = FeedProcess({"item": trained})
    try:
        with following(copies, writer_at(process.address)) as follower:
            for seed in range(2, 8):
                step(trained, seed)
                trained.erase([seed, 10 * seed])
                newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
    finally:
        process.close()
    entries = trained.entries()
    exported = EmbeddingTable(serving)
    for part in _serving_parts(trained.config, [(entries.ids, entries.values)]):
        rows = part.entries()
        exported.assign(rows.ids, rows.values)
    followed = copies.kept["item"][0]
    assert rows_of(followed) == rows_of(exported)
    exported.set_state(trained.state())
    ids = np.arange(600)
    assert followed.lookup(ids).numpy().tobytes() == exported.lookup(ids).numpy().tobytes()


def test_rows_that_expire_and_come_back_and_ids_that_are_not_admitted_yet() -> None:
    settings = config(Fp32()).model_copy(update={"expiry": Expiry(default=100)})
    trained = EmbeddingTable(settings, admission=AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=2)))
    copies = Copies()
    copies.kept["item"] = [EmbeddingTable(_serving_config(settings))]
    process = FeedProcess({"item": trained})
    ones = np.ones((2, DIM), np.float32)

    def see(ids: list[int], time: int) -> None:
        trained.apply_gradients(ids, ones[: len(ids)], event_time=time)

    try:
        with following(copies, writer_at(process.address)) as follower:

            def followed_ids() -> set[int]:
                newest = process.publish()
                until(lambda: follower.progress["run"].sequence == newest)
                assert copies.rows() == rows_of(trained)
                return set(copies.rows())

            see([1, 2], 10)
            assert followed_ids() == set()
            see([1, 2], 11)
            see([1, 2], 12)
            assert followed_ids() == {1, 2}
            see([2], 200)
            assert trained.evict(now=205) == 1
            assert followed_ids() == {2}
            # It counts as seen before, or is counted again: either way the replica has what training has.
            for time in range(206, 212):
                see([1], time)
            assert followed_ids() == {1, 2}
            trained.evict(now=10_000)
            assert followed_ids() == set()
    finally:
        process.close()


def test_every_copy_of_a_table_that_several_collections_read_is_followed() -> None:
    trained, other = EmbeddingTable(config(Fp32())), EmbeddingTable(config(FixedR8()))
    copies = Copies()
    serving = _serving_config(trained.config)
    copies.kept = {
        "item": [EmbeddingTable(serving), EmbeddingTable(serving)],
        "1/item": [EmbeddingTable(_serving_config(other.config))],
    }
    process = FeedProcess({"item": trained, "1/item": other})
    try:
        with following(copies, writer_at(process.address)) as follower:
            step(trained, 1)
            step(other, 2)
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            first, second = copies.kept["item"]
            assert rows_of(first) == rows_of(second) == rows_of(trained)
            assert set(copies.rows("1/item")) == set(rows_of(other))
            assert copies.rows("1/item") != rows_of(trained)
    finally:
        process.close()
