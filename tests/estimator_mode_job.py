"""The script of the original's `estimator_mode_test`: one estimator in any mode, on batches of a data service."""

from __future__ import annotations

import argparse
import sys

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds

from cluster_job import COLUMNS, ClickModel
from monolith.dataservice import DatasetConfig
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.table import Adagrad
from monolith.train import Estimator, RunConfig

FIELDS = {"batches": 40, "batch_size": 16, "users": 50, "items": 50}


def main() -> None:
    """Train for ten steps, and say what this process was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stack", action="store_true", help="features of one dimension come as one tensor")
    parser.add_argument("--one-table", action="store_true", help="all features are in one table")
    parser.add_argument("--filter", action="store_true", help="an id gets a row when it has come a second time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = ClickModel(stack=options.stack, one_table=options.one_table)
    if options.filter:
        features = [
            Feature(
                name=name,
                dim=4,
                optimizer=Adagrad(learning_rate=0.1),
                slot=place + 1 if options.one_table else None,
                stack="all" if options.stack else None,
                occurrence_threshold=1,
            )
            for place, name in enumerate(COLUMNS)
        ]
        model.embeddings = EmbeddingBagCollection(features)
    estimator = Estimator(model, RunConfig(log_step_count_steps=5))
    step = estimator.train(DatasetConfig(kind="click_stream", fields=FIELDS, splits=8), max_steps=10)
    sys.stdout.write(f"{estimator.runner.server_type} {estimator.runner.index} ends at {step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
