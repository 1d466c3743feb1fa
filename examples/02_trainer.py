"""The same model with `Estimator`: progress, metrics, a run that resumes, and an export that is loaded again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.serve import load
from monolith.table import Adagrad
from monolith.train import Estimator, Head, RunConfig
from monolith.train.hooks import ProgressHook, rich_lines

COLUMNS, DIM = ("user_id", "item_id", "category_id", "tag_ids"), 16
WORLD = {"users": 5_000, "items": 1_000, "new_items_per_hour": 500, "batch_size": 4096}


class ClickModel(nn.Module):
    """DeepFM: biases, a factorization machine and an MLP over the embeddings of four columns."""

    heads = (Head(name="click", label="label", group="user_id"),)

    def __init__(self) -> None:
        super().__init__()
        adagrad = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adagrad, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)  # "ids" [rows, columns, DIM], "ids.bias" [rows, columns, 1]
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


def main(steps: int, model_dir: Path) -> bool:
    torch.set_num_threads(1)  # for layers this small, more threads are slower
    stream = ClickStream(ClickStreamConfig(**WORLD))
    estimator = Estimator(ClickModel(), RunConfig(model_dir=str(model_dir), seed=0, event_time="event_time"))
    console = Console(highlight=False)
    step = estimator.train(stream, steps=steps, hooks=[ProgressHook(rich_lines(console), every_steps=100)])

    later = [stream.batch(number) for number in range(step, step + 10)]  # the batches of the next steps
    metrics = estimator.evaluate(later)
    console.print(f"step {step:,}, on the next {metrics['click/examples']:,} events:")
    for name in ("auc", "gauc", "log_loss", "calibration"):
        console.print(f"  {name:<12} {metrics[f'click/{name}']:.4f}")

    folder = estimator.export_saved_model()
    served = load(folder).predict(later[0])["click"]  # needs none of the code above
    (trained,) = estimator.predict(later[:1], yield_single_examples=False)
    equal = torch.allclose(served, trained["click"], rtol=0, atol=1e-6)
    console.print(f"exported to {folder}; its predictions are {'equal' if equal else 'NOT EQUAL'}", soft_wrap=True)
    return equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="batches of 4,096 impressions")
    parser.add_argument("--model-dir", type=Path, default=Path("build/examples/02_trainer"), help="continued next time")
    arguments = parser.parse_args()
    sys.exit(0 if main(arguments.steps, arguments.model_dir) else 1)
