"""Danger: a process takes itself for another rank, or uses the threads of all ranks of its machine."""

from __future__ import annotations

import pytest

from monolith import ConfigError
from monolith.cluster import launched_rank, ranks_on_this_machine

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


@pytest.mark.parametrize(
    ("environ", "launcher"), [(MPIRUN, "mpirun"), (MPICH, "mpirun"), (TORCHRUN, "torchrun"), (SRUN, "srun")]
)
def test_every_launcher_says_rank_and_local_rank(environ: dict[str, str], launcher: str) -> None:
    rank = launched_rank(environ)
    assert rank is not None
    assert (rank.launcher, rank.rank, rank.size, rank.local_rank, rank.local_size) == (launcher, 5, 8, 1, 4)
    assert ranks_on_this_machine(environ) == 4


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4(x2),3", 2, 3), ("4(x2),3", 1, 4), ("1,7", 1, 7), ("5", 0, 5), ("", 0, 1)]
)
def test_nodes_of_slurm_may_have_different_numbers_of_tasks(tasks: str, node: int, expected: int) -> None:
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert ranks_on_this_machine(environ) == expected


def test_a_list_of_slurm_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_TASKS_PER_NODE: expected .* got '4\(y2\)'"):
        launched_rank({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(y2)"})


def test_a_rank_beyond_the_number_of_ranks_is_an_error_that_names_the_variables() -> None:
    with pytest.raises(ConfigError, match=r"^RANK: expected a number less than WORLD_SIZE, 2, got 5$"):
        launched_rank({"RANK": "5", "WORLD_SIZE": "2"})


def test_a_process_without_a_launcher_is_alone() -> None:
    assert launched_rank({}) is None
    assert launched_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert ranks_on_this_machine({}) == 1
    assert ranks_on_this_machine({"RANK": "1", "WORLD_SIZE": "2"}) == 1, "older launchers do not say it"


def test_our_launcher_counts_before_another() -> None:
    assert ranks_on_this_machine({**TORCHRUN, "MONOLITH_LOCAL_SIZE": "2"}) == 2
