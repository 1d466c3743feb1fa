"""Danger: a job looks for its processes with another discovery than its configuration says, or leaves a discovery open."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith import ConfigError
from monolith.cluster import (
    ConsulServiceDiscovery,
    DiscoveryConfig,
    HostServiceDiscovery,
    ServiceDiscoveryType,
    TfConfigServiceDiscovery,
    get_discovery,
    monolith_discovery,
)
from monolith.original import MLPServiceDiscovery

TF_CONFIG = (
    '{"cluster": {"chief": ["h0:1"], "ps": ["h1:1"], "worker": ["h2:1"]}, "task": {"type": "worker", "index": 0}}'
)


def test_a_local_job_has_nobody_to_find() -> None:
    assert get_discovery(DiscoveryConfig(is_local=True)) is None
    with monolith_discovery(DiscoveryConfig(is_local=True)) as discovery:
        assert discovery is None


@pytest.mark.parametrize("kind", ["primus", ServiceDiscoveryType.PRIMUS])
def test_primus_is_tf_config(kind: ServiceDiscoveryType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = get_discovery(DiscoveryConfig(discovery_type=kind, tf_config=TF_CONFIG))
    assert isinstance(found, TfConfigServiceDiscovery)
    assert (found.server_type, found.index, found.addr) == ("worker", 1, "h2:1")
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    assert isinstance(get_discovery(DiscoveryConfig(discovery_type=kind)), TfConfigServiceDiscovery)


def test_consul_is_the_default_and_named_by_uuid_or_psm() -> None:
    for found in (get_discovery(DiscoveryConfig(uuid="u1")), get_discovery(DiscoveryConfig(uuid="u2"), psm="u1")):
        assert isinstance(found, ConsulServiceDiscovery)
        assert found._consul_id == "u1"
        found.close()


def test_mlp_is_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLP_PS_NUM", "1")
    assert isinstance(get_discovery(DiscoveryConfig(discovery_type="mlp")), MLPServiceDiscovery)


def test_zk_is_zookeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr("monolith.cluster.discovery.config.ZKServiceDiscovery", lambda *given: asked.append(given))
    get_discovery(DiscoveryConfig(discovery_type="zk", deep_insight_name="ctr", zk_server="zk0:2181"))
    get_discovery(DiscoveryConfig(discovery_type="zk", deep_insight_name="ctr"))
    assert asked == [("ctr", "zk0:2181"), ("ctr", None)]


def test_files_are_in_their_folder_and_the_block_closes_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HostServiceDiscovery] = []
    monkeypatch.setattr(HostServiceDiscovery, "close", lambda self: closed.append(self))

    def fail_in_the_block() -> None:
        with monolith_discovery(DiscoveryConfig(discovery_type="file", discovery_folder=str(tmp_path))) as discovery:
            assert discovery is not None
            discovery.register("ps", 0, "h0:1")
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_the_block()
    assert len(closed) == 1
    assert (tmp_path / "ps" / "0").read_text() == "h0:1"


@pytest.mark.parametrize(
    ("kind", "field"),
    [("primus", "tf_config"), ("consul", "uuid"), ("zk", "deep_insight_name"), ("file", "discovery_folder")],
)
def test_what_a_back_end_needs_is_asked_for_by_name(kind: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=f"DiscoveryConfig.{field}: expected"):
        get_discovery(DiscoveryConfig(discovery_type=kind))


def test_a_back_end_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="'primus', 'consul', 'zk', 'mlp', 'file' or 'ray'"):
        DiscoveryConfig(discovery_type="etcd")
