"""Dense variables alone, kept by a `PartialRecoverySaver` with its index and retention."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from monolith.errors import StorageError
from monolith.original import PartialRecoverySaver
from monolith.original.checkpoint_state import get_checkpoint_state


def _variables(step: int) -> dict[str, torch.Tensor]:
    """What the variables are after `step` steps."""
    return {"weights": torch.arange(300, dtype=torch.float64) * step, "step": torch.tensor(step)}


def _restored(folder: Path) -> tuple[PartialRecoverySaver, dict[str, torch.Tensor]]:
    variables = _variables(0)
    saver = PartialRecoverySaver(variables, max_to_keep=2)
    state = get_checkpoint_state(folder / "model", sleep=lambda _: None)
    if state is not None:
        saver.restore(state.model_checkpoint_path)
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    return saver, variables


def main(arguments: list[str]) -> None:
    """Count steps, and save every second one."""
    folder, last = Path(arguments[0]), int(arguments[1])
    saver, variables = _restored(folder)
    for step in range(int(variables["step"]) + 1, last + 1):
        for name, value in _variables(step).items():
            variables[name].copy_(value)
        if step % 2 and step < last:
            continue
        try:
            saver.save(folder / "model" / "model.ckpt", global_step=step)
        except StorageError:
            continue
        sys.stdout.write(f"kept {step}\n")
        sys.stdout.flush()


def check(folder: Path, least: int) -> int:
    """All variables are those of one step."""
    _, variables = _restored(folder)
    step = int(variables["step"])
    assert step >= least, f"restored step {step}, but {least} had been kept"
    for name, value in _variables(step).items():
        assert torch.equal(variables[name], value), f"{name} is not that of step {step}"
    return step
