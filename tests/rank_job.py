"""The script of the tests that run ranks as processes: the same for one process, ranks and servers, configured by the
environment alone. Prints one line of JSON when it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster_job import ClickModel
from monolith.cluster import launched_rank
from monolith.nn import dense_state_dict
from monolith.ranks.dense import dense_digest
from monolith.train import Estimator, RunConfig


def make_group(meeting: str) -> None:
    """Make the process group of torch, as its launcher says or through a file."""
    launched = launched_rank()
    assert launched is not None
    where = {} if meeting == "1" else {"init_method": f"file://{meeting}"}
    torch.distributed.init_process_group("gloo", rank=launched.rank, world_size=launched.size, **where)


def die_in_backward(after: int) -> Callable[..., None]:
    """Kill this process when the gradient of embeddings is known in pass `after`."""
    passes = 0

    def count(module: nn.Module, args: object, output: dict[str, torch.Tensor]) -> None:
        nonlocal passes
        passes += 1
        for rows in output.values():
            if passes == after and rows.requires_grad:
                rows.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))

    return count


def main() -> None:
    """Train, and say what came out."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    config = RunConfig(log_step_count_steps=2, seed=1, **json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    torch.manual_seed(1)
    model = ClickModel()
    if meeting := os.environ.get("RANK_JOB_DDP"):
        make_group(meeting)
        model.dense = DistributedDataParallel(model.dense)  # type: ignore[assignment]
        if os.environ.get("RANK_JOB_DIES") == str(torch.distributed.get_rank()):
            # After torch has begun to add, in the backward pass of the other rank.
            model.embeddings.register_forward_hook(die_in_backward(after=3))
    if os.environ.get("RANK_JOB_DROPOUT"):
        model.dense = nn.Sequential(nn.Dropout(0.4), model.dense)  # type: ignore[assignment]
    estimator = Estimator(model, config)
    step = estimator.train()
    if os.environ.get("RANK_JOB_ONLY_TRAINS"):
        said = {"rank": estimator.runner.index, "kind": estimator.runner.server_type, "step": step}
        weights = [parameter.flatten().tolist() for parameter in estimator.model.parameters()]
        sys.stdout.write(json.dumps({**said, "weights": weights}) + "\n")
        return
    metrics = estimator.evaluate(steps=2)
    predictions = sum(1 for _ in estimator.predict(estimator.data("predict"), yield_single_examples=False))
    found = {
        "auc": metrics["output/auc"],
        "evaluated": metrics["output/examples"],
        "global_step": estimator.global_step,
        "predicted": predictions,
        "rank": estimator.runner.index,
        "step": step,
        "dense": dense_digest(dense_state_dict(estimator.model).items()),
        "weights": [parameter.flatten().tolist() for parameter in estimator.model.parameters()],
        "rows": {name: stats.rows for name, stats in estimator.trainer.table_stats().items()},
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    estimator.close()


if __name__ == "__main__":
    main()
