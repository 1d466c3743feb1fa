"""Danger: an estimator under a real `mpirun` does not train in one of the modes of the original's `estimator_mode_test`.

Full synchrony: ranks hold the rows, ids pass a filter. Partial ("sparse_dense"): rows on two servers, dense gradients added over
ranks. Both read from a dispatcher and a data worker. Fused layout is `stack`, native tables are `one_table`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import estimator_mode_job
from monolith.dataservice import DataDispatcher, DataWorker, DataWorkerConfig
from monolith.state import restore_points
from rank_processes import mpirun
from real_servers import INSTALL

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason=f"there is no mpirun (apt openmpi-bin); {INSTALL}"
)
LAYOUTS = {"plain": [], "stack": ["--stack"], "one_table": ["--one-table"], "both": ["--stack", "--one-table"]}


def matrix(always: str) -> pytest.MarkDecorator:
    """All four layouts, of which all but one run with the slow tests."""
    return pytest.mark.parametrize(
        "options",
        [
            pytest.param(options, id=name, marks=[] if name == always else [pytest.mark.slow])
            for name, options in LAYOUTS.items()
        ],
    )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[dict[str, str]]:
    with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        yield {
            "MONOLITH_USE_DATASERVICE": "true",
            "MONOLITH_DATA_SERVICE_DISPATCHER": dispatcher.address,
            "MONOLITH_MODEL_DIR": str(tmp_path / "model"),
        }


@matrix("both")
def test_full_synchrony(options: list[str], service: dict[str, str]) -> None:
    done = mpirun(
        2,
        estimator_mode_job.__file__,
        "--filter",
        *options,
        **service,
        MONOLITH_REORDER_FIDS_IN_DATA_PIPELINE="true",
        MONOLITH_ENABLE_ASYNC_OPTIMIZE="false",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == ["worker 0 ends at 10", "worker 1 ends at 10"]
    assert "reorder_fids_in_data_pipeline has no effect" in done.stderr
    assert restore_points(service["MONOLITH_MODEL_DIR"])[-1].step == 10


@matrix("plain")
def test_partial_synchrony(options: list[str], service: dict[str, str], tmp_path: Path) -> None:
    done = mpirun(
        4,
        estimator_mode_job.__file__,
        *options,
        **service,
        MONOLITH_ENABLE_SYNC_TRAINING="true",
        MONOLITH_ENABLE_PARTIAL_SYNC_TRAINING="true",
        MONOLITH_NUM_PS="2",
        MONOLITH_DISCOVERY_FOLDER=str(tmp_path / "discovery"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = sorted(line.rpartition(" at ")[0] for line in done.stdout.splitlines())
    assert lines == ["ps 0 ends", "ps 1 ends", "worker 0 ends", "worker 1 ends"]
    assert {line for line in done.stdout.splitlines() if line.startswith("worker")} == {
        "worker 0 ends at 10",
        "worker 1 ends at 10",
    }
    assert restore_points(service["MONOLITH_MODEL_DIR"])[-1].step == 10
