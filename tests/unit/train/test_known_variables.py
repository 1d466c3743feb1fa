"""Danger: a misspelt variable is ignored, and the run does something else than its operator asked for."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import monolith
from monolith import ConfigError
from monolith.train import RunnerConfig
from monolith.train.distributed.config import OTHER_VARIABLES, PREFIX

FIELDS = {PREFIX + name.upper() for name in RunnerConfig.model_fields}
# Of the original's communication.
SWITCHES = {
    *("MONOLITH_WITH_HOROVOD", "MONOLITH_WITH_OPTIMIZED_HOROVOD", "MONOLITH_WITH_HOROVOD_FID_G2G"),
    *(
        "MONOLITH_WITH_HOROVOD_FWD_G2G",
        "MONOLITH_WITH_HOROVOD_BWD_G2G",
        "MONOLITH_WITH_BYTEPS",
        "MONOLITH_WITH_BYTEPS_FID",
    ),
    *(
        "MONOLITH_WITH_BYTEPS_FWD",
        "MONOLITH_WITH_BYTEPS_BWD",
        "MONOLITH_WITH_BYTEPS_BWD_CAST",
        "MONOLITH_WITH_BYTEPS_BCAST",
    ),
    *("MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST", "MONOLITH_WITH_BYTEPS_FWD_GDR", "MONOLITH_WITH_BYTEPS_BWD_GDR"),
    *("MONOLITH_WITH_BYTEPS_FWD_GDR_G2G", "MONOLITH_WITH_BYTEPS_BWD_GDR_G2G", "MONOLITH_WITH_BYTEPS_ALLREDUCE"),
    *("MONOLITH_WITH_ALLREDUCE_FUSION", "MONOLITH_WITH_ALLREDUCE_FP16", "MONOLITH_FORCE_GPU_COMPATIBLE"),
    *("MONOLITH_GPU_FEATURE_FACTORY_FUSION_LEVEL", "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD"),
    *("MONOLITH_SAVE_SUMMARY_INTERVAL", "MONOLITH_ROOT_LOG_INTERVAL", "MONOLITH_SKIP_ALLREDUCE"),
}
# Names in `__all__`, and the misspelt one of an example.
NOT_READ = SWITCHES | {"MONOLITH_FI_DATA", "MONOLITH_NAS_DATA", "MONOLITH_NUMPS"}


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("MONOLITH_NUMPS", "MONOLITH_NUM_PS"),
        ("MONOLITH_NUM_WORKER", "MONOLITH_NUM_WORKERS"),
        ("MONOLITH_SERVER_TPYE", "MONOLITH_SERVER_TYPE"),
        ("MONOLITH_MODELDIR", "MONOLITH_MODEL_DIR"),
        ("MONOLITH_INDX", "MONOLITH_INDEX"),
        ("MONOLITH_PSTOKEN", "MONOLITH_PS_TOKEN"),
        ("MONOLITH_ZK_HOST", "MONOLITH_ZK_HOSTS"),
        ("MONOLITH_METRICS_PREFIX", "MONOLITH_METRIC_PREFIX"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(misspelt: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{misspelt}: no such variable; did you mean {meant}\?"):
        RunnerConfig.from_env({misspelt: "2"})


def test_a_variable_like_none_of_ours_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert RunnerConfig.from_env({"MONOLITH_HOME": "/opt"}).is_local
    assert "MONOLITH_HOME: Monolith reads no such environment variable" in caplog.text


def test_known_variables_and_those_of_others_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    known = dict.fromkeys(OTHER_VARIABLES, "x" * 16) | {"MONOLITH_MODEL_DIR": "run", "NUM_PS": "2"}
    with caplog.at_level(logging.WARNING):
        RunnerConfig.from_env(known)
    assert caplog.text == ""


def test_what_kubernetes_sets_for_a_service_of_that_name_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    service = {
        "MONOLITH_SERVERS_SERVICE_HOST": "10.0.0.1",
        "MONOLITH_SERVERS_SERVICE_PORT": "7100",
        "MONOLITH_SERVERS_PORT": "tcp://10.0.0.1:7100",
        "MONOLITH_SERVERS_PORT_7100_TCP_ADDR": "10.0.0.1",
    }
    with caplog.at_level(logging.WARNING):
        assert RunnerConfig.from_env(service).is_local
    assert caplog.text == ""


def test_every_variable_that_the_package_reads_is_known() -> None:
    sources = Path(monolith.__file__).parent.rglob("*.py")
    read = {name for source in sources for name in re.findall(r'"(MONOLITH_[A-Z0-9_]+)"', source.read_text("utf-8"))}
    assert read - NOT_READ <= FIELDS | OTHER_VARIABLES
    assert read >= OTHER_VARIABLES


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_a_switch_of_the_originals_communication_is_said_to_have_no_effect(
    switch: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        RunnerConfig.from_env({switch: "0"})
    assert f"{switch}: it has no effect here: " in caplog.text


def test_ranks_that_would_go_apart_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="MONOLITH_SKIP_ALLREDUCE: without adding dense gradients every rank would train"
    ):
        RunnerConfig.from_env({"MONOLITH_SKIP_ALLREDUCE": "1"})
