"""How the embedding of an id looks before its first update: a pure function of (seed, table name, id).

Example:
    >>> from monolith.table import RandomUniform
    >>> RandomUniform(low=-0.1, high=0.1)
    RandomUniform(kind='random_uniform', low=-0.1, high=0.1)
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from monolith.config import Config, Finite, NonNegative, Positive

__all__ = [
    "BatchSoftmaxInitializer",
    "Constant",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "XavierNormal",
    "XavierUniform",
    "Zeros",
]


class Zeros(Config):
    """Every element is 0."""

    kind: Literal["zeros"] = "zeros"


class Ones(Config):
    """Every element is 1."""

    kind: Literal["ones"] = "ones"


class Constant(Config):
    """Every element is `value`."""

    kind: Literal["constant"] = "constant"
    value: Finite
    """The value of every element."""


class BatchSoftmaxInitializer(Config):
    """The starting estimate of `BatchSoftmax`: an id is expected every `init_step_interval` steps."""

    kind: Literal["batch_softmax"] = "batch_softmax"
    init_step_interval: Annotated[int, Field(ge=1, le=2**24)]
    """Steps between two occurrences of an id, assumed until it has been observed."""


class RandomUniform(Config):
    """Uniform in [low, high)."""

    kind: Literal["random_uniform"] = "random_uniform"
    low: Finite = -0.05
    """Smallest possible value."""
    high: Finite = 0.05
    """Upper bound, never reached."""

    @model_validator(mode="after")
    def _ordered(self) -> RandomUniform:
        if not self.low <= self.high:
            raise ValueError(f"low must not exceed high, but low={self.low} and high={self.high}")
        return self


class RandomNormal(Config):
    """Normal with the given mean and standard deviation."""

    kind: Literal["random_normal"] = "random_normal"
    mean: Finite = 0.0
    """Mean of the distribution."""
    std: NonNegative = 0.05
    """Standard deviation."""


class TruncatedNormal(Config):
    """Normal, conditioned on lying within two standard deviations of the mean."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    mean: Finite = 0.0
    """Mean of the distribution."""
    std: NonNegative = 0.05
    """Standard deviation before truncation."""


class XavierUniform(Config):
    """Uniform with variance gain² / dim: fan-in and fan-out of a row are both its dim."""

    kind: Literal["xavier_uniform"] = "xavier_uniform"
    gain: Positive = 1.0
    """Scales the standard deviation."""


class XavierNormal(Config):
    """Normal with variance gain² / dim: fan-in and fan-out of a row are both its dim."""

    kind: Literal["xavier_normal"] = "xavier_normal"
    gain: Positive = 1.0
    """Scales the standard deviation."""


class HeUniform(Config):
    """Uniform with variance 2 / dim."""

    kind: Literal["he_uniform"] = "he_uniform"


class HeNormal(Config):
    """Normal with variance 2 / dim."""

    kind: Literal["he_normal"] = "he_normal"


Initializer = Annotated[
    Zeros
    | Ones
    | Constant
    | BatchSoftmaxInitializer
    | RandomUniform
    | RandomNormal
    | TruncatedNormal
    | XavierUniform
    | XavierNormal
    | HeUniform
    | HeNormal,
    Field(discriminator="kind"),
]
"""Any of the initializers above."""
