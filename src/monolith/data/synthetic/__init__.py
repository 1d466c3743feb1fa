"""Synthetic data with known structure: a stream of clicks, and data shaped like Criteo's.

Both are sources: seeded, endless or bounded, resumable by one number, and sharded by batch.
"""

from monolith.data.synthetic.clicks import ClickStream, ClickStreamConfig, LateClicks
from monolith.data.synthetic.criteo import CriteoLike, CriteoLikeConfig, best_auc, write_parquet

__all__ = [
    "ClickStream",
    "ClickStreamConfig",
    "CriteoLike",
    "CriteoLikeConfig",
    "LateClicks",
    "best_auc",
    "write_parquet",
]
