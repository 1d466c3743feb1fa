"""Danger: a data service that works from Python, and not as the processes people start."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.cli import main
from monolith.dataservice import DataClientConfig, DataServiceSource
from monolith.testing.parameter_servers import server_process

TESTS = Path(__file__).parents[1]


def test_two_commands_serve_a_dataset_of_ones_own_kind_and_end_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("MONOLITH_PS_TOKEN", "correct-horse-battery")
    (tmp_path / "numbers.yaml").write_text("kind: numbers\nfields: {count: 9}\nsplits: 2\n")
    options = ["--dataset", str(tmp_path / "numbers.yaml"), "--folder", str(tmp_path / "dispatcher")]
    config = DataClientConfig(token="correct-horse-battery")
    with server_process(*options, verb="dispatcher") as dispatcher:
        kind = ["--dispatcher", dispatcher.address, "--kind", "numbers=data_service_kind:numbers"]
        with server_process(*kind, verb="data-worker") as worker:
            source = DataServiceSource(dispatcher.address, config=config)
            assert sorted(batch["x"].item() for batch in source) == list(range(9))
            assert worker.stop() == 0
        assert dispatcher.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["dispatcher", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["dispatcher", "--dataset", "absent.yaml"], "absent.yaml: cannot be read"),
        (["data-worker", "--dispatcher", "nowhere"], "DataWorkerConfig.dispatcher"),
        (["data-worker", "--dispatcher", "a:1", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["data-worker", "--dispatcher", "a:1", "--kind", "numbers"], "expected name=module:function"),
        (["data-worker", "--dispatcher", "a:1", "--kind", "x=os.path:nothing"], "nothing"),
    ],
)
def test_what_cannot_be_served_is_said(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONOLITH_PS_TOKEN", raising=False)
    assert main(arguments) in (2, 4)
    assert complaint in capsys.readouterr().err
