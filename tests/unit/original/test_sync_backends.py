"""Danger: rows are pushed to the targets of another sub-model, or to none because a query failed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.original import DiscoveryBackend, refresh_sync_config
from monolith.proto.parameter_sync_pb2 import ClientConfig


def test_targets_are_those_of_the_sub_model(tmp_path: Path) -> None:
    with (
        DiscoveryBackend(f"file={tmp_path}") as backend,
        backend.announced("ps_0", 0, "127.0.0.1:7300"),
        backend.announced("ps_0", 1, "127.0.0.1:7301"),
        backend.announced("ps_1", 0, "127.0.0.1:7302"),
    ):
        config = refresh_sync_config(backend, 0)
        assert config == ClientConfig(
            model_name="ps_0",
            signature_name="hashtable_assign",
            targets=["127.0.0.1:7300", "127.0.0.1:7301"],
            timeout_in_ms=3000,
        )
        assert list(refresh_sync_config(backend, 1).targets) == ["127.0.0.1:7302"]
        assert list(refresh_sync_config(backend, 2).targets) == []


def test_a_target_that_ended_is_not_announced_any_more(tmp_path: Path) -> None:
    with DiscoveryBackend(f"file={tmp_path}") as backend:
        with backend.announced("ps_0", 0, "127.0.0.1:7300"):
            pass
        assert list(refresh_sync_config(backend, 0).targets) == []


def test_sub_models_of_a_model_have_its_name(tmp_path: Path) -> None:
    with DiscoveryBackend(f"file={tmp_path}") as backend:
        backend.subscribe_model("clicks")
        assert refresh_sync_config(backend, 3).model_name == "clicks:ps_3"


def test_what_is_known_about_targets_is_passed_on() -> None:
    class Known:
        def get_sync_targets(self, sub_graph: str) -> tuple[str, dict[str, ClientConfig.TargetExtraInfo]]:
            return sub_graph, {"10.0.0.1:7300": ClientConfig.TargetExtraInfo(idc="lf", cluster="a")}

    config = refresh_sync_config(Known(), 0)
    assert list(config.targets) == ["10.0.0.1:7300"]
    assert [(one.idc, one.cluster, one.replica_id) for one in config.targets_extra_info] == [("lf", "a", -1)]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with DiscoveryBackend(f"file={tmp_path}") as backend, pytest.raises(InvalidArgumentError, match="ps_index"):
        refresh_sync_config(backend, -1)
    with pytest.raises(ConfigError, match="discovery"):
        DiscoveryBackend("nothing=here")
