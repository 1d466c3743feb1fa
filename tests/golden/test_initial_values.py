"""An id's initial value is a promise to every table that was ever saved without that id.

These numbers may change only with a new major version: a model trained before would read other vectors for its unseen ids.
"""

import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import RandomNormal, RandomUniform, TruncatedNormal

GOLDEN = {
    "random_uniform": (
        RandomUniform(low=-0.05, high=0.05),
        [
            [0.03634912148118019, 0.026579666882753372, 0.02340468391776085],
            [-0.028364885598421097, 0.03473757579922676, 0.03366555646061897],
            [0.0038503706455230713, -0.02470041625201702, -0.029166584834456444],
        ],
    ),
    "random_normal": (
        RandomNormal(std=1.0),
        [
            [1.0961400270462036, 0.7250739932060242, 0.625098705291748],
            [-0.7845758199691772, 1.0252432823181152, 0.9808050990104675],
            [0.09666494280099869, -0.6650917530059814, -0.8122147917747498],
        ],
    ),
    "truncated_normal": (
        TruncatedNormal(std=1.0),
        [
            [1.023449420928955, 0.6861884593963623, 0.5929648876190186],
            [-0.7412950992584229, 0.9603883028030396, 0.9204747676849365],
            [0.09225386381149292, -0.6303443908691406, -0.7667836546897888],
        ],
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_initial_values_are_pinned(kind: str) -> None:
    initializer, expected = GOLDEN[kind]
    table = EmbeddingTable(TableConfig(name="golden", seed=7, segments=(Segment(dim=3, initializer=initializer),)))
    assert table.lookup(torch.tensor([0, -1, 2**63 - 1])).tolist() == expected
