"""A job as the documentation of torchrun shows it: gloo, `DistributedDataParallel`, checkpoints, resumed at the start.

torchrun --max-restarts 3 torchrun_job.py FOLDER. Every step is a line in `FOLDER/steps-<rank>`. It ends when there is a file
`FOLDER/last`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_STEPS = 20
TIMEOUT_SECS = 10


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_SECS))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, saved = 0, folder / "saved.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        step = state["step"]
    parallel = DistributedDataParallel(model)
    ended = torch.zeros(1)
    with (folder / f"steps-{rank}").open("a") as lines:
        while not ended:
            time.sleep(0.005)
            ids = torch.randint(1000, (32, 1))
            optimizer.zero_grad()
            parallel(ids).sum().backward()
            optimizer.step()
            step += 1
            lines.write(json.dumps([step, time.time(), os.getpid()]) + "\n")
            lines.flush()
            if step % SAVE_STEPS == 0 and rank == 0:
                torch.save({"model": model.state_dict(), "step": step}, folder / "saved.new")
                (folder / "saved.new").replace(saved)
            ended.fill_(float((folder / "last").exists()))
            dist.all_reduce(ended)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
