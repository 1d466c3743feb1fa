"""Compare steps of the dense optimizers with a loop over parameters and with torch's optimizers.

python benchmarks/dense_optimizers.py

Interleaved, best of the rounds, one thread. The parameters are those of a small tower with many tensors and of a large one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from monolith.optim import Adamom, RMSprop

TOWERS = {
    "small": [(32, 64), (64,)] * 16,
    "large": [(845, 1024), (1024,), (1024, 1024), (1024,)] * 2 + [(1024, 1024)],
}
ROUNDS, STEPS = 15, 20


@torch.no_grad()
def adamom_loop(parameters: list[torch.Tensor], slots: list[list[torch.Tensor]]) -> None:
    """Adamom's rule parameter by parameter, the alternative to lists."""
    for w, (m, v, c) in zip(parameters, slots, strict=True):
        g = w.grad
        m.lerp_(g, 0.01)
        v.mul_(0.9999).addcmul_(g, g)
        c.mul_(0.9999).add_(1)
        w.addcdiv_(m, v.div(c).add_(1e-6).sqrt_(), value=-5e-6)


def contestants(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    def parameters() -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in found:
            parameter.grad = torch.randn(parameter.shape)
        return found

    looped = parameters()
    slots = [[torch.zeros_like(p) for _ in range(3)] for p in looped]
    return {
        "monolith Adamom": Adamom(parameters()).step,
        "Adamom by a loop": lambda: adamom_loop(looped, slots),
        "monolith RMSprop": RMSprop(parameters()).step,
        "torch RMSprop": torch.optim.RMSprop(parameters(), momentum=0.9).step,
        "torch Adam foreach": torch.optim.Adam(parameters(), foreach=True).step,
        "torch Adam": torch.optim.Adam(parameters(), foreach=False).step,
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for tower, shapes in TOWERS.items():
        steps = contestants(shapes)
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(STEPS):
                    step()
                best[name] = min(best[name], (time.perf_counter() - start) / STEPS)
        print(f"{tower}: {len(shapes)} tensors, {sum(map(math.prod, shapes)):,} numbers")
        for name, seconds in best.items():
            print(f"  {name:20} {seconds * 1e6:9.0f} us  {seconds / best['monolith Adamom']:5.2f}x")


if __name__ == "__main__":
    main()
