"""Helpers for tests: table configurations and fault injection, for our own tests and for users'."""

from monolith.testing.damage import bit_flips, scrambles, truncations
from monolith.testing.tables import every_optimizer, sgd_table_config

__all__ = ["bit_flips", "every_optimizer", "scrambles", "sgd_table_config", "truncations"]
