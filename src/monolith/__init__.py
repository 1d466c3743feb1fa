"""Monolith for PyTorch: recommendation models on ids that never collide, trained in place.

The names here are those a user meets first. The others are in `monolith.data`, `features`, `metrics`, `nn`, `optim`,
`serve`, `table` and `train`.

Example:
    >>> import torch
    >>> from monolith import EmbeddingBagCollection, Feature
    >>> embeddings = EmbeddingBagCollection([Feature(name="user", dim=4), Feature(name="item", dim=8)])
    >>> batch = {"user": torch.tensor([7, -1]), "item": torch.tensor([2**60, 3])}
    >>> {name: list(vectors.shape) for name, vectors in embeddings(batch).items()}
    {'user': [2, 4], 'item': [2, 8]}
"""

from importlib import import_module
from typing import TYPE_CHECKING

from monolith.errors import (
    ConfigError,
    CorruptFileError,
    DivergedError,
    InvalidArgumentError,
    LogGapError,
    MonolithError,
    SchemaError,
    StorageError,
)
from monolith.exit_codes import end_with_exit_codes, is_launched

if TYPE_CHECKING:
    from monolith.features import Feature, Ragged
    from monolith.nn import EmbeddingBagCollection, Head, clip_grad_norm_
    from monolith.serve import Predictor, load
    from monolith.table import EmbeddingTable, Segment, TableConfig, get_num_threads, set_num_threads
    from monolith.train import Estimator, RunConfig, Trainer

    __version__: str
    """The version of the installed package."""

__all__ = [
    "ConfigError",
    "CorruptFileError",
    "DivergedError",
    "EmbeddingBagCollection",
    "EmbeddingTable",
    "Estimator",
    "Feature",
    "Head",
    "InvalidArgumentError",
    "LogGapError",
    "MonolithError",
    "Predictor",
    "Ragged",
    "RunConfig",
    "SchemaError",
    "Segment",
    "StorageError",
    "TableConfig",
    "Trainer",
    "clip_grad_norm_",
    "get_num_threads",
    "load",
    "set_num_threads",
]

# Loaded when first asked for: a command or a joiner that needs no model should not wait for torch, and who needs a table alone
# not for data sources and their packages.
_HOMES = {
    "EmbeddingBagCollection": "monolith.nn",
    "EmbeddingTable": "monolith.table",
    "Estimator": "monolith.train",
    "Feature": "monolith.features",
    "Head": "monolith.nn",
    "Predictor": "monolith.serve",
    "Ragged": "monolith.features",
    "RunConfig": "monolith.train",
    "Segment": "monolith.table",
    "TableConfig": "monolith.table",
    "Trainer": "monolith.train",
    "clip_grad_norm_": "monolith.nn",
    "get_num_threads": "monolith.table",
    "load": "monolith.serve",
    "set_num_threads": "monolith.table",
}

# Here, because a script may fail before it calls anything of a run: when it builds its model, or imports an optional package.
if is_launched():
    end_with_exit_codes()

# Not for type checkers: to them it would mean that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = import_module("importlib.metadata").version("monolith-torch")
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
