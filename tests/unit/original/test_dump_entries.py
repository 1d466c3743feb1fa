"""Danger: optimizer state that ends up in another slot, is lost, or is invented when a row comes from or goes to the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import Message

from comparison import float32, int64
from dumps import adagrad, assert_same_rows, entry, write_dump
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original import export_dump, import_dump
from monolith.original.dump_files import plain_pieces, split_records
from monolith.proto import table_dump_pb2
from monolith.table import SGD, Adagrad, Adam, Adamom, BatchSoftmax, Ftrl, MovingAverage, RowwiseAdagrad
from monolith.table.optimizers import Optimizer
from monolith.testing import every_optimizer

NOT_IN_THE_ORIGINAL = ("adamom", "rowwise_adagrad")
OPTIMIZERS = {name: each for name, each in every_optimizer().items() if name not in NOT_IN_THE_ORIGINAL}


def config(*optimizers: Optimizer, dim: int = 3) -> TableConfig:
    segments = [Segment(dim=1 if isinstance(o, BatchSoftmax) else dim, optimizer=o) for o in optimizers]
    return TableConfig(name="t", segments=tuple(segments))


def trained(table_config: TableConfig, rows: int = 40) -> EmbeddingTable:
    """Rows with one and with two steps, and times that take every number of bytes."""
    table = EmbeddingTable(table_config)
    rng = np.random.default_rng(0)
    times = [0, 127, 128, 2**14, 2**21, 2**28, 1_700_000_000, 2**32 - 1]
    for step, time in enumerate(times):
        ids = np.arange(step * rows, (step + 1) * rows) * 7919 - 1000
        grads = rng.normal(size=(rows, table.dim)).astype(np.float32)
        snapshot = table.lookup(ids)
        table.apply_gradients(ids, grads, step=1 << 3 * step, event_time=time, snapshot=snapshot)
        table.apply_gradients(ids[::2], grads[::2], step=3 << 6 * step, event_time=time, snapshot=snapshot[::2])
    return table


def messages(path: Path) -> list[table_dump_pb2.EntryDump]:
    with path.open("rb") as file:
        parts = [
            part.data[start:end]
            for part in split_records(plain_pieces(file.read), str(path))
            for start, end in zip(part.starts, part.ends, strict=True)
        ]
    return [table_dump_pb2.EntryDump.FromString(part) for part in parts]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_written_is_what_protobuf_reads_and_writes(name: str, tmp_path: Path) -> None:
    table = trained(config(OPTIMIZERS[name], SGD()))
    (file,) = export_dump(table, str(tmp_path / "t"))
    read = messages(file)
    assert len(read) == len(table) == 320
    by_id = {message.id: message for message in read}
    rows = table.entries()
    for i, id_ in enumerate(rows.ids.tolist()):
        message = by_id[id_]
        assert list(message.num) == rows.values[i].tolist()
        assert message.last_update_ts_sec == rows.times[i]
        state = message.opt.dump[0] if len(message.opt.dump) == 2 else table_dump_pb2.SingleOptimizerDump(sgd={})
        kept: Message = getattr(state, str(state.WhichOneof("type")))
        slots = {field.name: np.atleast_1d(value).tolist() for field, value in kept.ListFields()}
        assert slots == {slot.removeprefix("0/"): value[i].tolist() for slot, value in rows.slots.items()}
    assert b"".join(m.SerializeToString() for m in read) == b"".join(
        part.data[start:end]
        for part in split_records([file.read_bytes()], "")
        for start, end in zip(part.starts, part.ends, strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    table = trained(config(OPTIMIZERS[name], MovingAverage(), Ftrl()))
    export_dump(table, str(tmp_path / "t"), shards=2)
    copy = import_dump(str(tmp_path / "t"), table.config)
    assert_same_rows(copy, table)
    assert copy.stats().max_event_time == 2**32 - 1
    # What is kept must be what training goes on from.
    ids, grads = int64([-1000, 6919]), float32(np.ones((2, table.dim)))
    for each in (table, copy):
        each.apply_gradients(ids, grads, step=2**40, event_time=9, snapshot=float32(np.zeros((2, table.dim))))
    assert_same_rows(copy, table)


def test_several_steps_counters_are_left_to_protobuf(tmp_path: Path) -> None:
    table = trained(config(BatchSoftmax(), SGD(), BatchSoftmax()))
    export_dump(table, str(tmp_path / "t"))
    assert_same_rows(import_dump(str(tmp_path / "t"), table.config), table)


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(), Adamom()])
def test_an_optimizer_that_the_original_lacks_cannot_leave(optimizer: Optimizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"segment 1 .* no optimizer '\w+'.*Parquet"):
        export_dump(EmbeddingTable(config(SGD(), optimizer)), str(tmp_path / "t"))
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_the_original_never_writes(tmp_path: Path) -> None:
    """Anything protobuf allows is read: packed numbers, another order of fields, varints longer than needed."""
    packed = b"\x12\x08" + np.array([1, 2], "<f4").tobytes() + b"\x09" + (7).to_bytes(8, "little")
    state = entry(0, [], adagrad(3, 4)).SerializeToString().removeprefix(b"\x09" + bytes(8))
    reordered = b"\x20\x80\x80\x00" + state + packed
    prefix = write_dump(tmp_path / "t", [entry(5, [8, 9], adagrad(1, 1), time=1), reordered])
    rows = import_dump(prefix, config(Adagrad(), dim=2)).lookup_entry([7, 5])
    assert rows.values.tolist() == [[1, 2], [8, 9]]
    assert rows.slots["0/norm"].tolist() == [[3, 4], [1, 1]]
    assert rows.times.tolist() == [0, 1]


def test_a_missing_time_is_zero_and_missing_state_starts_fresh(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1, 2], adagrad(3, 4)), entry(2, [5, 6]), entry(3, [7, 8], time=9)])
    rows = import_dump(prefix, config(Adagrad(initial_accumulator_value=0.5), dim=2)).lookup_entry([1, 2, 3])
    assert rows.slots["0/norm"].tolist() == [[3, 4], [0.5, 0.5], [0.5, 0.5]]
    assert rows.values.tolist() == [[1, 2], [5, 6], [7, 8]]
    assert rows.times.tolist() == [0, 0, 9]


def test_weights_alone_for_another_optimizer(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1, 2], adagrad(3, 4), time=5)])
    target = config(Adam(beta1=0.75), dim=2)
    with pytest.raises(
        InvalidArgumentError, match=r"record 0: id 1 has the state of adagrad, table 't' keeps adam; .*"
    ):
        import_dump(prefix, target)
    rows = import_dump(prefix, target, optimizer_state=False).lookup_entry([1])
    assert rows.values.tolist() == [[1, 2]]
    assert rows.slots["0/m"].tolist() == [[0, 0]]
    assert rows.slots["0/beta1_power"].tolist() == [[0.75]]
    assert rows.times.tolist() == [5]


def test_a_serving_table_takes_weights_only(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1, 2], adagrad(3, 4), time=5)])
    table = import_dump(prefix, config(Adagrad(), dim=2).model_copy(update={"mode": "serving"}))
    assert table.lookup([1]).tolist() == [[1, 2]]
    with pytest.raises(InvalidArgumentError, match="is for serving"):
        export_dump(table, str(tmp_path / "again"))


def test_zero_rows_stay_behind_where_the_table_wants_none(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [0, 0]), entry(2, [0, 1]), entry(3, [0, -0.0])])
    serving = config(SGD(), dim=2).model_copy(update={"mode": "serving"})
    assert sorted(import_dump(prefix, serving)) == [1, 2, 3]
    assert list(import_dump(prefix, serving.model_copy(update={"skip_zero_rows": True}))) == [2]


WRONG = {
    "fewer values": (entry(1, [1], adagrad(1, 1)), InvalidArgumentError, "has 1 values, table 't' has dim 2"),
    "more values": (entry(1, [1, 2, 3], adagrad(1, 1)), InvalidArgumentError, "has 3 values"),
    "shorter state": (entry(1, [1, 2], adagrad(1)), InvalidArgumentError, "slot 'norm' of segment 0 .* has 1 numbers"),
    "state of another segment": (entry(1, [1, 2], adagrad(1, 1), adagrad(1)), InvalidArgumentError, "adagrad, adagrad"),
    "empty state": (
        entry(1, [1, 2], table_dump_pb2.SingleOptimizerDump()),
        InvalidArgumentError,
        "has the state of None",
    ),
    "no id": (table_dump_pb2.EntryDump(num=[1, 2]), CorruptFileError, "record 1: an entry without an id"),
    "no message": (b"\x0f\xff", CorruptFileError, "record 1: not an EntryDump message"),
    "time before 1970": (entry(1, [1, 2], adagrad(1, 1), time=-1), CorruptFileError, "last updated at -1"),
    "time too late": (entry(1, [1, 2], adagrad(1, 1), time=2**32), CorruptFileError, "last updated at 4294967296"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    record, error, message = WRONG[case]
    prefix = write_dump(tmp_path / "t", [entry(0, [1, 2], adagrad(1, 1)), record])
    with pytest.raises(error, match=message):
        import_dump(prefix, config(Adagrad(), dim=2))


def test_a_power_that_is_not_there_is_not_taken_for_zero(tmp_path: Path) -> None:
    state = table_dump_pb2.SingleOptimizerDump(adam={"m": [1, 1], "v": [1, 1], "beta1_power": 0.5})
    prefix = write_dump(tmp_path / "t", [entry(1, [1, 2], state)])
    with pytest.raises(InvalidArgumentError, match="slot 'beta2_power' of segment 0 of id 1 has 0 numbers, expected 1"):
        import_dump(prefix, config(Adam(), dim=2))


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    state = table_dump_pb2.SingleOptimizerDump(batch_softmax={"global_step": -1})
    prefix = write_dump(tmp_path / "t", [entry(1, [1], state)])
    with pytest.raises(CorruptFileError, match="global_step of id 1 is -1"):
        import_dump(prefix, config(BatchSoftmax()))
