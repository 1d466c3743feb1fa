"""Danger: every thread of a server that predicts starts a team of threads of its own, which spin against each other.

torch keeps its number of threads for each thread, and a new one learns what `torch.set_num_threads` said only when something
asks. Matrix products do not. With 64 rows on a busy machine of two processors that took 1.5 ms of processor time instead of 0.17.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import export_model

SCRIPT = """
import os, sys, threading
import torch
from monolith.serve import load
torch.set_num_threads(1)
predictor = load(sys.argv[1])
batch = {"item": torch.arange(64)}  # in a new thread, arange would ask

def predict():
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        predictor.predict(batch)
    print(len(os.listdir("/proc/self/task")) - before)

thread = threading.Thread(target=predict)
thread.start()
thread.join()
"""


class Wide(nn.Module):
    heads = (Head(name="out", kind="regression"),)

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=416)])
        self.deep = nn.Sequential(nn.Linear(416, 128), nn.Linear(128, 1))

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.deep(self.embeddings(batch)["item"]).squeeze(1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor has no team")
def test_a_new_thread_uses_as_many_threads_as_torch_was_told(tmp_path: Path) -> None:
    model = Wide().eval()
    folder = export_model(model, {"item": torch.arange(4)}, tmp_path, heads=model.heads)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "0"
