"""Helpers for tests: table configurations and fault injection, for our own tests and for users'."""

from monolith.testing.tables import bit_flips, every_optimizer, scrambles, sgd_table_config, truncations

__all__ = ["bit_flips", "every_optimizer", "scrambles", "sgd_table_config", "truncations"]
