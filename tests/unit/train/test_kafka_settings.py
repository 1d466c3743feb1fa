"""Danger: the settings that switch a pipeline of record files to Kafka are ignored, or read other columns or messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import Column, RecordFileSource, RecordHeader, RecordWriter
from monolith.data.sources.history import kafka_like
from monolith.data.transforms import FilterByValue
from monolith.data.transforms.compose import Transformed
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.proto import example_pb2
from monolith.streams import open_stream
from monolith.testing.mock_kafka import MockKafka
from monolith.train import Estimator, RunConfig, RunnerConfig
from waiting_run import IdCounts, counts_of

pytest.importorskip("confluent_kafka")

COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=(1,))]


def example(number: int) -> example_pb2.Example:
    message = example_pb2.Example(label=[1.0])
    message.named_feature.add(name="id").feature.fid_v2_list.value.append(number)
    return message


def files(folder: Path, **options: Any) -> RecordFileSource:  # noqa: ANN401
    with RecordWriter(str(folder / "rows"), header=options.get("header", RecordHeader())) as writer:
        writer.write(example(1))
    return RecordFileSource(str(folder / "rows"), COLUMNS, batch_size=2, **options)


def test_a_pipeline_of_files_reads_kafka_instead(tmp_path: Path) -> None:
    with MockKafka({"clicks": 2}) as kafka:
        with open_stream(kafka.url("clicks")).writer() as writer:
            for number in (5, 6, 7, 8):
                writer.append(example(number).SerializeToString(), partition=number % 2)
        config = RunConfig(
            model_dir=str(tmp_path / "run"), clip_norm=None, kafka_topics="clicks", kafka_servers=kafka.address
        )
        data = Transformed(files(tmp_path), FilterByValue(column="id", op="ge", operand=6))

        def estimator() -> Estimator:
            model = IdCounts()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            return Estimator(model, config, optimizer=optimizer, runner=RunnerConfig(is_local=True))

        first = estimator()
        # A batch of one partition and then of the other, however they come: two or three steps.
        while sum(counts_of(first.trainer, range(9)).values()) < 2:
            first.train(data, steps=1)
        second = estimator()
        while sum(counts_of(second.trainer, range(9)).values()) < 3:
            second.train(data, steps=1)
        assert counts_of(second.trainer, range(9)) == {6: 1, 7: 1, 8: 1}


def test_the_stream_reads_the_messages_of_the_files(tmp_path: Path) -> None:
    with MockKafka({"clicks": 1}) as kafka:
        plain = kafka_like(files(tmp_path), servers=kafka.address, topics="clicks", group="monitor")
        assert (plain.options.format, plain.options.header, plain.options.batch_size) == ("example", None, 2)
        header = RecordHeader(sort_id=True)
        framed = kafka_like(files(tmp_path, header=header), servers=kafka.address, topics="clicks", group=None)
        assert framed.options.header == header


def test_other_data_and_half_of_the_settings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected data in RecordFileSource.*got a list"):
        kafka_like([], servers="localhost:9", topics="clicks", group=None)
    with pytest.raises(ConfigError, match="kafka_topics and kafka_servers: give both"):
        RunConfig(kafka_topics="clicks")
