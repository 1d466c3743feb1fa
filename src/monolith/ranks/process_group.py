"""Adding tensors over all ranks with `torch.distributed`, in place of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from monolith.cluster.net import get_local_host
from monolith.errors import ConfigError
from monolith.ranks.dense import AllReduce, lost_in_torch
from monolith.ranks.mesh import Mesh
from monolith.ranks.states import broadcast_state

__all__ = ["all_reduce_over"]


@contextmanager
def all_reduce_over(
    mesh: Mesh, backend: Literal["gloo", "nccl"], device: torch.device, *, timeout_secs: float, host: str
) -> Iterator[AllReduce]:
    """Add tensors over the process group of torch for the time of a block. All ranks enter it together.

    A group that the script has made is used, and stays. Otherwise one is made, whose ranks find each other through the mesh.

    Args:
        mesh: the ranks.
        backend: "gloo" for tensors in main memory, "nccl" for those on a GPU.
        device: of the tensors.
        timeout_secs: after which a rank that does not come counts as lost.
        host: the address that the store of the group listens on, in rank 0.

    Raises:
        ConfigError: the backend does not fit the device, or the group of the script does not fit the ranks.
        RankLostError: a rank was lost before all had met.
    """
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"RunnerConfig.dense_backend: 'nccl' adds tensors on a GPU, and the dense part of the model is on {device}; set "
            "'gloo' or 'frames', or move it with RunConfig.device"
        )
    if backend == "nccl" and not distributed.is_nccl_available():
        raise ConfigError("RunnerConfig.dense_backend: this build of torch has no NCCL; set 'gloo' or 'frames'")
    ours = not distributed.is_initialized()
    if ours:
        with lost_in_torch("no process group could be made"):
            _make_group(mesh, backend, timedelta(seconds=timeout_secs), host)
    elif (distributed.get_rank(), distributed.get_world_size()) != (mesh.rank, mesh.size):
        raise ConfigError(
            f"torch.distributed: expected rank {mesh.rank} of {mesh.size}, as the run has it, the script has made rank "
            f"{distributed.get_rank()} of {distributed.get_world_size()}"
        )
    try:
        # At once: a group that is made by its first use ignores the timeout.
        with lost_in_torch("the ranks of a process group did not meet"):
            distributed.barrier()
        yield AllReduce(device if backend == "nccl" else torch.device("cpu"))
    finally:
        if ours:
            distributed.destroy_process_group()


def _make_group(mesh: Mesh, backend: str, timeout: timedelta, host: str) -> None:
    store: TCPStore | None = None
    address: object = None
    if mesh.rank == 0:
        reachable = host if host not in ("0.0.0.0", "::") else get_local_host()
        store = TCPStore(reachable, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = [reachable, store.port]
    found = cast("list[object]", broadcast_state(mesh, address))
    if store is None:
        store = TCPStore(str(found[0]), cast("int", found[1]), is_master=False, timeout=timeout)
    distributed.init_process_group(
        backend,
        # Every formation of a run has keys of its own: those of an earlier one have stale addresses.
        store=PrefixStore(f"monolith/{mesh.generation}", store),
        rank=mesh.rank,
        world_size=mesh.size,
        timeout=timeout,
    )
