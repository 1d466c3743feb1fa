"""Batch-level transforms."""

from monolith.data.transforms.rows import concat_rows, select_rows

__all__ = ["concat_rows", "select_rows"]
