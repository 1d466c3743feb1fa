"""Danger: a job on a stream that reads another one than its YAML says, ignores a typo, or never ends when evaluating."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from monolith.cli.job import ModelJob, load_job
from monolith.data import StreamInput, StreamSource
from monolith.errors import ConfigError
from monolith.streams import open_stream

YAML = """
model: torch.nn:Identity
input:
  stream: {folder}/events
  columns:
    - {{name: user, shape: []}}
    - {{name: tags, field: tag_ids}}
  batch_size: 3
  max_wait_secs: 0.05
  start: end
"""


def job_file(folder: Path) -> str:
    path = folder / "job.yaml"
    path.write_text(YAML.format(folder=folder))
    return str(path)


def test_a_stream_is_trained_as_it_grows_and_evaluated_as_it_is(tmp_path: Path) -> None:
    stream = open_stream(tmp_path / "events", partitions=1)
    with stream.writer() as writer:
        for user in range(4):
            writer.append(b'{"user": %d, "tag_ids": [1]}' % user)
    job = ModelJob(load_job(job_file(tmp_path), ["input.start=start"]))
    training, evaluation = job.source("train"), job.source("eval")
    assert isinstance(training, StreamSource)
    assert isinstance(evaluation, StreamSource)
    assert training.waits
    assert not evaluation.waits
    assert training.options.max_wait_secs == 0.05
    assert [batch["user"].tolist() for batch in evaluation] == [[0, 1, 2], [3]]  # type: ignore[union-attr]


def test_defaults_of_the_configuration_are_those_of_the_source() -> None:
    columns = StreamInput.model_validate({"stream": "x", "columns": ({"name": "user"},), "batch_size": 2})
    given = {"stream", "columns", "batch_size", "dead_letters", "settings", "transforms"}
    own = inspect.signature(StreamSource).parameters
    for name, field in StreamInput.model_fields.items():
        if name not in given:
            assert own[name].default == field.default == getattr(columns, name), name


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("input.max_wait_sec=1", r"StreamInput\.max_wait_sec: unknown field; did you mean 'max_wait_secs'\?"),
        ("input.columns=[]", r"StreamInput\.columns: .*at least 1 item"),
        ("input.format=xml", r"StreamInput\.format: .*'json', 'arrow'"),
        ("input.start=tomorrow", "start: expected"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_job(job_file(tmp_path), [assignment])
