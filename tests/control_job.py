"""The script of tests of operators: trains without end, as ranks, workers or alone, until it is ended by `monolith control`."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds

from monolith.data.sources.source import Source, SourcePosition
from monolith.features.batch import Batch
from monolith.train import Estimator, RunConfig
from training import ClickModel, batch_of


class Endless(Source):
    """Batches without end, of which shard i of n has every n-th."""

    def _start(self) -> SourcePosition:
        return {"next": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        for number in itertools.count(int(position["next"])):
            if number % self._shard_count == self._shard_index:
                yield batch_of(number % 7), {"next": number + 1}


def main() -> None:
    """Train, and say why it has ended."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    model = ClickModel()
    estimator = Estimator(
        model, RunConfig(**json.loads(sys.argv[1])), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    step = estimator.train(Endless())
    sys.stdout.write(
        json.dumps({"rank": estimator.runner.index, "step": step, "reason": estimator.trainer.stop_reason}) + "\n"
    )
    sys.stdout.flush()
    estimator.close()


if __name__ == "__main__":
    main()
